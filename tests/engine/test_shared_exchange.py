"""Ranks that share what they read: threads stand for processes, and hold what numpy says they should."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tool.engine import shared_exchange
from ckpt_tool.engine.landing import Landing, box_rows
from ckpt_tool.engine.shared_exchange import LostRank, SharedReport, plan_shared_reads, run_shared_reads
from ckpt_tool.engine.shared_memory import Segment
from ckpt_tool.errors import StorageError
from ckpt_tool.geometry.box import Box
from ckpt_tool.storage.memory import MemoryStore
from ckpt_tool.storage.store import Store
from tests.storage.recording import RecordingStore
from tests.strategies import boxes, partitions, shapes
from tests.synthetic import Synthetic, make_source


class ArrayMemory:
    """Memory of one box, in an array that may have strides of its own."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.array: npt.NDArray[Any] | None = array

    def put(self, index: tuple[slice, ...], elements: npt.NDArray[Any]) -> None:
        """Set the elements at ``index``."""
        if self.array is not None:
            self.array[index] = elements

    def buffer(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Any memory."""
        return np.empty(nbytes, dtype=np.uint8)


@pytest.fixture(autouse=True)
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots of a few elements, so that small tensors need many."""
    monkeypatch.setattr(shared_exchange, "_MIN_SLOT_BYTES", 64)


def share(
    source: Synthetic,
    wanted: list[list[tuple[str, Box]]],
    stores: list[Store],
    n_workers: int = 1,
    timeout_s: float = 10,
) -> tuple[list[Any], list[list[npt.NDArray[Any]]]]:
    """What each rank reported or raised, and what it holds."""
    tensors = source.manifest.tensors
    width = tensors.shape.shape[1]
    rows = [box_rows([(tensors.index[fqn], box) for fqn, box in mine], width) for mine in wanted]
    held = [[np.zeros(box.sizes, dtype="i4") for _, box in mine] for mine in wanted]
    plans, landings = [], []
    for rank, mine in enumerate(wanted):
        own = {
            number: Landing(tensors.index[fqn], box, tensors.dtypes[tensors.index[fqn]], ArrayMemory(array.view("u4")))
            for number, ((fqn, box), array) in enumerate(zip(mine, held[rank], strict=True))
        }
        plans.append(
            plan_shared_reads(source.manifest, rows, rank, own, memory_budget_bytes=512, max_read_bytes=1 << 20)
        )
        before = sum(len(each) for each in rows[:rank])
        landings.append({before + number: landing for number, landing in own.items()})
    segments = [Segment.create(plan.segment_bytes) for plan in plans]

    def run(rank: int) -> Any:
        try:
            return run_shared_reads(
                plans[rank], stores[rank], landings[rank], segments, n_workers=n_workers, timeout_s=timeout_s,
                ranks=range(len(wanted)), ended=tuple,
            )  # fmt: skip
        except StorageError as error:
            return error

    with ThreadPoolExecutor(len(wanted)) as pool:
        told = list(pool.map(run, range(len(wanted))))
    for segment in segments:
        segment.close()
    return told, held


@settings(max_examples=60)
@given(st.data(), st.integers(1, 4), st.sampled_from([1, 3]))
def test_any_boxes(data: st.DataObject, n_ranks: int, n_workers: int) -> None:
    """Each rank holds its boxes, each byte that somebody needs was read once, and no other."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    cuts = {}
    for name in ("a", "b"):
        shape = data.draw(shapes(max_ndim=3, max_size=6))
        arrays[name] = np.random.default_rng(len(shape)).integers(0, 1 << 30, shape, dtype="i4")
        cuts[name] = [box for box in data.draw(partitions(shape)) if box.volume]
    source = make_source(arrays, cuts)
    wanted: list[list[tuple[str, Box]]] = []
    for _ in range(n_ranks):
        mine = [
            (name, data.draw(boxes(arrays[name].shape))) for name in arrays for _ in range(data.draw(st.integers(0, 2)))
        ]
        wanted.append([(name, box) for name, box in mine if box.volume])
    stores = [RecordingStore(MemoryStore(source.files)) for _ in range(n_ranks)]
    told, held = share(source, wanted, list(stores), n_workers)
    assert all(isinstance(each, SharedReport) for each in told)
    for mine, got in zip(wanted, held, strict=True):
        for (name, box), array in zip(mine, got, strict=True):
            assert array.tolist() == arrays[name][box.slices].tolist()
    assert [store.nbytes for store in stores] == [each.read_nbytes for each in told]


def replicated(n_ranks: int) -> tuple[Synthetic, list[list[tuple[str, Box]]]]:
    """A tensor of 40 slots that every rank needs whole."""
    array = np.arange(640, dtype="i4").reshape(40, 16)
    cuts = {"a": [Box((start, 0), (10, 16)) for start in range(0, 40, 10)]}
    return make_source({"a": array}, cuts), [[("a", Box((0, 0), (40, 16)))]] * n_ranks


def test_each_byte_is_read_once() -> None:
    """Four ranks that need the same read a quarter each."""
    source, wanted = replicated(4)
    stores = [RecordingStore(MemoryStore(source.files)) for _ in wanted]
    told, _ = share(source, wanted, list(stores))
    assert [each.read_nbytes for each in told] == [640] * 4
    calls = sorted((call.path, call.offset, call.length) for store in stores for call in store.calls)
    assert all(one[0] != other[0] or one[1] + one[2] <= other[1] for one, other in pairwise(calls))


class Broken(MemoryStore):
    """A store whose reads fail."""

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fail."""
        raise StorageError("the disk is gone")


@pytest.mark.parametrize("n_workers", [1, 3])
def test_a_failure_ends_all(n_workers: int) -> None:
    """The rank whose read fails raises; the others stop, so that they can be told."""
    source, wanted = replicated(3)
    stores: list[Store] = [MemoryStore(source.files), Broken(source.files), MemoryStore(source.files)]
    told, _ = share(source, wanted, stores, n_workers)
    assert str(told[1]) == "the disk is gone"
    assert (told[0], told[2]) == (None, None)


def test_a_rank_that_does_nothing() -> None:
    """Who waits too long says for whom."""
    source, wanted = replicated(2)
    tensors = source.manifest.tensors
    rows = [box_rows([(0, box) for _, box in mine], 2) for mine in wanted]
    array = np.zeros((40, 16), dtype="u4")
    landing = Landing(0, wanted[0][0][1], tensors.dtypes[0], ArrayMemory(array))
    plan = plan_shared_reads(source.manifest, rows, 0, {0: landing}, memory_budget_bytes=512, max_read_bytes=1 << 20)

    def alone(timeout_s: float, ended: Callable[[], Sequence[int]]) -> None:
        segments = [Segment.create(plan.segment_bytes) for _ in wanted]
        store = MemoryStore(source.files)
        run_shared_reads(
            plan, store, {0: landing}, segments, n_workers=1, timeout_s=timeout_s, ranks=(5, 7), ended=ended
        )

    with pytest.raises(LostRank, match="rank 7 has done nothing for 0 s that others wait for"):
        alone(0.2, tuple)
    with pytest.raises(LostRank, match="rank 7 has ended"):
        alone(9, lambda: [7])
