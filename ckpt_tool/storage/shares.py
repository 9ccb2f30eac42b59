"""Jobs that only look at files are shared out to threads, or to copies of this process where it can be copied.

A copy may map files, which are then read where the system keeps them; one that shrinks meanwhile ends the copy that
looks at it (SIGBUS). What a copy did not bring home is done again here, by threads that read.
"""

from __future__ import annotations

import faulthandler
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

from ckpt_tool.errors import StorageError
from ckpt_tool.storage.fetch import fetch_all
from ckpt_tool.storage.forks import can_fork, forked
from ckpt_tool.storage.mapped import are_local
from ckpt_tool.storage.store import Store

__all__ = ["can_share", "share_out"]

_LEAST_BYTES = 64 << 20
"""Of fewer bytes threads are done before copies have begun."""

Result = TypeVar("Result")


def can_share(store: Store, paths: Iterable[str], nbytes: int) -> bool:
    """Whether looking at so many bytes of these files is quicker in copies of this process, and sound."""
    return nbytes >= _LEAST_BYTES and can_fork() and are_local(store, paths)


def share_out(
    jobs: Sequence[int],
    make_work: Callable[[bool], Callable[[int], Result]],
    take: Callable[[Result], None],
    *,
    n_workers: int,
    in_copies: bool,
) -> None:
    """Have jobs done, begun in order; each counts once, in whatever process it was done.

    Args:
        jobs: their numbers.
        make_work: what does a job, for one worker; from whether that is a copy of this process, in which it may map
            files and must not change what others are to see.
        take: gets the result of each job, from one thread at a time; results of copies are pickled.
        n_workers: threads, or copies.
        in_copies: see `can_share`.

    Raises:
        BaseException: whatever a job raises.
    """
    left = dict.fromkeys(jobs)
    if in_copies:
        with suppress(StorageError):  # one was killed: by the file that it looked at, or by a system short of memory
            for job, result in forked(jobs, lambda: _in_a_copy(make_work), n_processes=n_workers):
                del left[job]
                take(result)
    if left:
        _in_threads(list(left), lambda: make_work(False), take, n_workers)  # noqa: FBT003


def _in_a_copy(make_work: Callable[[bool], Callable[[int], Result]]) -> Callable[[int, object], tuple[int, Result]]:
    faulthandler.disable()  # a file that shrinks is no fault of the program
    work = make_work(True)  # noqa: FBT003 - a callable has no keywords
    return lambda job, _: (job, work(job))


def _in_threads(
    jobs: Sequence[int],
    make_work: Callable[[], Callable[[int], Result]],
    take: Callable[[Result], None],
    n_workers: int,
) -> None:
    local = threading.local()
    lock = threading.Lock()

    def run(job: int) -> None:
        work: Callable[[int], Result] | None = getattr(local, "work", None)
        if work is None:
            work = local.work = make_work()
        result = work(job)
        with lock:
            take(result)

    fetch_all(run, jobs, concurrency=n_workers)
