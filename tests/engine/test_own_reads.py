"""What a rank reads for itself: runs straight into place, runs close together by one copy, all others through tiles."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tool.dtypes import dtype
from ckpt_tool.engine import direct, strided
from ckpt_tool.engine.landing import Landing, box_rows
from ckpt_tool.engine.own_reads import OwnReads, plan_own_boxes, run_own_reads
from ckpt_tool.errors import CoverageError
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.storage.memory import MemoryStore
from ckpt_tool.storage.store import ReadCost
from tests.engine.test_shared_exchange import ArrayMemory
from tests.storage.recording import RecordingStore
from tests.strategies import boxes, partitions, shapes
from tests.synthetic import limits, make_source

COST = ReadCost(max_gap_bytes=8, max_read_bytes=40, concurrency=1)
ROWS = [Box((start, 0), (2, 6)) for start in (0, 2, 4)]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of a few elements, so that small tensors have many, and some that are long."""
    monkeypatch.setattr(direct, "_PART_BYTES", 16)
    monkeypatch.setattr(strided, "_LONG_RUN_BYTES", 16)


def memory(sizes: tuple[int, ...], order: str) -> npt.NDArray[Any]:
    """Zeros with strides in the order of dimensions (C), the other way round (F), or with gaps between rows (cut)."""
    if order == "cut":
        return np.zeros((*sizes[:-1], sizes[-1] + 3), "u4")[..., 1:-2] if sizes else np.zeros((), "u4")
    return np.zeros(sizes, "u4", order=order)  # type: ignore[call-overload, no-any-return]


def planned(
    manifest: Manifest, wanted: list[tuple[Box, str]], cost: ReadCost = COST
) -> tuple[OwnReads, dict[int, Landing]]:
    """How memory for boxes of tensor 0 is filled; each with the order of its strides."""
    landings = {
        number: Landing(0, box, manifest.tensors.dtypes[0], ArrayMemory(memory(box.sizes, order)))
        for number, (box, order) in enumerate(wanted)
    }
    rows = box_rows([(0, box) for box, _ in wanted], manifest.tensors.shape.shape[1])
    return plan_own_boxes(manifest, rows, landings, limits(), cost), landings


def contents(landings: dict[int, Landing]) -> list[object]:
    """What the memory holds, as lists."""
    return [None if landing.memory.array is None else landing.memory.array.tolist() for landing in landings.values()]


@settings(max_examples=60)
@given(st.data())
def test_any_boxes(data: st.DataObject) -> None:
    """Whatever the cut and the strides, memory holds its boxes."""
    array = np.random.default_rng(0).integers(0, 1 << 30, data.draw(shapes(max_ndim=3)), dtype="u4")
    source = make_source({"a": array}, {"a": [box for box in data.draw(partitions(array.shape)) if box.volume]})
    orders = st.sampled_from(["C", "F", "cut"])
    wanted = data.draw(st.lists(st.tuples(boxes(array.shape), orders), max_size=4))
    wanted = [(box, order) for box, order in wanted if box.volume]
    cost = ReadCost(data.draw(st.sampled_from([0, 8, 64])), max_read_bytes=40, concurrency=1)
    reads, landings = planned(source.manifest, wanted, cost)
    sum(run_own_reads(reads, MemoryStore(source.files), landings, n_workers=1))
    assert contents(landings) == [array[box.slices].tolist() for box, _ in wanted]


def test_runs_need_no_tiles() -> None:
    """Boxes of whole rows are read as they are, none for one of columns; each byte once, in reads of bounded length."""
    array = np.arange(36, dtype="u4").reshape(6, 6)
    source = make_source({"a": array}, {"a": ROWS})
    for box, is_direct in ((ROWS[1], True), (Box((1, 0), (4, 6)), True), (Box((0, 1), (6, 2)), False)):
        reads, landings = planned(source.manifest, [(box, "C")])
        assert (reads.plan is None) == is_direct
        store = RecordingStore(MemoryStore(source.files))
        sum(run_own_reads(reads, store, landings, n_workers=1))
        assert contents(landings) == [array[box.slices].tolist()]
        if is_direct:
            assert store.nbytes == 4 * box.volume
            assert max(call.length for call in store.calls) <= 48


