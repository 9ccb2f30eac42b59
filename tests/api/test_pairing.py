from __future__ import annotations

from collections.abc import Sequence

import pytest

from ckpt_tool.api.trust.pairing import is_noise, name_map, pair_tensors
from ckpt_tool.dtypes import dtype
from ckpt_tool.errors import UsageError
from ckpt_tool.manifest.model import KeyPath, Manifest, TensorMeta
from tests.checks.synthetic import make


def named(*names: str | KeyPath) -> Manifest:
    """Tensors of these names, or at these paths."""
    paths = [(name,) if isinstance(name, str) else name for name in names]
    kind = dtype("float32")
    return make([TensorMeta(".".join(map(str, path)), kind, (2,), "model", path) for path in paths], [])


def paired(
    a: Manifest,
    b: Manifest,
    replacements: Sequence[tuple[str, str]] = (),
    prefixes: Sequence[str] = (),
    *,
    is_auto: bool = True,
) -> tuple[dict[str, str], list[str], list[str], tuple[str, ...]]:
    """Names that meet, names that only one side has, and notes."""
    found = pair_tensors(
        a,
        b,
        range(len(a.tensors)),
        range(len(b.tensors)),
        mapped=name_map(replacements, prefixes),
        is_auto=is_auto,
    )
    return (
        {a.tensors.fqns[pair.row_a]: b.tensors.fqns[pair.row_b] for pair in found.pairs},
        [a.tensors.fqns[row] for row in found.only_a],
        [b.tensors.fqns[row] for row in found.only_b],
        found.notes,
    )


def test_equal_names_meet() -> None:
    """Names pair where they are equal; the rest is on one side only."""
    assert paired(named("w", "x"), named("x", "y")) == ({"x": "x"}, ["w"], ["y"], ())


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (("model", "h.0.w"), "h.0.w"),
        (("state_dict", "module._orig_mod.h.0.w"), "h.0.w"),
        ("module.h.0.w", "h.0.w"),
        ("h.0._fsdp_wrapped_module.w", "h.0.w"),
        (("model", "model.h.0.w"), "model.h.0.w"),
        ("model.model.h.0.w", "model.h.0.w"),
        ("_orig_mod.h.0.w", ("model", "h.0.w")),
    ],
)
def test_wrappers_are_seen_through(a: str | KeyPath, b: str | KeyPath) -> None:
    """Outer keys and prefixes of wrappers on either side do not part what belongs together, and it is said."""
    one, other = named(a), named(b)
    pairs, only_a, only_b, notes = paired(one, other)
    assert (pairs, only_a, only_b) == ({one.tensors.fqns[0]: other.tensors.fqns[0]}, [], [])
    assert "without outer keys and wrapper prefixes" in notes[0]
    assert paired(one, other, is_auto=False)[0] == {}


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        (("w", "v"), ("student.w", "student.v"), "B have 'student.' in front of those of A: --strip-prefix student. "),
        (("policy.w", "policy.v"), ("actor.w", "actor.v"), ": --strip-prefix policy. --strip-prefix actor. "),
        (("o.s.w", "o.s.v"), ("o.s.net.w", "o.s.net.v"), r" --map-names 're:(^|[./])net\.=>\1' "),
        (("w", "v", "u"), ("student.w", "x", "y"), None),
    ],
)
def test_what_would_bring_names_together_is_said(a: tuple[str, ...], b: tuple[str, ...], said: str | None) -> None:
    """A front that no wrapper is known for is named with the option that takes it off, and pairs nothing by itself."""
    one, other = named(*a), named(*b)
    found = pair_tensors(one, other, range(len(a)), range(len(b)), mapped=name_map((), ()), is_auto=True)
    assert found.pairs == ()
    assert (found.hint is None) if said is None else (found.hint is not None and said in found.hint.text)


def test_ambiguous_names_do_not_meet() -> None:
    """Where two tensors of a side would get one name, neither is taken for the other side's."""
    pairs, only_a, only_b, _ = paired(named("module.w", "_orig_mod.w"), named("w"))
    assert (pairs, len(only_a), only_b) == ({}, 2, ["w"])


def test_less_is_taken_off_first() -> None:
    """A name with one prefix meets before one with two."""
    pairs, only_a, _, _ = paired(named("model.model.w", "model.w"), named("w"))
    assert (pairs, only_a) == ({"model.w": "w"}, ["model.model.w"])


def test_maps() -> None:
    """Regular expressions apply in order to both sides, then a prefix is taken off."""
    replacements = [(r"re:^transformer\.(.*)", r"\1"), (r"\.attn\.", ".self_attn.")]
    a, b = named("transformer.h.0.attn.q", "net.x"), named("h.0.self_attn.q", "x")
    assert paired(a, b, replacements, ["net."])[0] == {"transformer.h.0.attn.q": "h.0.self_attn.q", "net.x": "x"}


@pytest.mark.parametrize(("pattern", "text"), [("(", ""), ("(a)", r"\2"), ("a", r"\g<no>")])
def test_maps_that_cannot_be_read(pattern: str, text: str) -> None:
    """A bad pattern or replacement is an error of usage before anything is compared."""
    with pytest.raises(UsageError, match="names cannot be mapped"):
        name_map([(pattern, text)], ())


def test_maps_that_make_two_of_one() -> None:
    """A map under which two tensors of a side get one name is refused with both names."""
    with pytest.raises(UsageError, match=r"'h.0' and 'h.1' would both be called 'h'"):
        paired(named("h.0", "h.1"), named("h"), [(r"\.\d", "")])


@pytest.mark.parametrize(
    ("fqn", "expected"),
    [
        ("layers.0.self_attention._extra_state", True),
        ("layers.0._extra_state3", True),
        ("rng_state", True),
        ("rng_states.cuda.0", True),
        ("random_state", True),
        ("rng.torch", True),
        ("cuda_rng_state", True),
        ("layers.0.rngs_weight", False),
        ("model.wrong.weight", False),
        ("model.string.weight", False),
    ],
)
def test_noise(fqn: str, expected: bool) -> None:
    """Random and extra state is told from weights by whole words."""
    assert is_noise(fqn) is expected
