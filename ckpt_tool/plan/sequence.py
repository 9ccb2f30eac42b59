"""A sequence of work is an order in which every target file is filled from its first byte to its last.

Storage without seek needs it. Regions that several files share may contradict each other (one file wants a before b,
another one b before a); such regions are taken apart into one for each chunk, and their bytes read once per chunk.
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from ckpt_tool.geometry.columns import one_of_each
from ckpt_tool.manifest.tables import IntArray

__all__ = ["in_file_order"]


def in_file_order(
    label: IntArray, file: npt.NDArray[np.integer], offset: IntArray, owner: IntArray | None = None
) -> tuple[IntArray, IntArray]:
    """Labels of regions, some of them taken apart, and for each chunk the turn of its region.

    Args:
        label: int64[n], the region of each chunk.
        file: int[n], file of each chunk.
        offset: int64[n], byte of the file.
        owner: int64[n], who writes the file, where that is not one process: no region is of two of them.

    >>> crossed = in_file_order(np.array([0, 1, 0, 1]), np.array([0, 0, 1, 1]), np.array([0, 9, 9, 0]))
    >>> [part.tolist() for part in crossed]
    [[2, 3, 4, 5], [0, 1, 3, 2]]
    """
    n = len(label)
    if not n:
        return label, np.zeros(0, dtype=np.int64)
    position = np.lexsort((offset, file))
    own = int(label.max()) + 1 + np.arange(n)
    _, where, times = np.unique(np.column_stack([label, file]), axis=0, return_inverse=True, return_counts=True)
    # Tiles of a region fill all its chunks side by side, so two of them cannot lie in one file.
    label = np.where(np.isin(label, label[times[where.reshape(-1)] > 1]), own, label)
    if owner is not None:
        least, most = np.full(int(label.max()) + 1, np.iinfo(np.int64).max), np.full(int(label.max()) + 1, -1)
        np.minimum.at(least, label, owner)
        np.maximum.at(most, label, owner)
        label = np.where((least < most)[label], own, label)
    turn = _turns(label, file, position)
    if (turn < 0).any():
        label = np.where(turn < 0, own, label)
        turn = _turns(label, file, position)  # what was stuck is now a chain in each file, which no cycle can hold
    return label, turn


def _turns(label: IntArray, file: npt.NDArray[np.integer], position: IntArray) -> IntArray:
    """int64[n]: when the region of each chunk can be written; -1 for those in a cycle, or behind one."""
    names, region = np.unique(label, return_inverse=True)
    first = np.full(len(names), len(label), dtype=np.int64)
    np.minimum.at(first, region[position], np.arange(len(label)))
    before, after = region[position[:-1]], region[position[1:]]
    is_edge = (file[position[:-1]] == file[position[1:]]) & (before != after)
    before, after = before[is_edge], after[is_edge]
    edge = one_of_each(before, after)
    n_before = np.bincount(after[edge], minlength=len(names)).tolist()
    starts = np.searchsorted(before[edge], np.arange(len(names) + 1)).tolist()
    followers, first_list = after[edge].tolist(), first.tolist()
    ready = [(first_list[at], at) for at, waits in enumerate(n_before) if not waits]
    heapq.heapify(ready)
    turns = np.full(len(names), -1, dtype=np.int64)
    for turn in range(len(names)):
        if not ready:
            break
        _, at = heapq.heappop(ready)
        turns[at] = turn
        for follower in followers[starts[at] : starts[at + 1]]:
            n_before[follower] -= 1
            if not n_before[follower]:
                heapq.heappush(ready, (first_list[follower], follower))
    found: IntArray = turns[region]
    return found
