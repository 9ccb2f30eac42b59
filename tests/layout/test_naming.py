"""Namings as data: what a rule makes of a tensor, and what is refused, in rules and in tensors."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.engine.memory import read_boxes
from ckpt_tool.errors import LayoutError, UsageError
from ckpt_tool.geometry.box import Box
from ckpt_tool.layout.naming import Renaming, rename
from ckpt_tool.layout.naming_match import choose_naming, match_names
from ckpt_tool.layout.naming_rules import builtin_namings, load_naming
from ckpt_tool.layout.naming_sizes import Fact
from ckpt_tool.layout.views import apply_views
from ckpt_tool.storage.memory import MemoryStore
from tests.strategies import partitions
from tests.synthetic import limits, make_source

HEAD = """
[naming]
name = "mine"
layers = 'l\\.(?:(?P<layer>\\d+)\\.)?'
experts = 'e\\.(?:(?P<expert>\\d+)\\.)?'
"""


def renamed(
    rules: str, shapes: Mapping[str, tuple[int, ...]], facts: Mapping[str, int] | None = None, *, is_whole: bool = True
) -> Renaming:
    """What rules make of tensors."""
    naming = load_naming(HEAD + rules, source="test")
    known = {name: Fact(value, "the test") for name, value in (facts or {}).items()}
    return rename(naming, match_names(naming, shapes), shapes, known, is_whole=is_whole)


@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 3))
def test_parts_of_groups_of_layers_and_experts(data: st.DataObject, layers: int, groups: int, unit: int) -> None:
    """Parts of unequal weight in repeating groups, of every layer and expert, in halves or not: numpy's own values."""
    is_halved = data.draw(st.booleans())
    weights = (2, 4, 2) if is_halved else (3, 1, 2)
    experts, rows = 2, groups * sum(weights) * unit
    fused = np.arange(layers * experts * rows * 3, dtype=np.int32).reshape(layers, experts, rows, 3)
    parts = ", ".join(f'{{ name = "{name}", weight = {weight} }}' for name, weight in zip("abc", weights, strict=True))
    rules = f"""
        [[rule]]
        match = '{{layers}}{{experts}}w'
        to = "{{layer}}.{{expert}}.{{part}}"
        groups = "n"
        halves = {str(is_halved).lower()}
        parts = [{parts}]
    """
    views = renamed(rules, {"l.e.w": fused.shape}, {"n": groups}).views
    expected: dict[str, npt.NDArray[Any]] = {}
    for layer, expert in product(range(layers), range(experts)):
        start = 0
        for name, weight in zip("abc", weights, strict=True):
            in_groups = fused[layer, expert].reshape(groups, -1, 3)[:, start * unit : (start + weight) * unit]
            if is_halved:
                in_groups = np.concatenate([in_groups[:, ::2], in_groups[:, 1::2]], axis=1)
            expected[f"{layer}.{expert}.{name}"] = in_groups.reshape(-1, 3)
            start += weight
    source = make_source({"l.e.w": fused}, {"l.e.w": data.draw(partitions(fused.shape))})
    manifest = apply_views(source.manifest, views)
    boxes = [(view.fqn, Box.whole(view.shape)) for view in views]
    arrays = read_boxes(manifest, MemoryStore(source.files), boxes, limits=limits())
    found = {fqn: array.tolist() for (fqn, _), array in zip(boxes, arrays, strict=True)}
    assert found == {fqn: array.tolist() for fqn, array in expected.items()}


def test_views_are_in_natural_order_whatever_the_source() -> None:
    """Stacked layers and numbered ones give the same list; layer 10 comes behind layer 9."""
    rules = "[[rule]]\nmatch = '{layers}w'\nto = 'x.{layer}.w'\n[[rule]]\nmatch = 'z'\nto = 'a'"
    stacked = renamed(rules, {"z": (2,), "l.w": (11, 2)})
    numbered = renamed(rules, {**{f"l.{n}.w": (2,) for n in reversed(range(11))}, "z": (2,)})
    assert [view.fqn for view in stacked.views] == ["a", *(f"x.{n}.w" for n in range(11))]
    assert [(v.fqn, v.shape) for v in stacked.views] == [(v.fqn, v.shape) for v in numbered.views]


