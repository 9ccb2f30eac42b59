"""Replicated boxes are shared out within 5 % of perfect balance, cut where whole ones cannot be, always alike."""

from __future__ import annotations

from random import Random

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.manifest.tables import IntArray
from ckpt_tool.plan.assign import choose_replicas
from ckpt_tool.plan.share_replicas import Shares, share_replicas

Boxes = list[tuple[int, tuple[int, ...]]]
"""Size of each box, and the ranks that hold it."""


def shared(boxes: Boxes, world_size: int, grain: int = 1) -> tuple[Shares, IntArray, IntArray]:
    """The shares, with box and rank of every row."""
    rows = [(number, rank, size) for number, (size, ranks) in enumerate(boxes) for rank in ranks]
    group, rank, nbytes = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    return share_replicas(group, rank, nbytes, np.full(len(rows), grain), world_size), group, rank


def loads(boxes: Boxes, world_size: int, grain: int = 1) -> IntArray:
    """Bytes of each rank; every byte of a box is one rank's."""
    shares, group, rank = shared(boxes, world_size, grain)
    for number, (size, _) in enumerate(boxes):
        own = np.flatnonzero(group[shares.row] == number)
        parts = sorted(zip(shares.first[own].tolist(), shares.stop[own].tolist(), strict=True))
        assert [first for first, _ in parts] == [0, *(stop for _, stop in parts[:-1])]
        assert parts[-1][1] == size
        assert all(first % grain == 0 for first, _ in parts)
        assert len(set(rank[shares.row[own]].tolist())) == len(own)
    load = np.zeros(world_size, dtype=np.int64)
    np.add.at(load, rank[shares.row], shares.stop - shares.first)
    return load


def bound(boxes: Boxes, world_size: int) -> float:
    """What the most loaded rank has at least: of each set of ranks, what nobody else holds, evenly spread."""
    sets = {ranks for _, ranks in boxes} | {tuple(range(world_size))}
    return max(sum(size for size, ranks in boxes if set(ranks) <= set(own)) / len(own) for own in sets)


def test_three_large_tensors_on_four_ranks() -> None:
    """Each rank has three quarters of one, where whole ones would leave a rank without any."""
    boxes: Boxes = [(100, (0, 1, 2, 3))] * 3
    assert loads(boxes, 4, grain=5).tolist() == [75] * 4


@pytest.mark.parametrize(("n_boxes", "n_ranks"), [(1, 8), (5, 4), (7, 3), (9, 8), (31, 16)])
def test_few_large_boxes(n_boxes: int, n_ranks: int) -> None:
    """However few, the balance is within 5 %; only as many cuts are made as there are ranks, less one."""
    boxes: Boxes = [(10_000, tuple(range(n_ranks)))] * n_boxes
    load = loads(boxes, n_ranks, grain=10)
    assert load.max() <= 1.05 * load.mean()
    assert len(shared(boxes, n_ranks, 10)[0].row) <= n_boxes + n_ranks - 1


def test_what_is_balanced_stays_whole() -> None:
    """Worst fit is good where boxes are many; it is kept then, row by row."""
    sizes = Random(7).choices(range(50, 100), k=200)
    group, rank = np.repeat(np.arange(200), 4), np.tile(np.arange(4), 200)
    nbytes = np.repeat(np.array(sizes, dtype=np.int64), 4)
    shares = share_replicas(group, rank, nbytes, np.ones(800, dtype=np.int64), 4)
    assert shares.row.tolist() == choose_replicas(group, rank, nbytes, 4).tolist()
    assert (shares.first == 0).all()
    assert (shares.stop == nbytes[shares.row]).all()


def test_what_may_not_be_cut_stays_whole() -> None:
    """Boxes with a grain of 0 have one row each, whatever the balance."""
    shares, group, _ = shared([(100, (0, 1, 2, 3))] * 3, 4, grain=0)
    assert group[shares.row].tolist() == [0, 1, 2]
    assert (shares.stop - shares.first).tolist() == [100] * 3


