"""Coverage is whether boxes hold every element of a shape exactly once, told from their corners, never from a mask.

Boxes are columns in global coordinates. Empty boxes are ignored. Knows nothing of what the boxes hold, so it cannot say
whether two equal boxes are replicas or a conflict.
"""

from __future__ import annotations

from math import prod

import numpy as np

from ckpt_tool.geometry.box import Box
from ckpt_tool.geometry.columns import BoolArray, Int64Array
from ckpt_tool.geometry.gaps import gaps
from ckpt_tool.geometry.overlaps import exact_duplicates, overlapping_pairs
from ckpt_tool.records import dataclass

__all__ = ["Coverage", "coverage", "exact_duplicates", "gaps", "overlapping_pairs", "volumes_match"]


@dataclass(frozen=True, slots=True)
class Coverage:
    """What is wrong with the boxes of one tensor; indices are rows of the columns that were given.

    Attributes:
        n_boxes: boxes that are not empty, replicas included.
        n_empty: boxes without elements.
        n_replicas: boxes equal to an earlier one.
        missing_elements: elements in no box; where boxes overlap *and* ``gaps`` was cut off, at least this many.
        overlapping: pairs that share elements without being equal, at most ``limit``.
        gaps: disjoint boxes of missing elements, at most ``limit``.
        outside: boxes that reach beyond the shape.
    """

    n_boxes: int
    n_empty: int
    n_replicas: int
    missing_elements: int
    overlapping: tuple[tuple[int, int], ...]
    gaps: tuple[Box, ...]
    outside: tuple[int, ...]

    @property
    def is_exact(self) -> bool:
        """Whether every element lies in exactly one box, not counting replicas."""
        return not (self.missing_elements or self.overlapping or self.outside)


def coverage(shape: tuple[int, ...], offsets: Int64Array, sizes: Int64Array, limit: int = 16) -> Coverage:
    """How boxes (``int64[n, ndim]``, global coordinates) cover a shape; lists are cut off at ``limit`` entries.

    The cut of a shape by any grid or flat split is exact, and so is the union of such a cut with copies of its boxes.
    Cost: sorting the boxes, when nothing is wrong.
    """
    ends = offsets + sizes
    is_outside = ((offsets < 0) | (ends > np.array(shape, dtype=np.int64))).any(axis=1)
    is_full = (sizes > 0).all(axis=1)
    first = exact_duplicates(offsets, sizes)
    index = np.arange(len(sizes), dtype=np.int64)
    distinct = np.flatnonzero(is_full & (first == index))
    pairs = overlapping_pairs(offsets[distinct], sizes[distinct], limit=limit)
    inner_offsets = np.maximum(offsets[distinct], 0)
    inner_sizes = np.maximum(np.minimum(ends[distinct], np.array(shape, dtype=np.int64)) - inner_offsets, 0)
    missing = prod(shape) - int(inner_sizes.prod(axis=1).sum())
    holes: list[Box] = []
    if missing or len(pairs):
        holes = gaps(shape, inner_offsets, inner_sizes, limit)
        if len(pairs):
            missing = sum(hole.volume for hole in holes)
    return Coverage(
        n_boxes=int(is_full.sum()),
        n_empty=int((~is_full).sum()),
        n_replicas=int((is_full & (first != index)).sum()),
        missing_elements=missing,
        overlapping=tuple((int(i), int(j)) for i, j in distinct[pairs].tolist()),
        gaps=tuple(holes),
        outside=tuple(np.flatnonzero(is_outside & is_full).tolist()),
    )


def volumes_match(tensor: Int64Array, volumes: Int64Array, numel: Int64Array) -> BoolArray:
    """``bool[n_tensors]``: whether the box volumes of each tensor add up to its number of elements.

    ``tensor`` numbers the tensor of each box. Where boxes are disjoint and inside, this is coverage; where it is False,
    something is missing or held twice. A quick test that spares most tensors the look at their boxes.
    """
    total = np.zeros(len(numel), dtype=np.int64)
    np.add.at(total, tensor, volumes)
    return np.asarray(total == numel)
