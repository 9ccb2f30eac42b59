"""A grid cuts dimensions into one piece per part of a mesh axis; a part's piece may be empty, or several intervals.

All bounds and intervals are half-open and in global coordinates of the dimension that is cut. Ranks count row-major
over the mesh: the last axis varies fastest. Knows no names of axes or tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, product
from typing import Literal, TypeAlias

import numpy as np

from ckpt_tool.errors import LayoutError
from ckpt_tool.geometry.box import Box
from ckpt_tool.geometry.columns import Int64Array
from ckpt_tool.sizes import counted

__all__ = [
    "Interval",
    "PlacementSpec",
    "chunk_bounds",
    "cut_order",
    "interval_boxes",
    "placement_intervals",
    "split_columns",
]

Interval: TypeAlias = tuple[int, int]
PlacementSpec: TypeAlias = (
    tuple[Literal["shard"], int] | tuple[Literal["strided"], int, int] | tuple[Literal["replicate"]]
)


def chunk_bounds(length: int, parts: int) -> Int64Array:
    """``int64[parts + 1]``: part ``r`` holds ``bounds[r]:bounds[r + 1]``, by the rule of ``torch.chunk``.

    Every piece has the ceiled size; trailing ones are shorter or empty (and then lie at ``length``). The first bound is
    0, the last is ``length``, so the pieces cover the dimension once.

    >>> chunk_bounds(6, 4).tolist()
    [0, 2, 4, 6, 6]
    """
    _check_parts(length, parts)
    return np.minimum(np.arange(parts + 1, dtype=np.int64) * -(-length // parts), length)


def split_columns(offsets: Int64Array, sizes: Int64Array, dim: int, coord: Int64Array, parts: int) -> None:
    """Cut every box (a row of the columns, changed in place) along ``dim``; keep part ``coord[row]`` of ``parts``.

    The rule is that of `chunk_bounds`, within each box. ``parts=1`` changes nothing.
    """
    left = sizes[:, dim]
    piece = -(-left // parts)
    start = np.minimum(coord * piece, left)
    offsets[:, dim] += start
    sizes[:, dim] = np.minimum(start + piece, left) - start


def cut_order(axis_sizes: Sequence[int], placements: Sequence[PlacementSpec]) -> list[tuple[int, PlacementSpec]]:
    """Mesh axes with their placements, in the order in which FSDP2 over tensor parallelism cuts a tensor.

    A strided shard says how many pieces the axes behind it make of the same dimension: these cut first, it cuts each of
    their pieces, so that it becomes a plain shard behind them. Where sizes divide evenly this is what
    `placement_intervals` gives for the placements as they are; where they do not, FSDP2 puts rows here, while
    DTensor's own arithmetic (torch 2.13, ``distribute_tensor``) puts some of them elsewhere. A strided shard that no
    axes explain stays one. Without strided shards the order is that of the mesh.

    >>> cut_order((4, 2), [("strided", 0, 2), ("shard", 0)])
    [(1, ('shard', 0)), (0, ('shard', 0))]
    """
    order: list[tuple[int, PlacementSpec]] = []
    for axis in range(len(placements) - 1, -1, -1):
        placement = placements[axis]
        behind = 0
        if placement[0] == "strided":
            plain = ("shard", placement[1])
            left = placement[2]
            explained: set[int] = set()
            for later, other in sorted(order):
                if left > 1 and other == plain:
                    explained.add(later)
                    left = left // axis_sizes[later] if left % axis_sizes[later] == 0 else 0
            if left == 1:
                placement = ("shard", placement[1])
                behind = max((at + 1 for at, (later, _) in enumerate(order) if later in explained), default=0)
        order.insert(behind, (axis, placement))
    return order


def placement_intervals(
    shape: Sequence[int], axis_sizes: Sequence[int], coord: Sequence[int], placements: Sequence[PlacementSpec]
) -> list[list[Interval]]:
    """Per dimension, the ascending global intervals held by the rank at ``coord``; an empty list when it holds none.

    ``placements[i]`` says how mesh axis ``i`` cuts, applied left to right, each within what the earlier ones left, as
    DTensor does (torch 2.13, ``tensor/_utils._compute_local_shape_and_global_offset``). The lengths of a dimension's
    intervals add up to that dimension of the local tensor, and their concatenation is its index order.

    >>> placement_intervals((8, 3), (2, 2), (0, 1), [("strided", 0, 2), ("replicate",)])
    [[(0, 2), (4, 6)], [(0, 3)]]
    """
    if not len(axis_sizes) == len(coord) == len(placements):
        raise LayoutError(
            f"axes of the mesh: {len(axis_sizes)}, coordinates: {len(coord)}, placements: {len(placements)}; "
            "expected as many of each"
        )
    intervals: list[list[Interval]] = [[(0, length)] if length else [] for length in shape]
    for parts, part, placement in zip(axis_sizes, coord, placements, strict=True):
        if not 0 <= part < parts:
            raise LayoutError(f"coordinate {tuple(coord)} lies outside a mesh of {tuple(axis_sizes)}")
        if placement[0] == "replicate":
            continue
        _check_dim(placement[1], len(intervals))
        held = intervals[placement[1]]
        length = sum(stop - start for start, stop in held)
        factor = placement[2] if placement[0] == "strided" else 1
        taken: list[Interval] = []
        for start, stop in _strided_part(length, parts, factor, part):
            for piece in _subrange(held, start, stop):
                _append_interval(taken, *piece)
        intervals[placement[1]] = taken
    return intervals


def interval_boxes(intervals: Sequence[Sequence[Interval]]) -> list[tuple[Box, Box]]:
    """``(global box, local box)`` for each product of intervals, the last dimension fastest.

    The local box says where the part lies in the rank's dense local tensor, whose index order along each dimension is
    the concatenation of the intervals. The local boxes cover the local tensor once; with one interval a dimension there
    is one pair, and its local box starts at zero.

    >>> [(str(g), str(p)) for g, p in interval_boxes([[(0, 2), (4, 6)], [(0, 3)]])]
    [('[0:2, 0:3]', '[0:2, 0:3]'), ('[4:6, 0:3]', '[2:4, 0:3]')]
    """
    per_dim: list[list[tuple[int, int, int]]] = []
    for held in intervals:
        local_starts = accumulate((stop - start for start, stop in held), initial=0)
        per_dim.append([(start, local, stop - start) for (start, stop), local in zip(held, local_starts, strict=False)])
    pairs = []
    for parts in product(*per_dim):
        sizes = tuple(size for _, _, size in parts)
        pairs.append((Box(tuple(g for g, _, _ in parts), sizes), Box(tuple(p for _, p, _ in parts), sizes)))
    return pairs


def _check_parts(length: int, parts: int) -> None:
    if parts < 1 or length < 0:
        raise LayoutError(f"cannot cut a dimension of {length:,} into {counted(parts, 'part')}")


def _check_dim(dim: int, ndim: int) -> None:
    if not 0 <= dim < ndim:
        raise LayoutError(f"a tensor of {ndim} dimensions has no dimension {dim} to shard")


def _strided_part(length: int, parts: int, split_factor: int, part: int) -> list[Interval]:
    """The ascending and merged intervals that torch's ``_StridedShard`` gives ``part``.

    The dimension is cut into ``split_factor`` pieces, each of these into ``parts``, and part ``r`` takes the ``r``-th
    of each (torch 2.13, ``placement_types._StridedShard._split_tensor``). With ``split_factor=1`` this is
    `chunk_bounds`; the parts together hold every index once.

    >>> [_strided_part(8, 2, 2, part) for part in range(2)]
    [[(0, 2), (4, 6)], [(2, 4), (6, 8)]]
    """
    _check_parts(length, split_factor)
    intervals: list[Interval] = []
    outer_size = -(-length // split_factor)
    for outer in range(0, length, max(outer_size, 1)):
        left = min(outer_size, length - outer)
        size = -(-left // parts)
        _append_interval(intervals, outer + min(part * size, left), outer + min((part + 1) * size, left))
    return intervals


def _append_interval(intervals: list[Interval], start: int, stop: int) -> None:
    """Add a non-empty interval behind the others, joined to the last one where they touch."""
    if start == stop:
        return
    if intervals and intervals[-1][1] == start:
        intervals[-1] = (intervals[-1][0], stop)
    else:
        intervals.append((start, stop))


def _subrange(held: Sequence[Interval], start: int, stop: int) -> list[Interval]:
    """Global intervals of positions ``start:stop`` counted along the concatenation of ``held``."""
    taken = []
    position = 0
    for first, last in held:
        low, high = max(start - position, 0), min(stop - position, last - first)
        if low < high:
            taken.append((first + low, first + high))
        position += last - first
    return taken
