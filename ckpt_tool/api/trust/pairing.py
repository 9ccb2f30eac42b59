"""Which tensor of one checkpoint belongs to which of another: by name, or by what a name becomes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import product

from ckpt_tool.api.convert.names import module_names, replaced
from ckpt_tool.api.trust.name_hints import NameHint, family_hint, name_hint
from ckpt_tool.compare.tiles import Pair
from ckpt_tool.errors import UsageError
from ckpt_tool.layout.names import spellings
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.select import texts
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["NameMap", "Pairing", "is_noise", "name_map", "pair_tensors"]

NameMap = Callable[[str], str]
"""What a tensor of A is called in B."""

# State that no two savings share: Transformer Engine's and Megatron's per-module extra state, random states of ranks.
_NOISE = re.compile(
    r"(?:^|[./])(?:_extra_state\d*|extra_state|(?:cuda_|torch_|numpy_|python_|random_)?rng(?:_states?)?(?:_\d+)?"
    r"|random_states?(?:_\d+)?)(?:$|[./_])"
)


@dataclass(frozen=True, slots=True)
class Pairing:
    """Pairs, and what has no partner."""

    pairs: tuple[Pair, ...]
    only_a: tuple[int, ...]
    """Rows of A's tensor table."""
    only_b: tuple[int, ...]
    notes: tuple[str, ...]
    hint: NameHint | None = None
    """What would bring together most of what has no partner."""


def is_noise(fqn: str) -> bool:
    """Whether a tensor is state that differs from one saving to the next and says nothing of the model.

    >>> is_noise("layers.0.attn._extra_state"), is_noise("rng_state.0"), is_noise("layers.0.weight")
    (True, True, False)
    """
    return _NOISE.search(fqn) is not None


def name_map(replacements: Sequence[tuple[str, str]], strip_prefixes: str | Sequence[str]) -> NameMap:
    r"""The map that applies regular expressions in order, and then takes off the first prefix that fits.

    A pattern is one of Python's, with or without ``re:`` before it; in what replaces it ``\1`` is its first group.

    >>> name_map([(r"re:^model\.(.*)", r"\1")], ["module."])("model.module.w")
    'w'

    Raises:
        UsageError: a pattern or what replaces it cannot be read.
    """
    compiled, prefixes = [_compiled(pattern, text) for pattern, text in replacements], texts(strip_prefixes)

    def mapped(fqn: str) -> str:
        for pattern, text in compiled:
            fqn, _ = replaced(pattern, text, fqn)
        prefix = next((prefix for prefix in prefixes if fqn.startswith(prefix)), "")
        return fqn[len(prefix) :]

    return mapped


def _compiled(pattern: str, text: str) -> tuple[re.Pattern[str], str]:
    try:
        compiled = re.compile(pattern.removeprefix("re:"))
        re.compile(f"{compiled.pattern}|").sub(text, "")  # the alternative matches, so that the text is expanded
    except (re.error, IndexError) as error:
        raise UsageError(f"names cannot be mapped from {pattern!r} to {text!r}: {error}") from error
    return compiled, text


