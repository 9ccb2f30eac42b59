"""The record is complete, in order, and of the requests only."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from ckpt_tool.errors import NotFound
from ckpt_tool.manifest.model import FileRange
from ckpt_tool.storage import fetch
from ckpt_tool.storage.fetch import fetch_all
from ckpt_tool.storage.memory import MemoryStore
from tests.storage.recording import ReadCall, RecordingStore


def test_every_kind_of_read_is_recorded() -> None:
    """read, read_into and each range of fetch are one call; listings are none; failed reads are calls."""
    store = RecordingStore(MemoryStore({"a": b"0123456789"}))
    store.listing()
    store.read("a", 0, 3)
    store.read_into("a", 4, memoryview(bytearray(2)))
    store.fetch([FileRange("a", 1, 1), FileRange("a", 9, 1)])
    with pytest.raises(NotFound):
        store.read("b", 0, 1)
    expected = (
        ReadCall("a", 0, 3),
        ReadCall("a", 4, 2),
        ReadCall("a", 1, 1),
        ReadCall("a", 9, 1),
        ReadCall("b", 0, 1),
    )
    assert store.calls == expected
    assert store.nbytes == 8
    store.clear()
    assert len(store.calls) == store.nbytes == 0


def test_fetch_bounds_concurrency_and_keeps_order() -> None:
    """Never more calls at once than allowed, as many as allowed, results in order."""
    lock = threading.Lock()
    now, most = 0, 0

    def read(item: int) -> int:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.005)
        with lock:
            now -= 1
        return item * item

    assert fetch_all(read, range(20), concurrency=4) == [i * i for i in range(20)]
    assert most == 4


@pytest.mark.parametrize(("slow", "is_alone"), [({0, 30, 60}, True), (set(range(10, 20)), False)])
def test_a_slow_read_now_and_then_starts_no_threads(
    monkeypatch: pytest.MonkeyPatch,
    slow: set[int],
    is_alone: bool,
) -> None:
    """Opening a file takes longer than a read from memory; threads are for storage that is slow again and again."""
    now = 0.0
    monkeypatch.setattr(fetch, "time", SimpleNamespace(perf_counter=lambda: now))
    threads: set[str] = set()

    def read(item: int) -> int:
        nonlocal now
        threads.add(threading.current_thread().name)
        now += 0.001 if item in slow else 0.00001
        return item

    assert fetch_all(read, range(90), concurrency=2, may_be_cached=True) == list(range(90))
    assert (threads == {threading.current_thread().name}) is is_alone


def test_fetch_stops_at_the_first_error() -> None:
    """After an error, no further calls are begun."""
    begun: list[int] = []

    def read(item: int) -> int:
        begun.append(item)
        if item == 1:
            raise NotFound("one")
        time.sleep(0.01)
        return item

    with pytest.raises(NotFound, match="one"):
        fetch_all(read, range(1000), concurrency=2)
    assert len(begun) <= 4