def test_rows_and_drops_are_reported() -> None:
    """Rows behind the fact are dropped with its evidence, tensors with the rule's reason; without the fact all stay."""
    rules = "[[rule]]\nmatch = 't'\nto = 'u'\nrows = 'vocab'\n[[rule]]\nmatch = 'b'\ndrop = 'a buffer'"
    cut = renamed(rules, {"t": (8, 2), "b": (1,)}, {"vocab": 5})
    assert [(view.fqn, view.shape) for view in cut.views] == [("u", (5, 2))]
    assert cut.dropped == (("t[5:8]", "padding: the test"), ("b", "a buffer"))
    whole = renamed(rules, {"t": (8, 2)})
    assert ([view.shape for view in whole.views], whole.dropped) == ([(8, 2)], ())
    with pytest.raises(LayoutError, match="t: has 8 rows, fewer than vocab = 9"):
        renamed(rules, {"t": (8, 2)}, {"vocab": 9})


QKV = """
[[rule]]
match = '{layers}qkv'
to = '{layer}.{part}'
groups = "kv"
parts = [{ name = "q", weight = "heads/kv" }, { name = "k" }]
unit = "size"
witness = { tensor = ['qkv$', 'o'], dim = -1, part = "q" }
[[rule]]
match = '{layers}o'
to = '{layer}.o'
"""


@pytest.mark.parametrize(
    ("shape", "facts", "message"),
    [
        ((12, 2), {"heads": 4}, r"mine needs kv, which the checkpoint does not tell"),
        ((12, 2), {"heads": 3, "kv": 2}, r"heads/kv is no whole number above 0 with heads = 3 .*, kv = 2"),
        ((13, 2), {"heads": 4, "kv": 2}, r"13 rows are not 2 groups of 3 equal pieces \[2, 1\] with heads = 4"),
        ((12, 2), {"heads": 4, "kv": 2, "size": 3}, r"12 rows make size 2 .*, expected 3 \(the test\)"),
        ((12, 2), {"heads": 1, "kv": 1}, r"part 'q' has 6 rows .* but l.0.o \[2, 8\] says 8"),
    ],
)
def test_facts_are_checked_against_shapes(shape: tuple[int, int], facts: dict[str, int], message: str) -> None:
    """A fact that is missing, that gives no whole sizes, or that another size contradicts."""
    assert len(renamed(QKV, {"l.0.qkv": (12, 2), "l.0.o": (2, 8)}, {"heads": 4, "kv": 2}).views) == 3
    with pytest.raises(LayoutError, match=message):
        renamed(QKV, {"l.0.qkv": shape, "l.0.o": (2, 8)}, facts)


@pytest.mark.parametrize(
    ("shapes", "facts", "message"),
    [
        ({"l.0.w": (2,), "l.2.w": (2,)}, {}, "1 layer is missing: 1"),
        ({"l.w": (3, 2)}, {"layers": 2}, r"1 layer is too many: 2 \(the test says 2\)"),
        ({"l.e.0.w": (3, 2), "l.e.2.w": (3, 2)}, {}, r"x.0.\{expert\}: 1 expert is missing: 1"),
        ({"l.w": ()}, {}, r"l.w: shape \[\] does not count layer"),
        ({"l.w": (2,), "l.0.w": ()}, {}, "'l.w' and 'l.0.w' would both be called 'x.0'"),
        ({"l.w": (2,), "other": (1,), "and": (1,)}, {}, "mine has no name for 2 of 3 tensors"),
    ],
)
def test_what_would_lose_a_tensor_is_refused(
    shapes: dict[str, tuple[int, ...]], facts: dict[str, int], message: str
) -> None:
    """Missing and superfluous layers and experts, one name for two tensors, tensors without a rule."""
    rules = "[[rule]]\nmatch='{layers}w'\nto='x.{layer}'\n[[rule]]\nmatch='{layers}{experts}w'\nto='x.{layer}.{expert}'"
    with pytest.raises(LayoutError, match=message):
        renamed(rules, shapes, facts)


