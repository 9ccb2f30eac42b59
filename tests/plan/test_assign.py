"""Work is given out evenly and the same way every time."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.manifest.tables import IntArray
from ckpt_tool.plan.assign import choose_replicas, split_evenly


def test_replicated_boxes_balance_loads_that_are_fixed() -> None:
    """Boxes that any rank can store go to the rank with fewest bytes of its own."""
    group = np.array([0, 1, 2, 2, 3, 3])
    rank = np.array([0, 1, 0, 1, 0, 1])
    nbytes = np.array([10, 2, 4, 4, 3, 3])
    assert choose_replicas(group, rank, nbytes, 2).tolist() == [0, 1, 3, 5]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 6))
def test_worst_fit_keeps_one_replica_and_is_balanced(sizes: list[int], n_ranks: int) -> None:
    """Each group keeps one row; no rank has more than the mean and the largest box together."""
    group = np.repeat(np.arange(len(sizes)), n_ranks)
    rank = np.tile(np.arange(n_ranks), len(sizes))
    nbytes = np.repeat(np.array(sizes), n_ranks)
    kept = choose_replicas(group, rank, nbytes, n_ranks)
    assert sorted(group[kept].tolist()) == list(range(len(sizes)))
    load = np.bincount(rank[kept], weights=nbytes[kept], minlength=n_ranks)
    assert load.max() <= sum(sizes) / n_ranks + max(sizes)


def in_turn(group: IntArray, rank: IntArray, nbytes: IntArray, world_size: int) -> list[int]:
    """Worst fit as it is said: group by group, every rank looked at."""
    rows_of = {number: np.flatnonzero(group == number) for number in np.unique(group)}
    load = np.zeros(world_size, dtype=np.int64)
    kept = [int(rows[0]) for rows in rows_of.values() if len(rows) == 1]
    for row in kept:
        load[rank[row]] += nbytes[row]
    shared = [rows for rows in rows_of.values() if len(rows) > 1]
    for rows in sorted(shared, key=lambda rows: -nbytes[rows[0]]):
        best = min(rows.tolist(), key=lambda row: (load[rank[row]], rank[row]))
        load[rank[best]] += nbytes[best]
        kept.append(best)
    return sorted(kept)


@given(st.lists(st.tuples(st.integers(1, 20), st.sets(st.integers(0, 5), min_size=1)), max_size=25), st.randoms())
def test_heaps_choose_as_looking_at_every_rank_does(boxes: list[tuple[int, set[int]]], random: Random) -> None:
    """Whatever ranks hold a box, and in whatever order the rows come, the choice is that of the plain rule."""
    rows = [(number, rank, size) for number, (size, ranks) in enumerate(boxes) for rank in ranks]
    random.shuffle(rows)
    group, rank, nbytes = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    assert choose_replicas(group, rank, nbytes, 6).tolist() == in_turn(group, rank, nbytes, 6)


@given(st.lists(st.integers(1, 100), max_size=40), st.integers(1, 8))
def test_split_evenly_is_within_one_row_of_even(sizes: list[int], parts: int) -> None:
    """Bounds rise from 0 to the number of rows, and no part exceeds its share by more than one row."""
    bounds = split_evenly(np.array(sizes, dtype=np.int64), parts)
    assert bounds[0] == 0
    assert bounds[-1] == len(sizes)
    assert (np.diff(bounds) >= 0).all()
    total = np.concatenate([[0], np.cumsum(sizes)])
    assert all(total[b] - total[a] <= sum(sizes) / parts + max(sizes, default=0) for a, b in pairwise(bounds.tolist()))
