"""The overlap join: every pair of boxes, one from each of two tables, that share elements of the same tensor.

Pure columns: no Python loop runs per box or per pair. All coordinates are global.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ckpt_tool.geometry.columns import Int64Array

__all__ = ["Boxes", "Pairs", "is_packed_in", "join_boxes"]


@dataclass(frozen=True, eq=False)
class Boxes:
    """Boxes of tensors, keyed by any integer that both sides of a join share."""

    key: Int64Array  # int64[n]
    offsets: Int64Array  # int64[n, D]
    sizes: Int64Array  # int64[n, D]

    def __len__(self) -> int:
        """Number of boxes."""
        return len(self.key)


@dataclass(frozen=True, eq=False)
class Pairs:
    """Overlaps: rows of both tables and their common box in global coordinates."""

    left: Int64Array  # int64[m]
    right: Int64Array  # int64[m]
    offsets: Int64Array  # int64[m, D]
    sizes: Int64Array  # int64[m, D]

    def __len__(self) -> int:
        """Number of overlaps."""
        return len(self.left)

    @property
    def volume(self) -> Int64Array:
        """int64[m]: number of elements shared."""
        volume: Int64Array = np.prod(self.sizes, axis=1, dtype=np.int64)
        return volume

    def take(self, rows: npt.ArrayLike) -> Pairs:
        """The rows named by ``rows``, in that order."""
        picked = np.asarray(rows)
        return Pairs(self.left[picked], self.right[picked], self.offsets[picked], self.sizes[picked])


def join_boxes(left: Boxes, right: Boxes) -> Pairs:
    """All overlaps of ``left`` and ``right``, ordered by right row, then left row. Empty boxes overlap nothing.

    Both tables have the same number of (padded) dimensions. A join of non-overlapping boxes with themselves gives each
    box once, whole. Work and memory are linear in the boxes plus the pairs that overlap along the most divided
    dimension of each tensor.
    """
    live_left = np.flatnonzero((left.sizes > 0).all(axis=1))
    live_right = np.flatnonzero((right.sizes > 0).all(axis=1))
    width = left.offsets.shape[1]
    if not len(live_left) or not len(live_right):
        none = np.zeros(0, dtype=np.int64)
        return Pairs(none, none, np.zeros((0, width), dtype=np.int64), np.zeros((0, width), dtype=np.int64))
    if width == 0:  # only 0-dim tensors: one imaginary dimension of size 1
        widened = join_boxes(_widen(left), _widen(right))
        return Pairs(widened.left, widened.right, widened.offsets[:, :0], widened.sizes[:, :0])
    keys, left_key = np.unique(left.key[live_left], return_inverse=True)
    slot = np.minimum(np.searchsorted(keys, right.key[live_right]), len(keys) - 1)
    known = keys[slot] == right.key[live_right]
    live_right, right_key = live_right[known], slot[known]

    lo = left.offsets[live_left]
    hi = lo + left.sizes[live_left]
    sweep_dim = _most_divided_dim(left_key, lo, len(keys))
    start = np.take_along_axis(lo, sweep_dim[left_key][:, None], axis=1)[:, 0]
    stop = np.take_along_axis(hi, sweep_dim[left_key][:, None], axis=1)[:, 0]
    right_lo = right.offsets[live_right]
    right_hi = right_lo + right.sizes[live_right]
    right_start = np.take_along_axis(right_lo, sweep_dim[right_key][:, None], axis=1)[:, 0]
    right_stop = np.take_along_axis(right_hi, sweep_dim[right_key][:, None], axis=1)[:, 0]

    # One number line for all keys: key * span + position. Sorted by start, running maxima of the stops are sorted too,
    # so the candidates of a right box are one slice, found by two binary searches.
    span = int(max(stop.max(initial=0), right_stop.max(initial=0))) + 1
    order = np.lexsort((start, left_key))
    line_start = left_key[order] * span + start[order]
    line_stop = np.maximum.accumulate(left_key[order] * span + stop[order])
    first = np.searchsorted(line_stop, right_key * span + right_start, side="right")
    last = np.searchsorted(line_start, right_key * span + right_stop, side="left")
    count = np.maximum(last - first, 0)
    pair_right = np.repeat(np.arange(len(live_right)), count)
    pair_left = order[np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)]

    offsets = np.maximum(lo[pair_left], right_lo[pair_right])
    sizes = np.minimum(hi[pair_left], right_hi[pair_right]) - offsets
    common = (sizes > 0).all(axis=1) & (left_key[pair_left] == right_key[pair_right])
    found_left, found_right = live_left[pair_left[common]], live_right[pair_right[common]]
    rank = np.lexsort((found_left, found_right))
    return Pairs(found_left[rank], found_right[rank], offsets[common][rank], sizes[common][rank])


def _widen(boxes: Boxes) -> Boxes:
    column = np.zeros((len(boxes), 1), dtype=np.int64)
    return Boxes(boxes.key, column, column + 1)


def _most_divided_dim(key: Int64Array, offsets: Int64Array, n_keys: int) -> Int64Array:
    """int64[n_keys]: per key the dimension with the most distinct offsets, the first such."""
    distinct = np.zeros((n_keys, offsets.shape[1]), dtype=np.int64)
    for dim in range(offsets.shape[1]):
        order = np.lexsort((offsets[:, dim], key))
        k, o = key[order], offsets[order, dim]
        is_new = np.ones(len(k), dtype=bool)
        is_new[1:] = (k[1:] != k[:-1]) | (o[1:] != o[:-1])
        distinct[:, dim] = np.bincount(k[is_new], minlength=n_keys)
    best: Int64Array = np.argmax(distinct, axis=1)
    return best


def is_packed_in(sizes: Int64Array, container: Int64Array) -> npt.NDArray[np.bool_]:
    """bool[n]: whether a box of ``sizes`` is one contiguous run inside a packed row-major box of ``container`` sizes.

    True when, after leading dimensions of size 1 and one of any size, all dimensions are taken whole.

    >>> import numpy as np
    >>> is_packed_in(np.array([[1, 2, 4], [2, 2, 4]]), np.array([[3, 3, 4], [3, 3, 4]])).tolist()
    [True, False]
    """
    n, width = sizes.shape
    if width == 0:
        return np.ones(n, dtype=bool)
    is_whole = sizes == container
    whole_behind = np.ones((n, width), dtype=bool)
    whole_behind[:, :-1] = np.logical_and.accumulate(is_whole[:, :0:-1], axis=1)[:, ::-1]
    single_before = np.ones((n, width), dtype=bool)
    single_before[:, 1:] = np.logical_and.accumulate(sizes[:, :-1] == 1, axis=1)
    packed: npt.NDArray[np.bool_] = np.any(whole_behind & single_before, axis=1)
    return packed
