"""Laws of byte runs and of the reads that hold them."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tool.errors import LayoutError
from ckpt_tool.geometry.box import Box
from ckpt_tool.geometry.runs import ByteRuns, byte_runs, contiguous_strides, merge_runs
from tests import oracle
from tests.invariants import assert_reads_hold_runs
from tests.strategies import boxes, shapes


@given(shapes())
@settings(max_examples=50)
def test_contiguous_strides_are_those_of_numpy(shape: tuple[int, ...]) -> None:
    """Strides of a dense tensor are numpy's, in elements."""
    if prod(shape):
        assert contiguous_strides(shape) == tuple(s // 8 for s in oracle.positions(shape).strides)


@st.composite
def strided_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], Box]:
    """A chunk that is dense, permuted, padded between rows or broadcast, and a box of it."""
    shape = draw(shapes(4))
    order = draw(st.permutations(range(len(shape))))
    padded = [n + draw(st.integers(0, 1)) for n in shape]
    step, strides = 1, [0] * len(shape)
    for dim in reversed(order):
        strides[dim] = step if draw(st.integers(0, 5)) else 0
        step *= max(padded[dim], 1)
    return shape, tuple(strides), draw(boxes(shape))


@given(strided_boxes(), st.sampled_from([8, 16, 32]))
@settings(max_examples=250)
def test_byte_runs_are_numpy_slicing(case: tuple[tuple[int, ...], tuple[int, ...], Box], bits: int) -> None:
    """The runs laid end to end are the bytes of the slice, for any strides; span reaches from first to last byte."""
    shape, strides, box = case
    itemsize = bits // 8
    n_elements = 1 + sum(max(n - 1, 0) * s for n, s in zip(shape, strides, strict=True))
    buffer = np.random.default_rng(7).integers(0, 256, n_elements * itemsize, dtype=np.uint8).tobytes()
    chunk = np.lib.stride_tricks.as_strided(
        np.frombuffer(buffer, dtype=f"V{itemsize}"), shape, [s * itemsize for s in strides]
    )
    runs = byte_runs(box, strides, bits)
    starts = runs.starts()
    assert oracle.gather_bytes(buffer, starts, runs.nbytes) == chunk[box.slices].tobytes()
    assert len(starts) == runs.n_runs
    assert runs.n_runs * runs.nbytes == box.volume * itemsize
    if box.volume:
        assert starts.min() == runs.start
        assert starts.max() + runs.nbytes - starts.min() == runs.span
    else:
        assert runs.span == 0


@given(shapes(4))
@settings(max_examples=50)
def test_a_dense_chunk_is_one_run(shape: tuple[int, ...]) -> None:
    """The whole of a dense chunk collapses into one run without a loop."""
    runs = byte_runs(Box.whole(shape), contiguous_strides(shape), 16)
    expected = ByteRuns(0, prod(shape) * 2, (), ()) if prod(shape) else ByteRuns(0, 0, (0,), (0,))
    assert runs == expected


def test_loops_that_continue_each_other_are_one() -> None:
    """One column of a dense 3-D chunk is a single loop, though two dimensions run."""
    assert byte_runs(Box((0, 0, 1), (4, 5, 1)), (30, 6, 1), 32) == ByteRuns(4, 4, (20,), (24,))


def test_a_transposed_chunk_has_runs_of_one_element() -> None:
    """Rows of a transposed matrix are strided element by element."""
    assert byte_runs(Box((0, 0), (2, 3)), (1, 2), 16) == ByteRuns(0, 2, (2, 3), (2, 4))


@pytest.mark.parametrize(
    ("box", "bits", "expected"),
    [
        (Box((1, 2), (2, 4)), 4, ByteRuns(5, 2, (2,), (4,))),
        (Box((0, 0), (3, 8)), 6, ByteRuns(0, 18, (), ())),
        (Box((1, 4), (1, 4)), 6, ByteRuns(9, 3, (), ())),
    ],
)
def test_narrow_elements_on_whole_bytes(box: Box, bits: int, expected: ByteRuns) -> None:
    """Elements narrower than a byte are addressed where runs begin and end on bytes."""
    assert byte_runs(box, (8, 1), bits) == expected


@pytest.mark.parametrize(
    ("box", "bits"), [(Box((0, 1), (1, 2)), 4), (Box((0, 0), (2, 3)), 4), (Box((0, 0), (2, 2)), 6)]
)
def test_narrow_elements_across_bytes_are_refused(box: Box, bits: int) -> None:
    """A run that begins or ends inside a byte is an error, never a rounded address."""
    with pytest.raises(LayoutError, match="does not lie on whole bytes"):
        byte_runs(box, (8, 1), bits)


