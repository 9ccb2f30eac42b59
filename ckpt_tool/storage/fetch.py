"""A fetch is many range reads under way at once, or many waits of another kind. Knows no storage: the one is given."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["fetch_all"]

_CACHED_SECONDS = 100e-6
"""A small read from the page cache takes some 10 microseconds, one from a disk or a network more than this."""
_N_SLOW_READS = 20
"""So many are waited for one by one before threads are started: the first read of a file also opens it."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def fetch_all(
    read: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    concurrency: int,
    may_be_cached: bool = False,
    read_alone: Callable[[Item], Result] | None = None,
) -> list[Result]:
    """``[read(item) for item in items]`` with at most ``concurrency`` calls at once, started in order.

    With ``may_be_cached`` threads are started once reads turn out not to be answered from memory; until then
    ``read_alone`` is called, where something gives the same to one thread alone with less work.

    The first error is raised as it is; calls not started by then are not made.
    """
    n_workers = min(concurrency, len(items))
    if n_workers <= 1:
        return [read(item) for item in items]
    first = _while_cached(read_alone or read, items) if may_be_cached else []
    if len(first) == len(items):
        return first
    results: dict[int, Result] = dict(enumerate(first))
    pending = iter(list(enumerate(items))[len(first) :])
    lock = threading.Lock()
    stop = threading.Event()

    errors: list[BaseException] = []

    def work() -> None:
        try:
            while not stop.is_set():
                with lock:
                    numbered = next(pending, None)
                if numbered is None:
                    return
                index, item = numbered
                results[index] = read(item)
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread, which raises it
            errors.append(error)
            stop.set()

    # Threads as they are: `concurrent.futures` takes 6 ms to import.
    threads = [threading.Thread(target=work, name=f"fetch_{number}", daemon=True) for number in range(n_workers)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:  # also when the caller is interrupted while it waits
        stop.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if errors:
        raise errors[0]
    return [results[index] for index in range(len(items))]


def _while_cached(read: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Results of the first items, for as long as reads are answered from memory: threads only slow those down."""
    results: list[Result] = []
    started = time.perf_counter()
    for item in items:
        results.append(read(item))
        if time.perf_counter() - started > _CACHED_SECONDS * (len(results) + _N_SLOW_READS):
            break
    return results
