"""A gap is a box of a shape that none of the given boxes touches; found by sweeping dimension after dimension.

All boxes are columns in global coordinates and must lie inside the shape.
"""

from __future__ import annotations

from math import prod

import numpy as np

from ckpt_tool.geometry.box import Box
from ckpt_tool.geometry.columns import Int64Array, distinct
from ckpt_tool.geometry.overlaps import overlapping_pairs

__all__ = ["gaps"]


def gaps(shape: tuple[int, ...], offsets: Int64Array, sizes: Int64Array, limit: int) -> list[Box]:
    """At most ``limit`` disjoint boxes of elements that lie in no box, sorted by offset.

    With no boxes it is the whole shape. When fewer than ``limit`` come back they and the boxes cover the shape. Cost:
    one sort per dimension where boxes are disjoint and nothing is missing; only slabs that miss elements are descended
    into, and only where boxes overlap can that be all of them.
    """
    if prod(shape) == 0:
        return []
    kept = (sizes > 0).all(axis=1)
    offsets, sizes = offsets[kept], sizes[kept]
    is_disjoint = len(overlapping_pairs(offsets, sizes, limit=1)) == 0
    return _gaps(shape, offsets, offsets + sizes, limit, is_disjoint=is_disjoint)


def _gaps(shape: tuple[int, ...], starts: Int64Array, stops: Int64Array, limit: int, *, is_disjoint: bool) -> list[Box]:
    if limit <= 0 or (len(starts) and bool(((starts == 0) & (stops == shape)).all(axis=1).any())):
        return []
    if len(starts) == 0:
        return [Box.whole(shape)]
    # The slabs between neighbouring bounds of dimension 0 meet each box wholly or not at all.
    bounds = distinct(np.concatenate([starts[:, 0], stops[:, 0], [0, shape[0]]]))
    first, last = np.searchsorted(bounds, starts[:, 0]), np.searchsorted(bounds, stops[:, 0])
    section = (stops[:, 1:] - starts[:, 1:]).prod(axis=1)
    change = np.zeros(len(bounds), dtype=np.int64)
    np.add.at(change, first, section)
    np.add.at(change, last, -section)
    covered = np.cumsum(change)[:-1]
    # A slab whose volumes add up misses nothing, unless boxes overlap.
    suspects = np.flatnonzero((covered < prod(shape[1:])) | (not is_disjoint))
    found: list[Box] = []
    previous: tuple[int, list[Box]] = (-1, [])
    for slab in suspects.tolist():
        active = np.flatnonzero((first <= slab) & (slab < last))
        holes = _gaps(shape[1:], starts[active, 1:], stops[active, 1:], limit - len(found), is_disjoint=is_disjoint)
        low, high = int(bounds[slab]), int(bounds[slab + 1])
        if previous == (slab - 1, holes) and holes:
            for index in range(len(found) - len(holes), len(found)):
                box = found[index]
                found[index] = Box(box.offsets, (high - box.offsets[0], *box.sizes[1:]))
        else:
            found += [Box((low, *hole.offsets), (high - low, *hole.sizes)) for hole in holes]
        previous = (slab, holes)
        if len(found) >= limit:
            break
    return found
