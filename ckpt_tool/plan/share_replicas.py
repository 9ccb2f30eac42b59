"""Replicated boxes shared out among the ranks that hold them, cut where whole ones cannot be balanced.

Whole boxes go by worst fit (`assign.choose_replicas`) as long as no rank ends with more than a twentieth above what is
possible. Where boxes are few and large that fails; then the boxes of the same ranks are laid one behind another, and
each rank takes the run that it has room for. Numbers are whole ones, so the cuts are the same on every machine.
"""

from __future__ import annotations

import heapq

import numpy as np

from ckpt_tool.geometry.alike import Side, alike_keys
from ckpt_tool.geometry.columns import distinct
from ckpt_tool.manifest.tables import IntArray
from ckpt_tool.plan.assign import choose_replicas
from ckpt_tool.records import dataclass

__all__ = ["Shares", "share_replicas"]

_BALANCED = 20
"""A load is balanced when it is at most a part in so many above the level."""
_SNAP = 50
"""A cut that is nearer to an edge of a box than a part in so many of the level is made at that edge."""


@dataclass(frozen=True, eq=False)
class Shares:
    """What is kept: of each row some of its bytes, all of them where nothing was cut."""

    row: IntArray
    """int64[m], ascending."""
    first: IntArray
    """int64[m], a byte of the box; a multiple of its grain."""
    stop: IntArray
    """int64[m]"""


def share_replicas(group: IntArray, rank: IntArray, nbytes: IntArray, grain: IntArray, world_size: int) -> Shares:
    """For each group one row as a whole, or disjoint parts of several that together are one.

    A cut costs at most one grain of balance. A rank gets at most one part of a box. Ranks that hold one group should
    hold the same others, or be among those that hold them (as in a mesh); else the balance is only a fair one.

    Args:
        group: int64[n], equal for replicas of one box.
        rank: int64[n], rank that holds the replica; once in a group.
        nbytes: int64[n], size of the replica.
        grain: int64[n], bytes of which a part must be a multiple (but for the last one); 0 for boxes not to be cut.
        world_size: number of ranks.

    >>> import numpy as np
    >>> both = np.array([0, 1])
    >>> shares = share_replicas(np.array([7, 7]), both, np.array([10, 10]), np.array([2, 2]), 2)
    >>> list(zip(shares.row.tolist(), shares.first.tolist(), shares.stop.tolist()))
    [(0, 0, 6), (1, 6, 10)]
    """
    rows = choose_replicas(group, rank, nbytes, world_size)
    whole = Shares(rows, np.zeros(len(rows), dtype=np.int64), nbytes[rows])
    if not len(rows):
        return whole
    load = np.zeros(world_size, dtype=np.int64)
    np.add.at(load, rank[rows], nbytes[rows])
    number = np.unique(group, return_inverse=True)[1].reshape(-1)
    side = Side.of(number, int(number.max()) + 1, rank[:, None], rank[:, None])
    like = alike_keys(side, side).like
    sets = distinct(like[side.counts > 1])
    if not _uneven(load, rank, side, sets):
        return whole
    cut, cut_load = _by_sets(rank, nbytes, grain, world_size, side, like, sets)
    return cut if cut_load.max() < load.max() else whole


def _uneven(load: IntArray, rank: IntArray, side: Side, sets: IntArray) -> bool:
    """Whether some rank has more than its part of what the ranks of one of its sets have together."""
    _, place = side.places(sets)
    own = load[rank[side.order[place]]]
    starts = np.cumsum(side.counts[sets]) - side.counts[sets]
    total, peak = np.add.reduceat(own, starts), np.maximum.reduceat(own, starts)
    return bool((_BALANCED * peak * side.counts[sets] > (_BALANCED + 1) * total).any())


