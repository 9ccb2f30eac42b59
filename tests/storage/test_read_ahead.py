"""Ranges that are known beforehand come in few requests, and every byte is right."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.errors import StorageError
from ckpt_tool.manifest.model import FileRange
from ckpt_tool.storage.memory import MemoryStore
from ckpt_tool.storage.read_ahead import ReadAhead
from ckpt_tool.storage.store import ReadCost
from tests.storage.recording import RecordingStore

FILES = {name: np.random.default_rng(7 + i).bytes(5000) for i, name in enumerate("ab")}
RANGES = st.lists(
    st.builds(lambda p, o, n: FileRange(p, o, min(n, 5000 - o)), st.sampled_from("ab"), st.integers(0, 4999),
              st.integers(1, 900)), max_size=60,
)  # fmt: skip


def store_of(*, gap: int, limit: int) -> RecordingStore:
    """Two files whose requests cost so much."""
    return RecordingStore(MemoryStore(FILES, cost=ReadCost(gap, limit, 4, 1 << 20)))


def read(ahead: ReadAhead, r: FileRange) -> bytes:
    """One range."""
    buffer = bytearray(r.length)
    ahead.read_into(r.path, r.offset, memoryview(buffer))
    return bytes(buffer)


@given(RANGES, st.integers(0, 300), st.integers(64, 1000), st.integers(1, 4000))
def test_every_range(ranges: list[FileRange], gap: int, limit: int, max_bytes: int) -> None:
    """Whatever the order, overlaps, repetitions, gaps and limits, each range has its own bytes."""
    store = store_of(gap=gap, limit=limit)
    ahead = ReadAhead(store, ranges, max_bytes=max_bytes, concurrency=3)
    for r in ranges:
        assert read(ahead, r) == FILES[r.path][r.offset : r.end]
    ahead.close()
    assert all(call.length <= limit for call in store.calls)


def test_neighbours_are_one_request() -> None:
    """Two files read in turn, with gaps: one request each, not one for each range."""
    ranges = [FileRange(path, at, 80) for at in range(0, 4000, 100) for path in "ab"]
    store = store_of(gap=20, limit=5000)
    ahead = ReadAhead(store, ranges, max_bytes=1 << 20, concurrency=2)
    assert [read(ahead, r) for r in ranges] == [FILES[r.path][r.offset : r.end] for r in ranges]
    ahead.close()
    assert sorted((c.path, c.offset, c.length) for c in store.calls) == [("a", 0, 3980), ("b", 0, 3980)]


def test_memory_is_a_window() -> None:
    """Before anything is used, no more is fetched than the window holds; then it moves on."""
    ranges = [FileRange("a", at, 100) for at in range(0, 5000, 100)]
    store = store_of(gap=0, limit=100)
    ahead = ReadAhead(store, iter(ranges), max_bytes=1000, concurrency=2)
    assert read(ahead, ranges[0]) == FILES["a"][:100]
    ahead._pool.shutdown(wait=True)
    assert store.nbytes == 1000
    ahead.close()


def test_other_reads_go_through() -> None:
    """A range that nobody announced is a request of its own."""
    store = store_of(gap=0, limit=100)
    ahead = ReadAhead(store, [FileRange("a", 0, 10)], max_bytes=1000, concurrency=2)
    assert read(ahead, FileRange("b", 5, 7)) == FILES["b"][5:12]
    ahead.close()


def test_failure_comes_with_its_range() -> None:
    """What cannot be read is an error when it is asked for, not before."""
    store = store_of(gap=0, limit=100)
    ranges = [FileRange("a", 0, 10), FileRange("a", 4990, 20)]
    ahead = ReadAhead(store, ranges, max_bytes=1000, concurrency=2)
    assert read(ahead, ranges[0]) == FILES["a"][:10]
    with pytest.raises(StorageError, match="expected 20 bytes, got 10"):
        read(ahead, ranges[1])
    ahead.close()
