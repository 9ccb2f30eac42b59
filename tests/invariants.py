"""Claims that many tests make, as assertions on values of the package."""

from __future__ import annotations

import numpy as np

from ckpt_tool.geometry.box import Box
from ckpt_tool.geometry.columns import Int64Array
from tests import oracle


def assert_partition(shape: tuple[int, ...], boxes: list[Box]) -> None:
    """Every element of the shape lies in exactly one box."""
    held = oracle.counts(shape, boxes)
    assert held.min(initial=1) == 1, f"{int((held == 0).sum())} elements of {shape} lie in no box of {boxes}"
    assert held.max(initial=1) == 1, f"{int((held > 1).sum())} elements of {shape} lie in several boxes of {boxes}"
    assert sum(box.volume for box in boxes) == held.size


def assert_bounds(bounds: Int64Array, length: int) -> None:
    """Bounds run from 0 to the length without a step back."""
    assert bounds[0] == 0
    assert bounds[-1] == length
    assert np.all(np.diff(bounds) >= 0)


def assert_reads_hold_runs(
    starts: Int64Array, lengths: Int64Array, reads: tuple[Int64Array, Int64Array, Int64Array], cap: int
) -> None:
    """Each byte of every run lies in the read named for it, or in the pieces of its own that follow."""
    read_start, read_length, run_to_read = reads
    assert np.all(read_length > 0)
    for start, length, read in zip(starts.tolist(), lengths.tolist(), run_to_read.tolist(), strict=True):
        if length == 0:
            assert read == -1
            continue
        at, left, index = start, length, read
        while left:
            assert read_start[index] <= at < read_start[index] + read_length[index]
            taken = min(left, int(read_start[index] + read_length[index]) - at)
            assert taken == left or read_length[index] == cap
            at, left, index = at + taken, left - taken, index + 1
