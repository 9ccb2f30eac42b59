"""Who does what: replicas to ranks and units of work to workers, balanced by bytes and the same on every machine."""

from __future__ import annotations

import numpy as np

from ckpt_tool.manifest.tables import IntArray

__all__ = ["choose_replicas", "split_evenly"]


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
    order = np.argsort(group, kind="stable")
    starts = np.flatnonzero(np.r_[True, group[order][1:] != group[order][:-1]])
    counts = np.diff(np.r_[starts, len(order)])
    load = np.zeros(world_size, dtype=np.int64)
    single = order[starts[counts == 1]]
    np.add.at(load, rank[single], nbytes[single])
    kept = [single]
    shared = np.flatnonzero(counts > 1)
    shared = shared[np.argsort(-nbytes[order[starts[shared]]], kind="stable")]
    for slot in shared.tolist():
        rows = order[starts[slot] : starts[slot] + counts[slot]]
        ranks = rank[rows]
        best = np.lexsort((ranks, load[ranks]))[0]
        load[ranks[best]] += nbytes[rows[best]]
        kept.append(rows[best : best + 1])
    return np.sort(np.concatenate(kept))


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
