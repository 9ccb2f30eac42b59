"""Parallel rules say how a weight of per-rank files is cut over tensor-parallel ranks; they are data, by name.

Per-rank files record no cut: what no rule knows is an error that asks for one. Rules that lie beside the checkpoint, in
``ckpt-megatron.toml`` of the same form as ``parallel.toml``, come before the built-in ones.

A fused weight consists of parts, each of which is cut by itself: their rows are given as numbers (or proportions), or
by other tensors of the layer, as ``mixer.out_proj.weight[1]``; what is called ``rest`` shares what is left evenly.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib import resources
from typing import Any

from ckpt_tool.errors import FormatError, LayoutError
from ckpt_tool.formats._pickle.tensors import TensorRef
from ckpt_tool.geometry.box import Box
from ckpt_tool.geometry.runs import contiguous_strides
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "CUTS", "OWN_RULES", "Cut", "ParallelRules", "built_in_rules", "part_rows", "placed_parts", "placed_views", "view",
]  # fmt: skip

OWN_RULES = "ckpt-megatron.toml"
CUTS = ("column", "row", "gated", "fused", "whole", "buffer")
_DOCUMENT_KEYS = ("rule", "before", "local_names", "before_mcore")
_RULE_KEYS = ("names", "cut", "parts", "keys")
_REST = "rest"
_MAX_ROWS = 1 << 48
_SIZE_OF = re.compile(r"(?P<name>[^\[\]]+)\[(?P<dim>[0-9])\]")


@dataclass(frozen=True, slots=True)
class Cut:
    """How a weight is spread over tensor-parallel ranks."""

    kind: str
    """One of `CUTS`."""
    parts: tuple[int | str, ...] = ()
    """Of a fused weight: rows of each part or their proportions, or where each number of rows stands."""
    keys: tuple[str, ...] = ()
    """What distributed checkpoints put behind the weight's key for each part; none where they have it in one."""


@dataclass(frozen=True)
class ParallelRules:
    """Rules in order, and the names of mcore's own modules."""

    rules: tuple[tuple[re.Pattern[str], Cut], ...]
    local_names: Mapping[str, str]
    before: re.Pattern[str] | None = None
    """What stands in front of names of layers outside the decoder."""
    before_mcore: tuple[tuple[re.Pattern[str], str], ...] = ()
    """What names of models from before mcore match, and what they became."""

    def cut(self, name: str) -> str | None:
        """The kind of cut of the weight called ``name``, None when no rule fits."""
        found = self.rule(name)
        return None if found is None else found.kind

    def rule(self, name: str) -> Cut | None:
        """How the weight called ``name`` is cut, None when no rule fits."""
        front = None if self.before is None else self.before.match(name)
        name = name if front is None else name[front.end() :]
        return next((cut for pattern, cut in self.rules if pattern.fullmatch(name)), None)

    def with_own(self, text: str, where: str) -> ParallelRules:
        """These rules behind those in ``text``.

        Raises:
            FormatError: ``text`` is no such file.
        """
        return replace(self, rules=(*_parsed(text, where).rules, *self.rules))


@lru_cache(maxsize=1)
def built_in_rules() -> ParallelRules:
    """The rules of ``parallel.toml``."""
    text = resources.files("ckpt_tool.formats.megatron").joinpath("parallel.toml").read_text("utf-8")
    return _parsed(text, "parallel.toml")