def _by_sets(
    rank: IntArray, nbytes: IntArray, grain: IntArray, world_size: int, side: Side, like: IntArray, sets: IntArray
) -> tuple[Shares, IntArray]:
    """Set by set, those of the fewest ranks first: what they hold together fills what they have less alone.

    Also int64[world_size], what each rank has then.
    """
    load = np.zeros(world_size, dtype=np.int64)
    first_row = side.order[side.starts[:-1]]
    alone = first_row[side.counts == 1]
    np.add.at(load, rank[alone], nbytes[alone])
    kept = [(alone, np.zeros(len(alone), dtype=np.int64), nbytes[alone])]
    by_set = np.argsort(like, kind="stable")
    low, high = (np.searchsorted(like[by_set], sets, side=end) for end in ("left", "right"))
    for turn in np.lexsort((sets, side.counts[sets])).tolist():
        groups = by_set[low[turn] : high[turn]]
        groups = groups[np.argsort(-nbytes[first_row[groups]], kind="stable")]
        start = side.starts[sets[turn]]
        ranks = rank[side.order[start : start + side.counts[sets[turn]]]]
        box, place, first, stop = _shared(load[ranks], nbytes[first_row[groups]], grain[first_row[groups]])
        np.add.at(load, ranks[place], stop - first)
        kept.append((side.order[side.starts[groups[box]] + place], first, stop))
    row, first, stop = (np.concatenate(column) for column in zip(*kept, strict=True))
    order = np.argsort(row, kind="stable")
    return Shares(row[order], first[order], stop[order]), load


def _shared(load: IntArray, nbytes: IntArray, grain: IntArray) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Boxes, largest first, shared out among ranks with some ``load``: box, rank (a place in ``load``), first, stop."""
    level = _level(load, int(nbytes.sum()))
    worst_fit, peak = _worst_fit(load, nbytes)
    if _BALANCED * peak <= (_BALANCED + 1) * level or not grain.any():
        return np.arange(len(nbytes)), worst_fit, np.zeros_like(nbytes), nbytes
    edges = np.concatenate([[0], np.cumsum(nbytes)])
    room = np.concatenate([[0], np.cumsum(np.maximum(level - load, 0))])
    cuts = _cuts(np.minimum(room[1:-1], edges[-1]), edges, grain, level)
    points = distinct(np.concatenate([edges, cuts]))
    first, stop = points[:-1], points[1:]
    box = np.searchsorted(edges, first, side="right") - 1
    place = np.searchsorted(cuts, first, side="right")
    empty = np.flatnonzero(nbytes == 0)  # they have no place in the row: each stays where it went as a whole
    box, place = np.concatenate([box, empty]), np.concatenate([place, worst_fit[empty]])
    base = edges[box]
    return box, place, np.concatenate([first, edges[empty]]) - base, np.concatenate([stop, edges[empty]]) - base


def _worst_fit(load: IntArray, nbytes: IntArray) -> tuple[IntArray, int]:
    """The place of each box as a whole, and what the most loaded one of those that get boxes has then."""
    heap = [(have, place) for place, have in enumerate(load.tolist())]
    heapq.heapify(heap)
    places, peak = [], 0
    for size in nbytes.tolist():
        have, place = heap[0]
        places.append(place)
        peak = max(peak, have + size)
        heapq.heapreplace(heap, (have + size, place))
    return np.array(places, dtype=np.int64), peak


def _level(load: IntArray, nbytes: int) -> int:
    """What no rank needs to exceed when ``nbytes`` are poured over ``load``, rounded up."""
    ordered = np.sort(load)
    n = np.arange(1, len(load) + 1)
    levels = -(-(nbytes + np.cumsum(ordered)) // n)
    return int(levels[np.flatnonzero(levels >= ordered)[-1]])


def _cuts(wanted: IntArray, edges: IntArray, grain: IntArray, level: int) -> IntArray:
    """Where the row of boxes is cut: at whole grains, and at an edge between boxes where that is near enough."""
    box = np.minimum(np.searchsorted(edges, wanted, side="right") - 1, len(grain) - 1)
    low, high = edges[box], edges[box + 1]
    step = np.where(grain[box] > 0, grain[box], np.maximum(high - low, 1))
    inside = np.minimum(low + (wanted - low + step // 2) // step * step, high)
    edge = np.where(wanted - low <= high - wanted, low, high)
    return np.where(np.abs(edge - wanted) * _SNAP <= level, edge, inside)
