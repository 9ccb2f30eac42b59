"""Parallel rules say how a weight of per-rank files is cut over tensor-parallel ranks; they are data, by name.

Per-rank files record no cut: what no rule knows is an error that asks for one. Rules that lie beside the checkpoint, in
``ckpt-megatron.toml`` of the same form as ``parallel.toml``, come before the built-in ones.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib import resources

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

__all__ = ["CUTS", "OWN_RULES", "ParallelRules", "built_in_rules", "placed_views", "view"]

OWN_RULES = "ckpt-megatron.toml"
CUTS = ("column", "row", "gated", "whole", "buffer")


@dataclass(frozen=True)
class ParallelRules:
    """Rules in order, and the names of mcore's own modules."""

    rules: tuple[tuple[re.Pattern[str], str], ...]
    local_names: Mapping[str, str]
    before: re.Pattern[str] | None = None
    """What stands in front of names of layers outside the decoder."""

    def cut(self, name: str) -> str | None:
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
        rules = []
        for rule in document.get("rule", ()):
            if rule["cut"] not in CUTS:
                raise FormatError(f"cut {rule['cut']!r}, expected one of {', '.join(CUTS)}", where=where)
            rules += [(re.compile(name), str(rule["cut"])) for name in rule["names"]]
        before = re.compile(document["before"]) if "before" in document else None
        return ParallelRules(tuple(rules), dict(document.get("local_names", {})), before)
    except (tomllib.TOMLDecodeError, KeyError, TypeError, re.error) as error:
        raise FormatError(f"no file of parallel rules: {error}", where=where) from error


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
    tensor: TensorRef, cut: str, lead: tuple[int, ...], rank: int, n_ranks: int
) -> list[tuple[Box, TensorRef]]:
    """The boxes of the global weight that one rank's tensor holds, each with the part of the tensor that it is.

    Args:
        tensor: one layer's (and expert's) weight, as the rank has it.
        cut: ``column``, ``row``, ``whole`` or ``gated``, the last for layers that really are gated.
        lead: its layer, and expert, where these are dimensions of the global weight.
        rank: tensor-parallel rank.
        n_ranks: tensor-parallel size.

    Raises:
        LayoutError: the tensor has no such dimension, or a gated one has an odd number of rows.
    """
    shape = tensor.shape
    if cut in ("whole", "buffer") or n_ranks == 1:
        return [_placed(tensor, lead, (0,) * len(shape))]
    dim = 1 if cut == "row" else 0
    if dim >= len(shape):
        raise LayoutError(f"a tensor of shape {list(shape)} has no dimension {dim} to be cut along")
    if cut != "gated":
        return [_placed(tensor, lead, tuple(rank * shape[d] if d == dim else 0 for d in range(len(shape))))]
    half, odd = divmod(shape[0], 2)
    if odd:
        raise LayoutError(f"a gate and an up projection together have {counted(shape[0], 'row')}, which is odd")
    found = []
    for part in range(2):
        rows = replace(tensor, offset=tensor.offset + part * half * tensor.strides[0], shape=(half, *shape[1:]))
        found.append(_placed(rows, lead, ((part * n_ranks + rank) * half, *(0,) * (len(shape) - 1))))
    return found


def _placed(tensor: TensorRef, lead: tuple[int, ...], offsets: tuple[int, ...]) -> tuple[Box, TensorRef]:
    ones = (1,) * len(lead)
    widened = replace(tensor, shape=(*ones, *tensor.shape), strides=(*ones, *tensor.strides))
    return Box((*lead, *offsets), widened.shape), widened
