"""Runs of exact zeros, and what they mean."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.checks.zeros import ZeroBox, joined_runs, judge_zeros, run_boxes, zero_runs
from ckpt_tool.geometry.box import Box


def slow_runs(bits: list[int], min_run: int) -> list[tuple[int, int]]:
    """The same, one element at a time."""
    found, at = [], 0
    for is_zero, members in groupby(bits, lambda b: b == 0):
        n = len(list(members))
        if is_zero and (n >= min_run or at == 0 or at + n == len(bits)):
            found.append((at, at + n))
        at += n
    return found


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 3000)), max_size=8), st.sampled_from([128, 1000, 4096, 5000]))
def test_runs_are_found_exactly(pattern: list[tuple[bool, int]], min_run: int) -> None:
    """Whether elements are looked at one by one or by granules, the runs are the same."""
    bits = np.concatenate(
        [np.full(n, 0 if is_zero else 7, dtype="u2") for is_zero, n in pattern] or [np.empty(0, "u2")]
    )
    assert zero_runs(bits, min_run) == slow_runs(bits.tolist(), min_run)


@given(st.lists(st.integers(1, 9000), max_size=5), st.integers(1, 5))
def test_runs_cut_by_blocks_are_joined(lengths: list[int], n_blocks: int) -> None:
    """Runs that cross the cut between blocks come out as one."""
    parts = [np.full(n, i % 2, dtype="u4") for i, n in enumerate(lengths)]
    bits = np.concatenate([*parts, np.empty(0, "u4")])
    found, at = [], 0
    for block in np.array_split(bits, n_blocks):
        runs = zero_runs(block, 4096)
        found += [(a + at, b + at) for a, b in runs]
        at += len(block)
    joined = [run for run in joined_runs(found) if run[1] - run[0] >= 4096]
    assert joined == [run for run in slow_runs(bits.tolist(), 4096) if run[1] - run[0] >= 4096]


def test_boxes_of_a_run_are_global() -> None:
    """A run of a chunk that begins at row 4."""
    zeros = run_boxes([(3, 10)], 5, Box((4, 0), (3, 5)))
    assert [(str(zero.box), zero.chunk) for zero in zeros] == [("[4:5, 3:5]", 5), ("[5:6, 0:5]", 5)]


def zero(*offsets_sizes: tuple[tuple[int, ...], tuple[int, ...]]) -> list[ZeroBox]:
    """Zero boxes of one chunk."""
    return [ZeroBox(Box(offsets, sizes), 0) for offsets, sizes in offsets_sizes]


TAIL = zero(((6, 3), (1, 5)), ((7, 0), (3, 8)))
ROWS = zero(((2, 0), (4, 8)))


@pytest.mark.parametrize(
    ("zeros", "others", "expected"),
    [
        (TAIL, {"weight": [], "exp_avg": []}, "zero-run"),
        (TAIL, {"weight": [], "exp_avg": TAIL}, "zero-run"),
        (TAIL, {"weight": TAIL, "exp_avg": TAIL}, None),
        (ROWS, {"weight": [], "exp_avg": []}, "zero-run"),
        (ROWS, {"weight": [], "exp_avg": ROWS}, "zero-rows"),
        (ROWS, {}, "zero-rows"),
        ([], {"exp_avg": []}, None),
    ],
)
def test_meaning(zeros: list[ZeroBox], others: dict[str, list[ZeroBox]], expected: str | None) -> None:
    """Suspicious where other state is alive or where rows are cut; natural for whole rows, and for padding."""
    judged = judge_zeros((10, 8), zeros, others)
    assert (judged[0] if judged else None) == expected
