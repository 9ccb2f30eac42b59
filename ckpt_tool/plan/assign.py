"""Who does what: replicas to ranks and units of work to workers, balanced by bytes and the same on every machine."""

from __future__ import annotations

import heapq

import numpy as np

from ckpt_tool.geometry.alike import Side, alike_keys
from ckpt_tool.manifest.tables import IntArray

__all__ = ["choose_replicas", "file_owners", "split_evenly"]


def choose_replicas(group: IntArray, rank: IntArray, nbytes: IntArray, world_size: int) -> IntArray:
    """Rows to keep, one per group, so that the bytes kept by each rank are balanced (worst fit).

    Groups with one row keep it; the others are taken from the largest to the smallest (ties in order of appearance)
    and given to that of their ranks which has least so far, the lowest rank on a tie.

    Args:
        group: int64[n], equal for replicas of one box.
        rank: int64[n], rank that holds the replica.
        nbytes: int64[n], size of the replica.
        world_size: number of ranks.

    Returns:
        Rows in ascending order.

    >>> import numpy as np
    >>> choose_replicas(np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1]), np.array([8, 8, 6, 6]), 2).tolist()
    [0, 3]
    """
    if not len(group):
        return np.zeros(0, dtype=np.int64)
    number = np.unique(group, return_inverse=True)[1].reshape(-1)
    side = Side.of(number, int(number.max()) + 1, rank[:, None], rank[:, None])
    first = side.order[side.starts[:-1]]
    load = np.zeros(world_size, dtype=np.int64)
    single = first[side.counts == 1]
    np.add.at(load, rank[single], nbytes[single])
    shared = np.flatnonzero(side.counts > 1)
    shared = shared[np.argsort(-nbytes[first[shared]], kind="stable")]
    taken = _worst_fit(shared, side, rank, nbytes, load.tolist())
    return np.sort(np.concatenate([single, taken]))


def _worst_fit(groups: IntArray, side: Side, rank: IntArray, nbytes: IntArray, load: list[int]) -> IntArray:
    """One row for each of ``groups``, in that order; ``load`` grows.

    Groups on the same ranks share a heap of these. Loads only grow, so that what a heap says is too low at most: its
    least entry is put right until it is true.
    """
    if not len(groups):
        return np.zeros(0, dtype=np.int64)
    same_ranks = alike_keys(side, side).like[groups].tolist()
    starts = side.starts[groups].tolist()
    heaps: dict[int, list[tuple[int, int, int]]] = {}
    taken: list[int] = []
    for start, like, size in zip(starts, same_ranks, nbytes[side.order[side.starts[groups]]].tolist(), strict=True):
        heap = heaps.get(like)
        if heap is None:
            ranks = rank[side.order[side.starts[like] : side.starts[like + 1]]].tolist()
            heap = heaps[like] = [(load[number], number, place) for place, number in enumerate(ranks)]
            heapq.heapify(heap)
        while heap[0][0] != load[heap[0][1]]:
            _, number, place = heap[0]
            heapq.heapreplace(heap, (load[number], number, place))
        _, number, place = heap[0]
        load[number] += size
        heapq.heapreplace(heap, (load[number], number, place))
        taken.append(start + place)
    return side.order[np.array(taken, dtype=np.int64)]


def split_evenly(nbytes: IntArray, parts: int) -> IntArray:
    """int64[parts + 1]: bounds of consecutive runs of rows with about equal sums of ``nbytes``.

    >>> import numpy as np
    >>> split_evenly(np.array([4, 1, 1, 2]), 2).tolist()
    [0, 1, 4]
    """
    total = np.concatenate([[0], np.cumsum(nbytes)])
    wanted = total[-1] * np.arange(1, parts) / parts
    inner = np.searchsorted(total, wanted, side="left")
    return np.concatenate([[0], inner, [len(nbytes)]]).astype(np.int64)


def file_owners(nbytes: IntArray, parts: int, *, first: IntArray) -> IntArray:
    """int64[n]: who writes each file, where every file is written by one: runs of files of about equal sums.

    Args:
        nbytes: int64[n], size of each file.
        parts: number of writers.
        first: rows that the first one writes in any case.

    >>> import numpy as np
    >>> file_owners(np.array([4, 1, 4, 4, 1]), 2, first=np.array([4])).tolist()
    [0, 0, 0, 1, 0]
    """
    counted = nbytes.copy()
    counted[first] = 0
    bounds = split_evenly(counted, parts)
    owners: IntArray = np.searchsorted(bounds[1:-1], np.arange(len(nbytes)), side="right")
    owners[first] = 0
    return owners