def _parsed(text: str, where: str) -> ParallelRules:
    try:
        document = tomllib.loads(text)
        _check_keys(document, _DOCUMENT_KEYS, where)
        rules = []
        for number, rule in enumerate(document.get("rule", []), start=1):
            _check_keys(rule, _RULE_KEYS, f"{where}: rule {number}")
            if not isinstance(rule.get("names"), list) or "cut" not in rule:
                raise FormatError(
                    f"names = {rule.get('names')!r}, cut = {rule.get('cut')!r}, expected a list of names and a cut: "
                    f'names = ["mlp.my.weight"] and cut = "column"',
                    where=f"{where}: rule {number}",
                )
            cut = _cut_of(rule, f"{where}: rule {number}")
            rules += [(re.compile(name), cut) for name in rule["names"]]
        before = re.compile(document["before"]) if "before" in document else None
        old = tuple((re.compile(name), to) for name, to in document.get("before_mcore", {}).items())
        return ParallelRules(tuple(rules), dict(document.get("local_names", {})), before, old)
    except (tomllib.TOMLDecodeError, TypeError, AttributeError, re.error) as error:
        raise FormatError(f"no file of parallel rules: {error}", where=where) from error


def _check_keys(table: Any, known: tuple[str, ...], where: str) -> None:
    """Nothing, where a table says only what it can say: a word that is not known would count for nothing.

    Raises:
        FormatError: it says more, or is no table.
    """
    strange = [key for key in table if key not in known] if isinstance(table, dict) else [str(table)]
    if strange:
        raise FormatError(f"{strange[0]!r} is not known here", where=where, hint=f"known are {', '.join(known)}")


def _cut_of(rule: Mapping[str, Any], where: str) -> Cut:
    """The cut that an entry of a file describes.

    Raises:
        FormatError: it describes none.
    """
    kind, parts, keys = rule["cut"], rule.get("parts", []), rule.get("keys", [])
    if kind not in CUTS:
        raise FormatError(f"cut {kind!r}, expected one of {', '.join(CUTS)}", where=where)
    if not isinstance(parts, list) or (kind == "fused") != bool(parts):
        wanted = "parts = [4, 2, 6]" if kind == "fused" else 'parts for cut = "fused" alone'
        raise FormatError(f"cut = {kind!r} with parts = {parts!r}, expected {wanted}", where=where)
    are_numbers = all(type(part) is int and 0 < part < _MAX_ROWS for part in parts)
    are_named = all(isinstance(part, str) and (part == _REST or _SIZE_OF.fullmatch(part)) for part in parts)
    if not (are_numbers or are_named):
        raise FormatError(
            f"parts = {parts!r}, expected positive numbers, or names with a dimension and {_REST!r}: "
            '["mixer.out_proj.weight[1]", "rest"]',
            where=where,
        )
    if not isinstance(keys, list) or len(keys) not in (0, len(parts)) or not all(isinstance(k, str) for k in keys):
        raise FormatError(f"keys = {keys!r}, expected a name for each of {counted(len(parts), 'part')}", where=where)
    return Cut(kind, tuple(parts), tuple(keys))