def pair_tensors(
    a: Manifest, b: Manifest, rows_a: Sequence[int], rows_b: Sequence[int], *, mapped: NameMap, is_auto: bool
) -> Pairing:
    """Pairs of tensors of equal names.

    Args:
        a: A's manifest.
        b: B's manifest.
        rows_a: tensors of A that take part.
        rows_b: tensors of B that take part.
        mapped: applied to A's names, and to B's too: what is taken off on one side may be there on the other.
        is_auto: what is left is paired without the trainer's outer key and wrappers' prefixes, where that makes names
            of both sides meet one to one.

    Raises:
        UsageError: the map gives two tensors of one side the same name.
    """
    names_a, names_b = _names(a, rows_a, mapped), _names(b, rows_b, mapped)
    pairs = [Pair(row, names_b[name]) for name, row in names_a.items() if name in names_b]
    left_a = [row for name, row in names_a.items() if name not in names_b]
    left_b = [row for name, row in names_b.items() if name not in names_a]
    if not (left_a and left_b):
        return Pairing(tuple(pairs), tuple(left_a), tuple(left_b), ())
    met = _meetings(_spellings(a, left_a), _spellings(b, left_b))
    if not is_auto:
        said = f"{counted(len(met), 'tensor')} would meet without outer keys and wrapper prefixes"
        hint = NameHint(said, "--names auto") if met else _hint(a, b, left_a, left_b, mapped)
        return Pairing(tuple(pairs), tuple(left_a), tuple(left_b), (), hint)
    used_a, used_b = {pair.row_a for pair in met}, {pair.row_b for pair in met}
    notes: tuple[str, ...] = ()
    if met:
        one, other = a.tensors.fqns[met[0].row_a], b.tensors.fqns[met[0].row_b]
        text = (
            f"{counted(len(met), 'tensor', 'were')} paired without outer keys and wrapper prefixes: {one} with {other}"
        )
        notes = (text,)
    left_a = [row for row in left_a if row not in used_a]
    left_b = [row for row in left_b if row not in used_b]
    return Pairing((*pairs, *met), tuple(left_a), tuple(left_b), notes, _hint(a, b, left_a, left_b, mapped))


def _hint(a: Manifest, b: Manifest, left_a: Sequence[int], left_b: Sequence[int], mapped: NameMap) -> NameHint | None:
    rows = [{mapped(side.tensors.fqns[row]): row for row in left} for side, left in ((a, left_a), (b, left_b))]

    def alike(name: str, other: str) -> bool:
        return a.tensors.shape_of(rows[0][name]) == b.tensors.shape_of(rows[1][other])

    names = [list(side) for side in rows]
    return family_hint(*names) or name_hint(*names, alike=alike)


def _names(manifest: Manifest, rows: Sequence[int], mapped: NameMap) -> dict[str, int]:
    names: dict[str, int] = {}
    for row in rows:
        fqn = manifest.tensors.fqns[row]
        name = mapped(fqn)
        if name in names:
            raise UsageError(
                f"{manifest.tensors.fqns[names[name]]!r} and {fqn!r} would both be called {name!r}",
                where=manifest.where,
                hint="make the pattern more exact, or leave one out with --exclude",
            )
        names[name] = row
    return names


def _spellings(manifest: Manifest, rows: Sequence[int]) -> dict[int, list[str]]:
    """What each tensor may be called, from the name that its module gives it to the one without any known prefix."""
    tensors = manifest.tensors
    paths = [tensors.paths[row] if tensors.paths is not None else (tensors.fqns[row],) for row in rows]
    found: dict[int, list[str]] = {}
    for row, name in zip(rows, module_names(paths), strict=True):
        names = (
            tensors.fqns[row],
            name,
            *(spelling.parameter for spelling in spellings(name, {}) if not spelling.slot),
        )
        found[row] = list(dict.fromkeys(names))
    return found


def _meetings(a: dict[int, list[str]], b: dict[int, list[str]]) -> list[Pair]:
    """Pairs that share a spelling, those for which less is taken off first; only names that one tensor a side has."""
    pairs: list[Pair] = []
    a, b = dict(a), dict(b)
    depth = max((len(names) for side in (a, b) for names in side.values()), default=0)
    steps = sorted(product(range(depth), repeat=2), key=lambda each: (sum(each), each))
    for taken_a, taken_b in steps:
        names_a, names_b = _at_depth(a, taken_a), _at_depth(b, taken_b)
        for name in names_a.keys() & names_b.keys():
            pair = Pair(names_a[name], names_b[name])
            pairs.append(pair)
            del a[pair.row_a], b[pair.row_b]
    return sorted(pairs, key=lambda pair: pair.row_a)


def _at_depth(names: dict[int, list[str]], depth: int) -> dict[str, int]:
    """Rows by one of their spellings, without those that share it."""
    rows: dict[str, list[int]] = {}
    for row, spelt in names.items():
        if depth < len(spelt):
            rows.setdefault(spelt[depth], []).append(row)
    return {name: found[0] for name, found in rows.items() if len(found) == 1}
