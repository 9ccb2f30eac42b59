"""A fetch is many range reads under way at once. Knows no storage: the one-range read is given."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["fetch_all"]

Item = TypeVar("Item")
Result = TypeVar("Result")


def fetch_all(read: Callable[[Item], Result], items: Sequence[Item], *, concurrency: int) -> list[Result]:
    """``[read(item) for item in items]`` with at most ``concurrency`` calls at once, started in order.

    The first error is raised as it is; calls not started by then are not made.
    """
    n_workers = min(concurrency, len(items))
    if n_workers <= 1:
        return [read(item) for item in items]
    results: dict[int, Result] = {}
    pending = iter(enumerate(items))
    lock = threading.Lock()
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            with lock:
                numbered = next(pending, None)
            if numbered is None:
                return
            index, item = numbered
            results[index] = read(item)

    with ThreadPoolExecutor(n_workers, thread_name_prefix="fetch") as pool:
        futures = [pool.submit(_stopping(work, stop)) for _ in range(n_workers)]
        try:
            for future in futures:
                future.result()
        finally:
            stop.set()  # also when the caller is interrupted while it waits
    return [results[index] for index in range(len(items))]


def _stopping(work: Callable[[], None], stop: threading.Event) -> Callable[[], None]:
    """``work`` that tells its siblings when it fails."""

    def run() -> None:
        try:
            work()
        except BaseException:
            stop.set()
            raise

    return run
