"""Jobs shared by copies of this process, which do not wait for each other at the interpreter's lock.

Two threads that move bytes meet at that lock thousands of times a second, and whoever sleeps there takes 50 us and more
to wake up. Copies share what was planned before (their pages are copied only when written to) and send back small
results. They can stand in for threads only where no other thread runs: a copy inherits the locks that others hold.
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from ckpt_tool.errors import CkptError, StorageError
from ckpt_tool.storage.local.kernel import die_with_parent

__all__ = ["can_fork", "forked"]

Work = Callable[[int, Callable[[Any], None]], Any]
"""Does the job of a number; may send other results before the one that it returns."""

_NOT_TO_BE_COPIED = frozenset({"torch", "jax", "tensorflow", "cupy", "mpi4py", "ray"})
"""Modules that keep devices or connections of which a copy would have only half."""
_SECONDS_TO_LEAVE = 0.01
"""How long a thread that has been joined may still take to leave: ``join`` returns before the system has seen it go."""
_JOB = struct.Struct("<q")
_HEAD = struct.Struct("<?Q")  # whether an error follows; bytes of the pickled result


class _InACopy(Exception):
    """Where an error was raised that is none of the package's: the traceback of another process."""


def can_fork() -> bool:
    """Whether a copy of this process could go on: Linux, no other thread, and no library that minds being copied."""
    if not sys.platform.startswith("linux") or not hasattr(os, "memfd_create"):
        return False
    if not _NOT_TO_BE_COPIED.isdisjoint(sys.modules):
        return False
    until = time.monotonic() + _SECONDS_TO_LEAVE
    try:
        while len(os.listdir("/proc/self/task")) != 1:
            if threading.active_count() != 1 or time.monotonic() > until:
                return False
            time.sleep(0.0005)
    except OSError:
        return False
    return True


def forked(jobs: Sequence[int], make_work: Callable[[], Work], *, n_processes: int) -> Iterator[Any]:
    """Results as they come, of jobs that are begun in the given order; each process makes its own ``work``.

    The first error ends all processes and is raised here; so does whoever stops to iterate.

    Raises:
        StorageError: a process was killed.
    """
    parent = os.getpid()
    todo = _opened_list(jobs)
    children: dict[int, int] = {}  # end of a pipe -> process
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        for _ in range(min(n_processes, len(jobs))):
            reading, writing = os.pipe()
            child = os.fork()
            if not child:
                _work(todo, writing, make_work, parent)
            os.close(writing)
            children[reading] = child
        yield from _results(children)
    finally:
        os.close(todo)
        for reading, child in children.items():
            os.close(reading)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _opened_list(jobs: Sequence[int]) -> int:
    """A file of the jobs, open once for all copies: the system moves its offset on, a job at a time.

    It does so under a lock only for files that were opened by a name (FMODE_ATOMIC_POS in Linux' ``fs/open.c``): of two
    processes that read at once from what memfd_create gave, both may get the same job.
    """
    unnamed = os.memfd_create("ckpt-jobs", os.MFD_CLOEXEC)
    try:
        view = memoryview(b"".join(map(_JOB.pack, jobs)))
        while view:
            view = view[os.write(unnamed, view) :]
        return os.open(f"/proc/self/fd/{unnamed}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(unnamed)


def _results(children: dict[int, int]) -> Iterator[Any]:
    poll = select.poll()
    for reading in children:
        poll.register(reading, select.POLLIN)
    while children:
        for reading, _ in poll.poll():
            head = _read(reading, _HEAD.size)
            if head:
                is_error, nbytes = _HEAD.unpack(head)
                result = pickle.loads(_read(reading, nbytes))  # noqa: S301 - written by a copy of this process
                if not is_error:
                    yield result
                    continue
                error, where = result
                raise error from (_InACopy(where) if where else None)
            poll.unregister(reading)
            os.close(reading)
            _, status = os.waitpid(children.pop(reading), 0)
            if status:
                code = os.waitstatus_to_exitcode(status)
                how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
                hint = "was it short of memory? --workers 1 takes one process only"
                raise StorageError(f"a process that moved bytes was {how}", hint=hint)


def _read(fd: int, nbytes: int) -> bytes:
    """So many bytes of a pipe, none where it has ended."""
    pieces = []
    while nbytes and (piece := os.read(fd, nbytes)):
        pieces.append(piece)
        nbytes -= len(piece)
    return b"" if nbytes else b"".join(pieces)


def _work(todo: int, writing: int, make_work: Callable[[], Work], parent: int) -> NoReturn:
    """What a copy does, until no job is left. It leaves without a word to its copies of files and handlers."""
    status = 1
    try:
        die_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told as well, and ends its copies
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

        def send(result: Any, *, is_error: bool = False) -> None:
            data = pickle.dumps(result)
            _write(writing, _HEAD.pack(is_error, len(data)) + data)

        try:
            gc.freeze()  # looking through what the parent made would copy all of it
            work = make_work()
            while job := os.read(todo, _JOB.size):
                send(work(_JOB.unpack(job)[0], send))
        except BaseException as error:  # noqa: BLE001 - handed to the parent, which raises it
            send((error, "" if isinstance(error, CkptError) else traceback.format_exc()), is_error=True)
        status = 0
    finally:
        os._exit(status)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