@pytest.mark.parametrize("strides", [(1,), (8, -1)])
def test_strides_must_fit(strides: tuple[int, ...]) -> None:
    """Strides are one non-negative number per dimension."""
    with pytest.raises(LayoutError, match="do not fit"):
        byte_runs(Box((0, 0), (2, 2)), strides, 8)


@given(
    st.lists(st.tuples(st.integers(0, 120), st.integers(0, 40)), max_size=25),
    st.integers(0, 12),
    st.integers(1, 50),
    st.booleans(),
)
@settings(max_examples=300)
def test_reads_hold_every_run(runs: list[tuple[int, int]], max_gap: int, max_read: int, split: bool) -> None:
    """Runs lie in their reads, which keep the cap (a long run's own aside) and read over no gap beyond the limit."""
    starts = np.array([start for start, _ in runs], dtype=np.int64)
    lengths = np.array([length for _, length in runs], dtype=np.int64)
    reads = merge_runs(starts, lengths, max_gap_bytes=max_gap, max_read_bytes=max_read, split=split)
    read_start, read_length, run_to_read = reads
    assert_reads_hold_runs(starts, lengths, reads, max_read)
    long_runs = set(zip(starts[lengths > max_read].tolist(), lengths[lengths > max_read].tolist(), strict=True))
    wanted = np.zeros(200, dtype=bool)
    for start, length in runs:
        wanted[start : start + length] = True
    for start, length in zip(read_start.tolist(), read_length.tolist(), strict=True):
        assert length <= max_read or (not split and (start, length) in long_runs)
        assert wanted[start]
        assert wanted[start + length - 1]
        gap = longest_gap(wanted[start : start + length])
        assert gap <= max_gap
    if not split:
        assert sorted(set(run_to_read.tolist()) - {-1}) == list(range(len(read_start)))


def longest_gap(wanted: np.ndarray) -> int:
    """The longest stretch of bytes that nobody asked for."""
    return max((len(stretch) for stretch in "".join("x" if w else "." for w in wanted).split("x")), default=0)


def test_neighbours_share_a_read_up_to_the_gap() -> None:
    """Gaps of at most max_gap_bytes are read over, larger ones end the read; the order of the runs is free."""
    starts, lengths = np.array([100, 0, 14, 40]), np.array([10, 10, 6, 10])
    reads = merge_runs(starts, lengths, max_gap_bytes=4, max_read_bytes=1000, split=False)
    assert [column.tolist() for column in reads] == [[0, 40, 100], [20, 10, 10], [2, 0, 0, 1]]


def test_a_nested_run_does_not_end_a_read() -> None:
    """A short run inside a longer one leaves the read open up to the longer one's end."""
    starts, lengths = np.array([0, 2, 20]), np.array([20, 3, 5])
    reads = merge_runs(starts, lengths, max_gap_bytes=0, max_read_bytes=100, split=False)
    assert [column.tolist() for column in reads] == [[0], [25], [0, 0, 0]]


def test_the_cap_ends_a_read() -> None:
    """Adjacent runs fill a read up to the cap; the next read begins with the run that did not fit."""
    starts, lengths = np.arange(10) * 10, np.full(10, 10)
    reads = merge_runs(starts, lengths, max_gap_bytes=0, max_read_bytes=35, split=False)
    assert [column.tolist() for column in reads] == [[0, 30, 60, 90], [30, 30, 30, 10], [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]]


def test_a_long_run_is_split_on_request() -> None:
    """With split, a run longer than the cap gets pieces of its own that follow one another."""
    starts, lengths = np.array([0, 5]), np.array([5, 25])
    whole = merge_runs(starts, lengths, max_gap_bytes=9, max_read_bytes=10, split=False)
    assert [column.tolist() for column in whole] == [[0, 5], [5, 25], [0, 1]]
    pieces = merge_runs(starts, lengths, max_gap_bytes=9, max_read_bytes=10, split=True)
    assert [column.tolist() for column in pieces] == [[0, 5, 15, 25], [5, 10, 10, 5], [0, 1]]


def test_knobs_must_make_sense() -> None:
    """A read of no bytes is refused."""
    with pytest.raises(LayoutError, match="max_read_bytes must be positive"):
        merge_runs(np.array([0]), np.array([1]), max_gap_bytes=0, max_read_bytes=0, split=False)