def test_a_part_of_the_model_may_lack_layers() -> None:
    """What was left out on purpose is not missed."""
    rules = "[[rule]]\nmatch='{layers}w'\nto='x.{layer}'"
    assert [view.fqn for view in renamed(rules, {"l.7.w": (2,)}, {"layers": 9}, is_whole=False).views] == ["x.7"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[naming", "not valid TOML"),
        ("[[rules]]", "unknown key 'rules'"),
        ("[[rule]]\nmatch = 'a'\nto = 'b'\nkind = 'column'", "rule 1: unknown key 'kind'"),
        ("[[rule]]\nmatch = 'a'", "either to or drop"),
        ("[[rule]]\nmatch = 'a'\nto = 'b'\ndrop = 'c'", "either to or drop"),
        ("[[rule]]\nmatch = '(a'\nto = 'b'", "is no regular expression"),
        ("[[rule]]\nmatch = 'a'\nto = '{layer}'", r"uses \['layer'\], known are \[\]"),
        ("[[rule]]\nmatch = 'a'\nto = '{0.__class__}'", "uses"),
        ("[[rule]]\nmatch = 'a'\nto = '{part}'\nparts = [1]", "a part is a name"),
        ("[[rule]]\nmatch = 'a'\nto = 'b'\ngroups = 'x+1'", "a size is a number or facts"),
        ("[[rule]]\nmatch = 'a'\nto = 'b'\ngroups = 2\nrows = 'vocab'", "rows goes without"),
        ("[[rule]]\nmatch = 'a'\nto = '{part}'\nparts = ['p']\nwitness = { tensor = ['a', 'b'], dim = 0, part = 'q' }",
         "a witness needs"),
        ("[[rule]]\nmatch = 'a'\nto = 'b'\nwitness = { tensor = ['a', 'b'], dim = 0, times = 0 }",
         "a witness needs .* times"),
        ("[[rule]]\nmatch = 'a'\nto = 'b'\nwitness = { tensor = ['a', 'b'], dim = 0, part = 'q' }",
         "unknown key 'part'"),
        ("[[rule]]\nmatch = 'a'\nto = 'b'\njoined = true", "joined goes with parts"),
        ("[[rule]]\nmatch = 'a'\nto = 'b'\nrows = 'vocab'\ntransposed = true", "rows goes without"),
        ("[facts]\nheads = 'many'", "fact heads must be a number above 0"),
        ("[naming]\nbase = 'nothing'", "unknown base 'nothing'"),
    ],
)  # fmt: skip
def test_rules_that_are_wrong_are_refused(text: str, message: str) -> None:
    """What is wrong in a file, and where."""
    with pytest.raises(LayoutError, match=message):
        load_naming(text, source="mine.toml")


def test_naming_is_told_from_names() -> None:
    """Per-head norms of queries and keys, and shared experts, are Qwen's; Llama's own names need no naming."""
    prefix = "model.module.decoder.layers."
    names = [
        "model.module.embedding.word_embeddings.weight", f"{prefix}self_attention.linear_qkv.weight",
        f"{prefix}mlp.router.weight", f"{prefix}mlp.experts.experts.linear_fc1.weight",
    ]  # fmt: skip
    with pytest.raises(LayoutError, match="equally well"):
        choose_naming(names, family=None)
    shared = choose_naming([*names, f"{prefix}mlp.shared_experts.linear_fc2.weight"], family=None)
    assert shared is not None
    assert shared.naming.name == "megatron-qwen_moe"
    normed = [*names, f"{prefix}self_attention.q_layernorm.weight"]
    found = choose_naming(normed, family=None)
    assert found is not None
    assert found.naming.name == "megatron-qwen_moe"
    with pytest.raises(LayoutError, match=r"not those of mixtral: some fit '\[qk\]_layernorm"):
        choose_naming(normed, family="mixtral")
    assert choose_naming(["model.layers.0.self_attn.q_proj.weight"], family=None) is None
    with pytest.raises(LayoutError, match="the names are not those of mixtral"):
        choose_naming(["model.layers.0.self_attn.q_proj.weight"], family="mixtral")
    with pytest.raises(UsageError, match="no naming is called 'lama'"):
        choose_naming(names, family="lama")


@pytest.mark.parametrize("fact", ["rotary_interleaved", "apply_layernorm_1p"])
def test_what_no_copy_of_bytes_gives_is_refused(fact: str) -> None:
    """A run whose values mean something else than transformers' is not renamed."""
    naming = builtin_namings()["megatron-llama"]
    shapes = {"decoder.final_layernorm.weight": (4,)}
    matches = match_names(naming, shapes)
    off = rename(naming, matches, shapes, {fact: Fact(0, "args")}, is_whole=True)
    assert [view.fqn for view in off.views] == ["model.norm.weight"]
    with pytest.raises(LayoutError, match=r"transformers has halves|stored minus one"):
        rename(naming, matches, shapes, {fact: Fact(1, "args")}, is_whole=True)
