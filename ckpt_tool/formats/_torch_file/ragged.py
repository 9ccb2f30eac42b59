"""A ragged shard is a rank's run of the flattened tensor, as long as its share of units: veScale's ``RaggedShard``.

What veScale's sources say (``vescale/dtensor/placement_types.py``, ``vescale_utils/checkpoint.py`` of 2025): other axes
of the mesh cut first, whatever the order of placements; of what a rank then holds, its run is cut, and its local tensor
is flat. Both forms, with and without strides in their name, are cut alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from ckpt_tool.errors import FormatError
from ckpt_tool.formats._pickle.tensors import TensorRef
from ckpt_tool.geometry.box import Box
from ckpt_tool.geometry.flat import flat_boxes
from ckpt_tool.geometry.runs import contiguous_strides
from ckpt_tool.sizes import counted

__all__ = ["RAGGED", "ragged_boxes"]

RAGGED = frozenset({"RaggedShard", "_StridedRaggedShard"})
"""Last names of the classes."""


def ragged_boxes(
    held: Box, dims: Sequence[int], units: Sequence[int], part: int, local: TensorRef
) -> list[tuple[Box, TensorRef]]:
    """Boxes of the global tensor, each with the part of ``local`` that holds it.

    Args:
        held: what the rank holds by the other axes, in global coordinates.
        dims: leading dimensions that are flattened; a unit never cuts those behind them.
        units: shares of the ranks along the axis.
        part: the rank's place on it.
        local: its tensor.

    Raises:
        FormatError: the shares do not divide the tensor, or ``local`` is not as long as its share.
    """
    total, numel = sum(units), held.volume
    if tuple(dims) != tuple(range(len(dims))) or not 0 < len(dims) <= len(held.sizes) or min(units) < 0 or total <= 0:
        raise FormatError(f"a ragged shard of dims {list(dims)} and units {list(units)}, expected leading dimensions")
    granule = prod(held.sizes[len(dims) :])
    if numel % total or numel // total % granule:
        raise FormatError(f"units {list(units)} do not divide a shard of shape {list(held.sizes)}")
    start = numel // total * sum(units[:part])
    stop = numel // total * sum(units[: part + 1])
    if local.numel != stop - start or not local.is_contiguous:
        raise FormatError(
            f"a ragged shard of units {list(units)} at {part} holds {counted(stop - start, 'element')} of "
            f"{list(held.sizes)}, its local tensor has {local.numel:,}"
        )
    strides = contiguous_strides(held.sizes)
    found = []
    for box in flat_boxes(start, stop, held.sizes):
        first = sum(offset * stride for offset, stride in zip(box.offsets, strides, strict=True)) - start
        own = replace(local, offset=local.offset + first, shape=box.sizes, strides=contiguous_strides(box.sizes))
        offsets = tuple(a + b for a, b in zip(held.offsets, box.offsets, strict=True))
        found.append((Box(offsets, box.sizes), own))
    return found
