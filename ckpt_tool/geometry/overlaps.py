"""Boxes overlap when they share an element; equal boxes are duplicates. Told from corners, by sorting and sweeping.

Boxes are columns in global coordinates; empty ones are ignored. A ``group`` column lets boxes of many tensors share one
call: only boxes with equal numbers meet.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ckpt_tool.geometry.columns import Int64Array

__all__ = ["exact_duplicates", "first_equal", "have_common_element", "overlapping_pairs", "row_digest"]

_FEW_ROWS = 64
_MAX_STEPS = 256  # candidates kept for each dimension; one or two where strides are those of a view
_PAIRS_PER_BLOCK = 1 << 21  # candidate pairs compared at once: about 100 MB of temporaries


def have_common_element(
    distance: int, strides: Sequence[int], sizes: Sequence[int], other_sizes: Sequence[int]
) -> bool:
    """Whether two strided boxes of one memory share an element; True where too many steps would be needed to tell.

    Args:
        distance: elements from the first one of the box to the first one of the other.
        strides: of both, in elements, none below 1.
        sizes: of the box.
        other_sizes: of the other.

    >>> have_common_element(3, (1, 6), (3, 4), (3, 4)), have_common_element(2, (1, 6), (3, 4), (3, 4))
    (False, True)
    """
    dims = sorted(range(len(strides)), key=lambda dim: -strides[dim])
    left = {distance}
    for number, dim in enumerate(dims):
        # What smaller strides can still make up for, at least and at most.
        low = -sum((other_sizes[d] - 1) * strides[d] for d in dims[number + 1 :])
        high = sum((sizes[d] - 1) * strides[d] for d in dims[number + 1 :])
        found = set()
        for rest in left:
            first = max(-(other_sizes[dim] - 1), -((high - rest) // strides[dim]))
            last = min(sizes[dim] - 1, (rest - low) // strides[dim])
            if last - first > _MAX_STEPS:
                return True
            found |= {rest - step * strides[dim] for step in range(first, last + 1)}
        if len(found) > _MAX_STEPS:
            return True
        left = found
    return 0 in left


def exact_duplicates(offsets: Int64Array, sizes: Int64Array, group: Int64Array | None = None) -> Int64Array:
    """``int64[n]``: index of the first box equal to each box (and of its group); its own index where it is the first.

    Applied to ``offsets[first]`` and ``sizes[first]`` it gives the same boxes again.
    """
    columns = [*([] if group is None else [group]), *offsets.T, *sizes.T]
    return first_equal(columns) if columns else np.zeros(len(sizes), dtype=np.int64)


def first_equal(columns: Sequence[Int64Array]) -> Int64Array:
    """``int64[n]``: the first row that is equal to each row, in all of one or more ``columns``."""
    n = len(columns[0])
    if _ascend([column[:_FEW_ROWS] for column in columns]) and _ascend(columns):
        return np.arange(n)
    digest = row_digest(columns)
    order = np.argsort(digest)
    in_order = digest[order]
    is_new = np.ones(n, dtype=np.bool_)
    is_new[1:] = in_order[1:] != in_order[:-1]
    heads = np.flatnonzero(is_new)
    first = np.empty(n, dtype=np.int64)
    first[order] = np.repeat(np.minimum.reduceat(order, heads), np.diff(np.append(heads, n)))
    if any((column[first] != column).any() for column in columns):  # different boxes of one digest
        return _duplicates_by_sorting(columns)
    return first


def _ascend(columns: Sequence[Int64Array]) -> bool:
    """Whether each row is greater than the one before it, the first column counting most."""
    undecided = np.arange(len(columns[0]) - 1) if len(columns[0]) else np.zeros(0, dtype=np.int64)
    for column in columns:
        step = column[undecided + 1] - column[undecided]
        if (step < 0).any():
            return False
        undecided = undecided[step == 0]
    return not len(undecided)


def row_digest(columns: Sequence[Int64Array]) -> npt.NDArray[np.uint64]:
    """A number for each row that equal rows share, and others hardly ever."""
    digest = np.zeros(len(columns[0]), dtype=np.uint64)
    for column in columns:
        digest = (digest ^ column.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        digest ^= digest >> np.uint64(29)
    return digest


def _duplicates_by_sorting(columns: Sequence[Int64Array]) -> Int64Array:
    order = np.lexsort(columns)  # stable: equal boxes keep their order
    is_new = np.ones(len(order), dtype=np.bool_)
    is_new[1:] = np.any([column[order[1:]] != column[order[:-1]] for column in columns], axis=0)
    first = np.empty(len(order), dtype=np.int64)
    first[order] = order[np.flatnonzero(is_new)[np.cumsum(is_new) - 1]]
    return first


def overlapping_pairs(
    offsets: Int64Array, sizes: Int64Array, group: Int64Array | None = None, limit: int | None = None
) -> Int64Array:
    """``int64[m, 2]``: pairs ``i < j`` of boxes (of one group) that share an element, sorted; equal boxes do.

    Boxes are first told apart by planes that cut none of them, which leaves nothing to compare for grids, flat splits
    and nested cuts; what no plane separates is compared along its most selective dimension. With ``limit`` it stops at
    that many pairs, and any ``limit`` pairs may be the ones. Cost: a few sorts for such cuts; quadratic time only in
    boxes that really interlock.
    """
    rows = np.flatnonzero((sizes > 0).all(axis=1))
    starts, stops = offsets[rows], offsets[rows] + sizes[rows]
    if starts.shape[1] == 0:  # every box of no dimensions is the one element
        starts = np.zeros((len(rows), 1), dtype=np.int64)
        stops = np.ones_like(starts)
    labels = np.zeros(len(rows), dtype=np.int64) if group is None else _numbered(group[rows])
    if 2 * (len(rows) + 1) * (int(stops.max(initial=0)) + 1) >= 1 << 62 or int(starts.min(initial=0)) < 0:
        starts, stops = _compressed(starts, stops)
    labels = _separated(labels, starts, stops)
    crowd = np.flatnonzero(np.bincount(labels)[labels] > 1) if len(labels) else labels
    pairs = _interlocked(labels[crowd], starts[crowd], stops[crowd], limit)
    pairs = np.sort(rows[crowd[pairs]].reshape(-1, 2), axis=1)
    return pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]


def _numbered(group: Int64Array) -> Int64Array:
    """Groups as numbers from 0, below the number of rows and in no order."""
    low, high = int(group.min(initial=0)), int(group.max(initial=0))
    if low >= 0 and high <= len(group):
        return group.astype(np.int64)
    return np.unique(group, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _compressed(starts: Int64Array, stops: Int64Array) -> tuple[Int64Array, Int64Array]:
    """The same boxes over the ranks of their bounds, so that ``label * (2 * n) + bound`` cannot overflow."""
    result = np.empty((2, *starts.shape), dtype=np.int64)
    for dim in range(starts.shape[1]):
        bounds = np.concatenate([starts[:, dim], stops[:, dim]])
        ranks = np.unique(bounds, return_inverse=True)[1].reshape(-1)
        result[:, :, dim] = ranks.reshape(2, -1)
    return result[0], result[1]


def _separated(labels: Int64Array, starts: Int64Array, stops: Int64Array) -> Int64Array:
    """Labels refined until no plane that cuts no box separates boxes of one label."""
    unit = int(stops.max(initial=0)) + 1
    n_labels, idle_dims, dim = -1, 0, 0
    while idle_dims < starts.shape[1]:
        low, high = labels * unit + starts[:, dim], labels * unit + stops[:, dim]
        order = np.argsort(low, kind="stable")
        is_new = np.ones(len(order), dtype=np.bool_)
        is_new[1:] = low[order[1:]] >= np.maximum.accumulate(high[order])[:-1]
        labels = np.empty_like(labels)
        labels[order] = np.cumsum(is_new) - 1
        found = int(is_new.sum())
        idle_dims = 1 if found > n_labels else idle_dims + 1
        n_labels = found
        if found == len(order):
            break
        dim = (dim + 1) % starts.shape[1]
    return labels


def _interlocked(labels: Int64Array, starts: Int64Array, stops: Int64Array, limit: int | None) -> Int64Array:
    """``int64[m, 2]``: pairs of rows with one label whose boxes meet, found by a sweep along one dimension."""
    unit = 2 * int(stops.max(initial=0)) + 1
    best: tuple[int, Int64Array, Int64Array] | None = None
    for dim in range(starts.shape[1]):
        low = labels * unit + starts[:, dim]
        order = np.argsort(low, kind="stable")
        reach = np.searchsorted(low[order], labels[order] * unit + stops[order, dim], side="left")
        counts = reach - np.arange(len(order)) - 1
        if best is None or counts.sum() < best[0]:
            best = (int(counts.sum()), order, counts)
    if best is None or best[0] == 0 or limit == 0:
        return np.zeros((0, 2), dtype=np.int64)
    _, order, counts = best
    found: list[Int64Array] = []
    n_found, at = 0, 0
    total = np.cumsum(counts)
    while at < len(order) and (limit is None or n_found < limit):
        done = int(total[at - 1]) if at else 0
        stop = max(int(np.searchsorted(total, done + _PAIRS_PER_BLOCK, side="right")), at + 1)
        block = counts[at:stop]
        left = np.repeat(np.arange(at, stop), block)
        right = left + 1 + np.arange(len(left)) - np.repeat(np.cumsum(block) - block, block)
        i, j = order[left], order[right]
        meets = ((starts[i] < stops[j]) & (starts[j] < stops[i])).all(axis=1)
        found.append(np.stack([i[meets], j[meets]], axis=1))
        n_found += int(meets.sum())
        at = stop
    pairs = np.concatenate(found)
    return pairs if limit is None else pairs[:limit]