@pytest.mark.parametrize(
    ("box", "order", "n_calls", "nbytes"),
    [
        (Box((0, 2), (6, 3)), "C", 3, 3 * 36),  # of each chunk the two runs, with the 12 bytes between them
        (Box((0, 0), (6, 5)), "C", 6, 6 * 20),  # long runs come each for itself
        (Box((2, 0), (2, 6)), "F", 1, 48),  # one span of the file, which memory has in another order
        (Box((0, 0), (6, 6)), "cut", 6, 4 * 36),  # long runs into memory with gaps
    ],
)
def test_strided_parts_need_no_tiles(box: Box, order: str, n_calls: int, nbytes: int) -> None:
    """Runs that are long or close together are read with at most the gaps between them, into memory of any strides."""
    array = np.arange(36, dtype="u4").reshape(6, 6)
    source = make_source({"a": array}, {"a": ROWS})
    reads, landings = planned(source.manifest, [(box, order)], ReadCost(12, max_read_bytes=40, concurrency=1))
    assert reads.plan is None
    store = RecordingStore(MemoryStore(source.files))
    assert sum(run_own_reads(reads, store, landings, n_workers=1)) == store.nbytes == nbytes
    assert len(store.calls) == n_calls
    assert contents(landings) == [array[box.slices].tolist()]


def test_far_storage_is_asked_ahead_for_tiles() -> None:
    """Where a request takes long, strided parts are left to tiles, which are fetched before they are needed."""
    array = np.arange(36, dtype="u4").reshape(6, 6)
    source = make_source({"a": array}, {"a": ROWS})
    far = ReadCost(12, max_read_bytes=40, concurrency=4, read_ahead_bytes=1 << 20)
    for box, has_tiles in ((ROWS[1], False), (Box((0, 2), (6, 3)), True)):
        reads, landings = planned(source.manifest, [(box, "C")], far)
        assert (reads.plan is not None) == has_tiles
        sum(run_own_reads(reads, MemoryStore(source.files), landings, n_workers=1))
        assert contents(landings) == [array[box.slices].tolist()]


def test_spans_are_cut_to_the_buffer() -> None:
    """One outer iteration is cut in turn where it does not fit; every span is of whole runs."""
    array = np.arange(4 * 6 * 5, dtype="u4").reshape(4, 6, 5)
    source = make_source({"a": array}, {"a": [Box((0, 0, 0), (4, 6, 5))]})
    box = Box((1, 1, 1), (3, 5, 2))
    reads, landings = planned(source.manifest, [(box, "C")], ReadCost(64, max_read_bytes=4096, concurrency=1))
    assert reads.strided.length == (48, 28) * 3  # at most 64 bytes: three runs of 8, 20 from one to the next, and two
    sum(run_own_reads(reads, MemoryStore(source.files), landings, n_workers=1))
    assert contents(landings) == [array[box.slices].tolist()]


@pytest.mark.parametrize("cut", [ROWS[:2], [*ROWS, Box((3, 0), (2, 6))]])
def test_holes_and_overlaps_are_refused(cut: list[Box]) -> None:
    """Also where a box is just one of the chunks, what is stored must be clear."""
    source = make_source({"a": np.zeros((6, 6), "u4")}, {"a": cut})
    with pytest.raises(CoverageError):
        planned(source.manifest, [(ROWS[2], "C")])


@pytest.mark.parametrize("n_odd", [0, 1])
def test_numbers_without_dimensions_are_read_once(n_odd: int) -> None:
    """They have no box that could be left out of a plan; the rows of tensors that others hold look like theirs."""
    source = make_source({"a": np.array(7, "u4")}, {"a": [Box((), ())]})
    _, landings = planned(source.manifest, [(Box((), ()), "C")])
    if n_odd:  # one that is cast, so that there are tiles
        landings[1] = Landing(0, Box((), ()), dtype("float64"), ArrayMemory(np.zeros((), "u8")))
    rows = np.zeros((3, 1), dtype=np.int64)
    reads = plan_own_boxes(source.manifest, rows, landings, limits(), COST)
    assert (reads.plan is None) == (not n_odd)
    store = RecordingStore(MemoryStore(source.files))
    sum(run_own_reads(reads, store, {0: landings[0]}, n_workers=1))
    assert store.nbytes == 4
    assert contents({0: landings[0]}) == [7]