def poured(alone: npt.NDArray[np.float64], nbytes: int) -> float:
    """The level of ``nbytes`` over what is there, found by halves."""
    low, high = 0.0, float(alone.max() + nbytes)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if np.maximum(middle - alone, 0).sum() >= nbytes else (middle, high)
    return high


@given(st.lists(st.integers(0, 100_000), min_size=1, max_size=40), st.integers(2, 9), st.lists(st.integers(0, 50_000)))
def test_balance_of_one_set(sizes: list[int], n_ranks: int, own: list[int]) -> None:
    """Whatever the boxes, and whatever ranks hold alone, nobody exceeds what is possible by more than 5 %."""
    boxes: Boxes = [(size, tuple(range(n_ranks))) for size in sizes]
    boxes += [(size, (number % n_ranks,)) for number, size in enumerate(own)]
    alone = np.array([sum(own[rank::n_ranks]) for rank in range(n_ranks)], dtype=np.float64)
    assert loads(boxes, n_ranks).max() <= 1.05 * max(alone.max(), poured(alone, sum(sizes))) + 2


@given(
    st.integers(1, 4), st.integers(1, 4),
    st.lists(st.tuples(st.integers(1, 100_000), st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=30),
)  # fmt: skip
def test_balance_of_a_mesh(tp: int, dp: int, kinds: list[tuple[int, int, int]]) -> None:
    """Boxes of single ranks, of data-parallel ranks and of all: within 5 % of the bound that holds for each set."""
    boxes: Boxes = []
    for size, kind, place in kinds:
        sets = ((place % (tp * dp),), tuple(range(place % tp, tp * dp, tp)), tuple(range(tp * dp)))
        boxes.append((size, sets[kind]))
    assert loads(boxes, tp * dp).max() <= 1.05 * bound(boxes, tp * dp) + 3


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=12), st.integers(2, 6), st.integers(1, 64))
def test_a_cut_costs_a_grain_at_most(sizes: list[int], n_ranks: int, grain: int) -> None:
    """Parts are whole grains, and what that costs is one of them."""
    boxes: Boxes = [(size * grain, tuple(range(n_ranks))) for size in sizes]
    assert loads(boxes, n_ranks, grain).max() <= 1.05 * bound(boxes, n_ranks) + grain + 1


@given(st.lists(st.tuples(st.integers(1, 1000), st.sets(st.integers(0, 5), min_size=1)), max_size=25))
def test_any_sets_of_ranks(found: list[tuple[int, set[int]]]) -> None:
    """Each byte is one rank's, and nobody has more than under worst fit, whatever ranks hold which box."""
    boxes: Boxes = [(size, tuple(sorted(ranks))) for size, ranks in found]
    rows = [(number, rank, size) for number, (size, ranks) in enumerate(boxes) for rank in ranks]
    group, rank, nbytes = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    kept = choose_replicas(group, rank, nbytes, 6)
    whole = np.bincount(rank[kept], weights=nbytes[kept], minlength=6)
    assert loads(boxes, 6).max() <= whole.max()


def test_the_largest_job() -> None:
    """8,960 ranks that hold 70 to a set: 128 sets with few large boxes each, the same twice, within 5 %."""
    tp_pp, dp = 128, 70
    sizes = [600_000_000 + 1_000 * i for i in range(48)] + [32_768] * 16
    group = np.repeat(np.arange(tp_pp * len(sizes)), dp)
    rank = (np.arange(tp_pp)[:, None, None] + tp_pp * np.arange(dp)).repeat(len(sizes), axis=1).reshape(-1)
    nbytes = np.repeat(np.tile(np.array(sizes, dtype=np.int64), tp_pp), dp)
    grain = np.full(len(group), 1 << 20)
    one, other = (share_replicas(group, rank, nbytes, grain, tp_pp * dp) for _ in range(2))
    load = np.zeros(tp_pp * dp, dtype=np.int64)
    np.add.at(load, rank[one.row], one.stop - one.first)
    assert load.sum() == tp_pp * sum(sizes)
    assert load.max() <= 1.05 * load.mean()
    assert all((getattr(one, name) == getattr(other, name)).all() for name in ("row", "first", "stop"))
