"""Reads under way at once: how many, in which order, by which threads, and what ends them."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from ckpt_tool.errors import NotFound
from ckpt_tool.storage import fetch
from ckpt_tool.storage.fetch import fetch_all


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
