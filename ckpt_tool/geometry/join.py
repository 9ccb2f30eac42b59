"""The overlap join: every pair of boxes, one from each of two tables, that share elements of the same tensor.

Pure columns: no Python loop runs per box or per pair. All coordinates are global.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ckpt_tool.geometry.alike import Side, alike_keys
from ckpt_tool.geometry.columns import Int64Array, kept
from ckpt_tool.records import dataclass

__all__ = ["Boxes", "Pairs", "is_packed_in", "join_boxes"]

_MIN_KEYS = 8
"""From this many keys on it is looked whether some are alike,"""
_MIN_ROWS = 4096
"""and from this many boxes on: of fewer the look costs more than joining them all."""


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
    left_key, right_key, n_keys = _common_keys(kept(left.key, live_left), kept(right.key, live_right))
    known = np.flatnonzero(right_key >= 0)
    live_right, right_key = kept(live_right, known), kept(right_key, known)
    table = Boxes(left_key, kept(left.offsets, live_left), kept(left.sizes, live_left))
    other = Boxes(right_key, kept(right.offsets, live_right), kept(right.sizes, live_right))
    may_be_alike = n_keys >= _MIN_KEYS and len(table) + len(other) >= _MIN_ROWS
    pairs = (_join_alike if may_be_alike else _join)(table, other, n_keys)
    found_left, found_right = live_left[pairs.left], live_right[pairs.right]
    line = found_right * len(left) + found_left
    if (line[1:] > line[:-1]).all():
        return Pairs(found_left, found_right, pairs.offsets, pairs.sizes)
    return Pairs(found_left, found_right, pairs.offsets, pairs.sizes).take(np.argsort(line, kind="stable"))


def _join_alike(left: Boxes, right: Boxes, n_keys: int) -> Pairs:
    """As `_join`, where keys that look alike are joined once; by key, in the order of the keys' first right rows."""
    own, other = (Side.of(side.key, n_keys, side.offsets, side.sizes) for side in (left, right))
    alike = alike_keys(own, other)
    firsts = alike.firsts
    if len(firsts) > n_keys // 2:
        return _join(left, right, n_keys)
    (left_key, left_place), (right_key, right_place) = own.places(firsts), other.places(firsts)
    left_row, right_row = own.order[left_place], other.order[right_place]
    once = _join(
        Boxes(left_key, left.offsets[left_row], left.sizes[left_row]),
        Boxes(right_key, right.offsets[right_row], right.sizes[right_row]),
        len(firsts),
    )
    # The right rows of the join above are by key, and so are its pairs.
    starts = np.searchsorted(right_key[once.right], np.arange(len(firsts) + 1))
    slot_of_key = np.empty(n_keys, dtype=np.int64)
    slot_of_key[firsts] = np.arange(len(firsts))
    keys = np.flatnonzero(other.counts > 0)
    keys = keys[np.argsort(other.order[other.starts[keys]], kind="stable")]
    slot = slot_of_key[alike.like[keys]]
    counts = np.diff(starts)[slot]
    pair = np.arange(counts.sum()) + np.repeat(starts[slot] - np.cumsum(counts) + counts, counts)
    left_shift = np.repeat(own.starts[keys] - own.starts[alike.like[keys]], counts)
    right_shift = np.repeat(other.starts[keys] - other.starts[alike.like[keys]], counts)
    return Pairs(
        own.order[left_place[once.left[pair]] + left_shift],
        other.order[right_place[once.right[pair]] + right_shift],
        once.offsets[pair],
        once.sizes[pair],
    )


def _join(left: Boxes, right: Boxes, n_keys: int) -> Pairs:
    """Overlaps of tables with keys from 0 to ``n_keys``, by right row; no box is empty."""
    left_key, right_key = left.key, right.key
    lo, right_lo = left.offsets, right.offsets
    hi, right_hi = lo + left.sizes, right_lo + right.sizes
    # One number line for all keys: key * span + position.
    span = int(max(hi.max(initial=0), right_hi.max(initial=0))) + 1
    sweep_dim = _most_divided_dim(left_key, lo, n_keys, span)
    start, stop = _along(sweep_dim[left_key], lo, hi)
    right_start, right_stop = _along(sweep_dim[right_key], right_lo, right_hi)

    # Sorted by start, running maxima of the stops are sorted too, so the candidates of a right box are one slice, found
    # by two binary searches.
    line_start, line_stop = left_key * span + start, left_key * span + stop
    order = np.argsort(line_start, kind="stable")
    line_stop = line_stop[order]
    right_line = right_key * span + right_start
    first = np.searchsorted(np.maximum.accumulate(line_stop), right_line, side="right")
    last = np.searchsorted(line_start[order], right_key * span + right_stop, side="left")
    count = np.maximum(last - first, 0)
    place = np.arange(count.sum()) + np.repeat(first - np.cumsum(count) + count, count)
    meets = np.flatnonzero(line_stop[place] > np.repeat(right_line, count))
    pair_left, pair_right = order[place[meets]], np.repeat(np.arange(len(right)), count)[meets]
    offsets = np.maximum(lo[pair_left], right_lo[pair_right])
    sizes = np.minimum(hi[pair_left], right_hi[pair_right]) - offsets
    common = left_key[pair_left] == right_key[pair_right]
    for dim in range(lo.shape[1]):
        common &= sizes[:, dim] > 0
    pairs = Pairs(pair_left, pair_right, offsets, sizes)
    return pairs if common.all() else pairs.take(np.flatnonzero(common))


def _common_keys(left: Int64Array, right: Int64Array) -> tuple[Int64Array, Int64Array, int]:
    """Keys of both sides as numbers from 0, -1 for a right one that no left one equals, and how many there are."""
    low, high = int(left.min()), int(left.max())
    if high - low > 4 * (len(left) + len(right)) + 1024:  # too wide for a table
        keys, numbers = np.unique(left, return_inverse=True)
        slot = np.minimum(np.searchsorted(keys, right), len(keys) - 1)
        return numbers, np.where(keys[slot] == right, slot, -1), len(keys)
    is_known = np.zeros(high - low + 1, dtype=bool)
    is_known[left - low] = True
    number = np.where(is_known, np.cumsum(is_known) - 1, -1)
    inside = (right >= low) & (right <= high)
    return number[left - low], np.where(inside, number[np.where(inside, right - low, 0)], -1), int(is_known.sum())


def _along(dim: Int64Array, lo: Int64Array, hi: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Corners of each box along its own dimension."""
    flat = np.arange(len(dim)) * lo.shape[1] + dim
    return lo.reshape(-1)[flat], hi.reshape(-1)[flat]


def _widen(boxes: Boxes) -> Boxes:
    column = np.zeros((len(boxes), 1), dtype=np.int64)
    return Boxes(boxes.key, column, column + 1)


def _most_divided_dim(key: Int64Array, offsets: Int64Array, n_keys: int, span: int) -> Int64Array:
    """int64[n_keys]: per key the dimension with the most distinct offsets (below ``span``), the first such."""
    distinct = np.zeros((n_keys, offsets.shape[1]), dtype=np.int64)
    for dim in range(offsets.shape[1]):
        line = np.sort(key * span + offsets[:, dim])
        is_new = np.ones(len(line), dtype=bool)
        is_new[1:] = line[1:] != line[:-1]
        distinct[:, dim] = np.bincount(line[is_new] // span, minlength=n_keys)
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
