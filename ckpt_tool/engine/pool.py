"""A pool of workers that take units of work one by one; what they report comes out of one iterator.

Threads everywhere: large reads, writes, copies and checksums release the interpreter's lock. Processes where a copy of
this one can go on and its work is seen by others, which is a sixth faster: see ``storage.forks``.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from ckpt_tool.engine.journal import UnitRecord
from ckpt_tool.storage.forks import forked

__all__ = ["UnitWorker", "run_units"]


class UnitWorker(Protocol):
    """Executes units, one at a time."""

    def ahead(self, units: Sequence[int]) -> AbstractContextManager[None]:
        """A block in which these units are executed in this order."""
        ...

    def run_unit(self, unit: int, progress: Callable[[int], None]) -> UnitRecord:
        """Execute one unit; ``progress`` gets the bytes written, as they are."""
        ...


def run_units(
    units: Sequence[int], make_worker: Callable[[], UnitWorker], *, n_workers: int, in_processes: bool = False
) -> Iterator[int | UnitRecord]:
    """Bytes written, as they are, and the record of each finished unit.

    With one worker the units run in order, in the caller's thread. With more, the first error stops all of them and is
    raised here; threads end their unit before. ``in_processes``: workers are copies of this process (`can_fork`), and
    what they change in memory is lost.
    """
    n_workers = min(n_workers, len(units))
    if n_workers <= 1:
        yield from _run_in_order(units, make_worker())
    elif in_processes:
        yield from forked(units, lambda: make_worker().run_unit, n_processes=n_workers)
    else:
        yield from _run_in_threads(units, make_worker, n_workers)


def _run_in_threads(
    units: Sequence[int], make_worker: Callable[[], UnitWorker], n_workers: int
) -> Iterator[int | UnitRecord]:
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    for unit in units:
        todo.put(unit)
    events: queue.SimpleQueue[int | UnitRecord | BaseException | None] = queue.SimpleQueue()
    stop = threading.Event()

    def work() -> None:
        try:
            worker = make_worker()
            while not stop.is_set():
                events.put(worker.run_unit(todo.get_nowait(), events.put))
        except queue.Empty:
            pass
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread, which raises it
            events.put(error)
        finally:
            events.put(None)

    threads = [threading.Thread(target=work, name=f"ckpt-worker-{i}", daemon=True) for i in range(n_workers)]
    for thread in threads:
        thread.start()
    try:
        n_running = n_workers
        while n_running:
            event = events.get()
            if isinstance(event, BaseException):
                raise event
            if event is None:
                n_running -= 1
            else:
                yield event
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _run_in_order(units: Sequence[int], worker: UnitWorker) -> Iterator[int | UnitRecord]:
    with worker.ahead(units):
        for unit in units:
            written: list[int] = []
            record = worker.run_unit(unit, written.append)
            yield from written
            yield record
