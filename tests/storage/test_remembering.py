"""What was read is not asked for again, within bounds; close neighbours cost one request."""

from __future__ import annotations

import pytest

from ckpt_tool.errors import StorageError
from ckpt_tool.manifest.model import FileRange
from ckpt_tool.storage import remembering
from ckpt_tool.storage.memory import MemoryStore
from ckpt_tool.storage.remembering import RememberingStore
from tests.storage.recording import RecordingStore

DATA = bytes(range(256)) * 4096


def recorded() -> tuple[RecordingStore, RememberingStore]:
    """One file of 1 MiB."""
    inner = RecordingStore(MemoryStore({"a": DATA}))
    return inner, RememberingStore(inner)


def places(inner: RecordingStore) -> list[tuple[int, int]]:
    """Offset and length of what was asked for."""
    return [(call.offset, call.length) for call in inner.calls]


def test_what_was_read_costs_nothing() -> None:
    """A part of what was read, in whatever way it is asked for; what reaches beyond it is asked for."""
    inner, store = recorded()
    store.read("a", 1000, 500)
    store.read("a", 1200, 10)
    inner.clear()
    buffer = bytearray(50)
    store.read_into("a", 1150, memoryview(buffer))
    assert (store.read("a", 1000, 500), bytes(buffer)) == (DATA[1000:1500], DATA[1150:1200])
    assert store.fetch([FileRange("a", 1490, 10)]) == [DATA[1490:1500]]
    assert inner.calls == ()
    assert store.read("a", 1490, 11) == DATA[1490:1501]
    assert places(inner) == [(1500, 1)]


def test_what_is_between_known_pieces_is_all_that_is_read() -> None:
    """Of a range that is known for the most part; one that is not is read as a whole."""
    inner, store = recorded()
    store.read("a", 1000, 500)
    store.read("a", 1510, 490)
    inner.clear()
    buffer = bytearray(1200)
    store.read_into("a", 990, memoryview(buffer))
    assert bytes(buffer) == DATA[990:2190]
    assert places(inner) == [(990, 10), (1500, 10), (2000, 190)]
    inner.clear()
    assert store.read("a", 1500, 600) == DATA[1500:2100]
    assert places(inner) == [(1500, 600)]
    assert store.fetch([FileRange("a", 1100, 1100)]) == [DATA[1100:2200]]
    assert places(inner)[1:] == [(2100, 100)]


def test_more_is_kept_on_request() -> None:
    """A piece may be half of what is kept, and what was not asked for last goes first."""
    data = bytes(48 << 20)
    for max_bytes, n_calls in ((0, 2), (128 << 20, 1)):
        inner = RecordingStore(MemoryStore({"a": data}))
        store = RememberingStore(inner, max_bytes=max_bytes)
        for _ in range(2):
            assert len(store.read("a", 0, len(data))) == len(data)
        assert len(inner.calls) == n_calls


def test_close_neighbours_are_one_request() -> None:
    """Counters between other bytes, in any order; far ones are apart, and what is known is left out."""
    inner, store = recorded()
    ranges = [FileRange("a", at, 4) for at in (90_000, 10, 300, 200, 600_000)]
    for _ in range(2):
        assert store.fetch(ranges) == [DATA[r.offset : r.end] for r in ranges]
        assert places(inner) == [(10, 294), (90_000, 4), (600_000, 4)]


def test_errors_tell_the_range_that_was_asked_for() -> None:
    """Not the one that was made of it."""
    _, store = recorded()
    with pytest.raises(StorageError, match="expected 20 bytes, got 10") as caught:
        store.fetch([FileRange("a", len(DATA) - 100, 50), FileRange("a", len(DATA) - 10, 20)])
    assert str(caught.value.where).endswith(f":{len(DATA) - 10}")


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not asked for for longest goes first; large pieces and buffers are not kept at all."""
    monkeypatch.setattr(remembering, "_MAX_BYTES", 3000)
    inner, store = recorded()
    for at in (0, 10_000, 20_000, 0, 30_000):
        store.read("a", at, 1000)
    store.read("a", 50_000, 1501)
    store.read_into("a", 60_000, memoryview(bytearray(10)))
    inner.clear()
    for at, n_calls in ((0, 0), (20_000, 0), (30_000, 0), (10_000, 1), (50_000, 2), (60_000, 3)):
        store.read("a", at, 10)
        assert len(inner.calls) == n_calls
