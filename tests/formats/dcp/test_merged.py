"""Ranges read together: each row gets its bytes, and no request breaks a limit."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.formats._merged import merge, read_merged
from ckpt_tool.storage.memory import MemoryStore
from ckpt_tool.storage.store import ReadCost
from tests.storage.recording import RecordingStore

CONTENT = bytes(np.random.default_rng(0).integers(0, 256, 500, dtype=np.uint8))
RANGES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 400), st.integers(0, 100)), max_size=20)


@given(ranges=RANGES, gap=st.integers(-1, 60), limit=st.integers(1, 300))
def test_every_row_gets_its_bytes(ranges: list[tuple[int, int, int]], gap: int, limit: int) -> None:
    """Rows come back with the bytes of their ranges, from requests that obey the limits of the storage."""
    paths = ["a", "b", "c"]
    cost = ReadCost(max_gap_bytes=gap, max_read_bytes=limit, concurrency=1)
    store = RecordingStore(MemoryStore(dict.fromkeys(paths, CONTENT), cost=cost))
    file, offset, length = np.array(ranges, dtype=np.int64).reshape(-1, 3).T
    found = {row: bytes(view) for row, view in read_merged(store, paths, file, offset, length)}
    assert found == {row: CONTENT[start : start + n] for row, (_, start, n) in enumerate(ranges)}
    assert len(store.calls) <= len(ranges)
    longest = max((n for _, _, n in ranges), default=0)
    assert all(call.length <= max(limit, longest) for call in store.calls)


def test_the_gap_decides() -> None:
    """Ranges as far apart as the limit are read together, one byte more parts them; files are never joined."""
    file, length = np.zeros(2, dtype=np.int64), np.full(2, 5)
    cost = ReadCost(max_gap_bytes=10, max_read_bytes=100, concurrency=1)
    assert merge(file, np.array([0, 15]), length, cost)[1].tolist() == [0, 2]
    assert merge(file, np.array([0, 16]), length, cost)[1].tolist() == [0, 1, 2]
    assert merge(np.array([0, 1]), np.array([0, 5]), length, cost)[1].tolist() == [0, 1, 2]