def part_rows(parts: Sequence[int | str], n_rows: int, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """How many of ``n_rows`` rows each part of a fused weight has on one rank.

    Args:
        parts: see `Cut`.
        n_rows: of the rank.
        shapes: of the other tensors of the layer, as the rank has them.

    Raises:
        LayoutError: the rows do not consist of such parts.

    >>> part_rows((4, 2, 6), 6, {}), part_rows(("w[1]", "rest", "rest"), 10, {"w": (3, 4)})
    ((2, 1, 3), (4, 3, 3))
    """
    numbers = [part for part in parts if isinstance(part, int)]
    if numbers:
        rows = [n_rows * number // sum(numbers) for number in numbers]
        if sum(rows) == n_rows and all(n_rows * number % sum(numbers) == 0 for number in numbers):
            return tuple(rows)
        raise LayoutError(f"{counted(n_rows, 'row')} are no parts of {' : '.join(map(str, numbers))}")
    known: list[int | None] = []
    for part in parts:
        match = _SIZE_OF.fullmatch(str(part))
        shape = () if match is None else shapes.get(match["name"], ())
        if match is not None and int(match["dim"]) >= len(shape):
            raise LayoutError(f"rows of a part are those of {part}, and the layer has no such tensor")
        known.append(None if match is None else shape[int(match["dim"])])
    n_rest = known.count(None)
    left = n_rows - sum(rows for rows in known if rows is not None)
    each, odd = divmod(left, n_rest) if n_rest else (0, left)
    if odd or left < 0:
        sizes = [_REST if rows is None else f"{part} = {rows:,}" for part, rows in zip(parts, known, strict=True)]
        raise LayoutError(f"{counted(n_rows, 'row')} do not consist of {', '.join(sizes)}")
    return tuple(each if rows is None else rows for rows in known)


def view(tensor: TensorRef, start: int, shape: tuple[int, ...]) -> TensorRef:
    """Part of a flat tensor, from its element ``start``, as a row-major tensor of ``shape``.

    Raises:
        FormatError: ``tensor`` is not contiguous, or too short.
    """
    numel = 1
    for size in shape:
        numel *= size
    if not tensor.is_contiguous or start + numel > tensor.numel:
        raise FormatError(f"elements {start:,} to {start + numel:,} of a tensor of shape {list(tensor.shape)}")
    return replace(tensor, offset=tensor.offset + start, shape=shape, strides=contiguous_strides(shape))


def placed_views(
    tensor: TensorRef, cut: str, lead: tuple[int, ...], rank: int, n_ranks: int, rows: Sequence[int] = ()
) -> list[tuple[Box, TensorRef]]:
    """The boxes of the global weight that one rank's tensor holds, each with the part of the tensor that it is.

    Args:
        tensor: one layer's (and expert's) weight, as the rank has it.
        cut: one of `CUTS`, ``gated`` for layers that really are gated.
        lead: its layer, and expert, where these are dimensions of the global weight.
        rank: tensor-parallel rank.
        n_ranks: tensor-parallel size.
        rows: of each part of a fused weight, see `part_rows`.

    Raises:
        LayoutError: the tensor has no such dimension, or a gated one has an odd number of rows.
    """
    shape = tensor.shape
    if cut in ("whole", "buffer") or n_ranks == 1:
        return [_placed(tensor, lead, (0,) * len(shape))]
    dim = 1 if cut == "row" else 0
    if dim >= len(shape):
        raise LayoutError(f"a tensor of shape {list(shape)} has no dimension {dim} to be cut along")
    if cut not in ("gated", "fused"):
        return [_placed(tensor, lead, tuple(rank * shape[d] if d == dim else 0 for d in range(len(shape))))]
    half, odd = divmod(shape[0], 2)
    if cut == "gated" and odd:
        raise LayoutError(f"a gate and an up projection together have {counted(shape[0], 'row')}, which is odd")
    found, start = [], 0
    for size in (half, half) if cut == "gated" else rows:
        place = (start * n_ranks + rank * size, *(0,) * (len(shape) - 1))
        found.append(_placed(_rows_of(tensor, start, size), lead, place))
        start += size
    return found


def placed_parts(
    tensor: TensorRef, lead: tuple[int, ...], rank: int, n_ranks: int, rows: Sequence[int]
) -> list[list[tuple[Box, TensorRef]]]:
    """`placed_views` of each part of a fused weight, which is a weight of its own in distributed checkpoints."""
    starts = [sum(rows[:number]) for number in range(len(rows))]
    pieces = [_rows_of(tensor, start, size) for start, size in zip(starts, rows, strict=True)]
    return [placed_views(piece, "column", lead, rank, n_ranks) for piece in pieces]


def _rows_of(tensor: TensorRef, start: int, size: int) -> TensorRef:
    return replace(tensor, offset=tensor.offset + start * tensor.strides[0], shape=(size, *tensor.shape[1:]))


def _placed(tensor: TensorRef, lead: tuple[int, ...], offsets: tuple[int, ...]) -> tuple[Box, TensorRef]:
    ones = (1,) * len(lead)
    widened = replace(tensor, shape=(*ones, *tensor.shape), strides=(*ones, *tensor.strides))
    return Box((*lead, *offsets), widened.shape), widened
