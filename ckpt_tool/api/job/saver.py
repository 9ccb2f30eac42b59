"""A saver keeps what the saves of a job have in common: shared memory, a writer process, and what each rank writes.

It lives in the rank's process. What it starts ends with it.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from ckpt_tool.api.job.extra_state import OnResize, extra_path, world_record
from ckpt_tool.api.job.save_entries import Entries, Staged, entries_of
from ckpt_tool.api.job.save_handle import SaveHandle
from ckpt_tool.engine.save.arena import Arena, arrange
from ckpt_tool.engine.save.client import WriterClient
from ckpt_tool.engine.save.commands import SaveCommand
from ckpt_tool.engine.save.log import Operation, OperationLog
from ckpt_tool.engine.save.wire import described
from ckpt_tool.errors import CkptError, StorageError, UsageError
from ckpt_tool.formats.registry import joint_writer
from ckpt_tool.manifest.model import KeyPath
from ckpt_tool.storage.urls import is_local, local_path

if TYPE_CHECKING:
    from ckpt_tool.engine.save.links import Place
    from ckpt_tool.engine.save.staging import Stager

__all__ = ["Saver", "saver_of"]

_N_ARENAS = 2


class Saver:
    """Saves of one process group. Use one for a job, or `ckpt_tool.save`, which keeps one for each group."""

    def __init__(self, process_group: Any = None) -> None:
        from ckpt_tool.engine.save.objects import ObjectBytes
        from ckpt_tool.frameworks.held import HeldStates

        self.process_group = process_group
        self.log = OperationLog()
        self.rank = 0
        self.world_size = 1
        self._place: Place | None = None
        self._listener: socket.socket | None = None
        self._client: WriterClient | None = None
        self._number = 0
        self._arenas: list[Arena | None] = [None] * _N_ARENAS
        self._stagers: dict[tuple[int, str, bool], Stager] = {}
        self._object_bytes = ObjectBytes()
        self._states = HeldStates()
        self._entries: tuple[str, tuple[KeyPath, ...], Entries] | None = None
        self._handles: list[SaveHandle] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ckpt-stage")
        self._is_closed = False
        self._calling = threading.Lock()
        _LIVING.add(self)

    def save(  # noqa: PLR0913 - the options of a command
        self,
        state: Any,
        url: str | os.PathLike[str],
        *,
        async_: bool,
        format: str,
        extra_state: Mapping[str, Any] | None,
        on_resize: OnResize,
        step: int | None,
        overwrite: bool,
        durable: bool,
        digests: bool | None,
        overlap_staging: bool,
        timeout_s: float,
    ) -> SaveHandle:
        """See `ckpt_tool.save`."""
        if self._is_closed:
            raise UsageError("this saver was closed")
        place = os.fspath(url)
        place = os.path.abspath(local_path(place)) if is_local(place) else place
        with self._calling:
            self._tell_of_failures()
            self._join(timeout_s)
            number, self._number = self._number, self._number + 1
            command = SaveCommand(
                number=number, url=place, format=format, key="", arena=number % _N_ARENAS, is_partial=False,
                timeout_s=timeout_s, overwrite=overwrite, durable=durable, digests=digests, is_urgent=not async_,
                objects=(),
            )  # fmt: skip
            handle = self._started(command, state, extra_state, on_resize, step, overlaps=overlap_staging and async_)
        if not async_:
            handle.wait()
        return handle

    def _started(
        self, command: SaveCommand, state: Any, extra_state: Mapping[str, Any] | None, on_resize: OnResize,
        step: int | None, *, overlaps: bool,
    ) -> SaveHandle:  # fmt: skip
        """A save that is staged, or about to be; one at a time."""
        number, timeout_s = command.number, command.timeout_s
        operations: list[Operation] = []
        name = number if step is None else step
        clock = _Clock(self.rank, name, operations)
        staged: Future[None] = Future()
        handle = SaveHandle(self, number, command.url, name, staged, timeout_s)
        handle.operations = operations
        try:
            with clock("walk"):
                held = self._held(state, command.format, extra_state, on_resize)
            with clock("wait"):
                self._await_arena(command.arena, timeout_s)
            ready, stager = self._prepared(held, command, clock)
        except BaseException as error:
            handle.is_looked_at = True
            with suppress(CkptError):
                self._running().save(replace(command, error=described(error)))
            raise
        self._handles.append(handle)
        stager.begin(held.views)
        if overlaps:
            self._thread.submit(self._stage, stager, held.views, ready, clock, staged)
        else:
            self._stage(stager, held.views, ready, clock, staged)
            handle.wait_staged()
        return handle

    def verdict(self, number: int, timeout_s: float, *, hurry: bool) -> dict[str, Any] | None:
        """How a save ended."""
        client = self._running()
        if hurry:
            client.hurry(number)
        return client.verdict(number, timeout_s)

    def has_ended(self, number: int) -> bool:
        """Whether a save has ended."""
        return self._running().has_verdict(number)

    def close(self, *, wait: bool = True) -> None:
        """End the writer process, after the saves that are under way."""
        if self._is_closed:
            return
        for handle in self._handles if wait else ():
            looked_at = handle.is_looked_at
            with suppress(Exception):  # told below, or raised already
                handle.wait()
            handle.is_looked_at = looked_at
        self._tell_of_failures()
        self._is_closed = True
        self._thread.shutdown()
        self._stagers.clear()
        if self._client is not None:
            self._client.close()
        if self._listener is not None:
            self._listener.close()
        for arena in self._arenas:
            if arena is not None:
                arena.close()

    def abandon(self) -> None:
        """Let go of all that is another process's: of the one that this one is a copy of."""
        self._is_closed = True
        if self._client is not None:
            self._client.abandon()
        if self._listener is not None:
            self._listener.close()

    def _join(self, timeout_s: float) -> None:
        """Find the other ranks, once, and have a writer process."""
        if self._place is None:
            from ckpt_tool.engine.distributed_group import Group
            from ckpt_tool.engine.save.joining import join

            self._place, self._listener = join(Group(self.process_group, timeout_s=timeout_s))
            self.rank, self.world_size = self._place.rank, self._place.size
        if self._client is None or not self._client.is_alive:
            self._client = WriterClient(self._place, self._listener)
            for number, arena in enumerate(self._arenas):
                if arena is not None:
                    self._client.share(number, arena)

    def _running(self) -> WriterClient:
        if self._client is None:
            raise UsageError("nothing was saved yet")
        return self._client

    def _held(self, state: Any, format: str, extra_state: Mapping[str, Any] | None, on_resize: OnResize) -> Staged:
        """What this rank holds, as columns with memory; the columns of the save before where they are the same."""
        extra = list(self._extra(extra_state, on_resize))
        extra_paths = tuple(path for path, _ in extra)
        extra_values = [value for _, value in extra]
        known = self._states.same(state)
        if known is not None and self._entries is not None and self._entries[:2] == (format, extra_paths):
            views, values = known
            return self._entries[2].of(views, [*values, *extra_values])
        held = self._states.held(state)
        entries = entries_of(joint_writer(format), held, extra_paths, self.rank, self.world_size)
        self._entries = (format, extra_paths, entries)
        views = [part.view for tensor in held.tensors for part in tensor.parts]
        return entries.of(views, [*(each.value for each in held.values), *extra_values])

    def _extra(self, extra_state: Mapping[str, Any] | None, on_resize: OnResize) -> Iterator[tuple[KeyPath, Any]]:
        """Objects of this rank alone, under names of its own."""
        if extra_state is None:
            return
        yield world_record(self.world_size, on_resize, extra_state)
        for name, value in extra_state.items():
            if on_resize != "rank0":
                yield extra_path(name, self.rank), value
            elif self.rank == 0:
                yield extra_path(name, 0), value

    def _await_arena(self, number: int, timeout_s: float) -> None:
        """Wait until the arena is free: a save before the last one may still be written from it."""
        for handle in self._handles:
            handle.await_staging()
        if not self._running().await_arena(number, 0.0):
            self._running().hurry(self._number)
            if not self._running().await_arena(number, timeout_s):
                raise StorageError(f"the save before the last one is still being written after {timeout_s:,.0f} s")

    def _prepared(self, held: Staged, command: SaveCommand, clock: _Clock) -> tuple[SaveCommand, Stager]:
        """The command with its objects, and a stager for what this rank is to stage."""
        from ckpt_tool.engine.save.staging import Stager, pin

        client, structure = self._running(), held.structure
        client.tell(structure)
        known = client.assigned.get(structure.key)
        wanted = range(len(held.objects)) if known is None else known.objects
        with clock("objects"):
            objects = tuple(self._object_bytes.of(held.objects[row]) for row in wanted)
        key = (command.arena, structure.key, known is not None)
        stager = self._stagers.get(key)
        if stager is None:
            nbytes = arrange((structure.held if known is None else known.boxes).nbytes)[1]
            with clock("allocate", nbytes):
                arena = self._arena(command.arena, nbytes)
                pin(arena, held.views)
            stager = self._stagers[key] = Stager(held.views, structure, known, arena)
        return replace(command, key=structure.key, is_partial=known is not None, objects=objects), stager

    def _arena(self, number: int, nbytes: int) -> Arena:
        """The arena of that number, grown if it has to be."""
        found = self._arenas[number]
        if found is None or found.nbytes < nbytes:
            if found is not None:
                self._stagers = {key: each for key, each in self._stagers.items() if key[0] != number}
                found.close()
                self._arenas[number] = None
            found = self._arenas[number] = Arena.allocated(nbytes)
            self._running().share(number, found)
        return found

    def _stage(
        self, stager: Stager, views: list[Any], command: SaveCommand, clock: _Clock, staged: Future[None]
    ) -> None:
        """Copy, and hand the save over; ``staged`` tells of either."""
        try:
            with clock("stage", stager.nbytes):
                stager.start(views)
                stager.wait()
            self._running().save(command)
        except BaseException as error:  # noqa: BLE001 - raised by wait_staged
            with suppress(CkptError):
                self._running().save(replace(command, error=described(error)))
            staged.set_exception(error)
        else:
            staged.set_result(None)

    def _tell_of_failures(self) -> None:
        """Warn of saves that failed and that nobody waited for."""
        for handle in self._handles:
            error = handle.settle()
            if error is not None:
                handle.is_looked_at = True
                warnings.warn(f"the save to {handle.url} failed: {error}", RuntimeWarning, stacklevel=4)
        self._handles = [handle for handle in self._handles if not handle.done()]


class _Clock:
    """Writes down what took how long."""

    def __init__(self, rank: int, step: int, operations: list[Operation]) -> None:
        self._rank = rank
        self._step = step
        self._operations = operations

    @contextmanager
    def __call__(self, name: str, nbytes: int = 0) -> Iterator[None]:
        start, begun = time.time(), time.perf_counter()
        yield
        self._operations.append(Operation(self._rank, self._step, name, nbytes, start, time.perf_counter() - begun))


_LIVING: WeakSet[Saver] = WeakSet()
_SAVERS: dict[int, Saver] = {}
_MAKING = threading.Lock()


def saver_of(process_group: Any) -> Saver:
    """The saver of a process group, made at its first save and closed when the interpreter ends."""
    from ckpt_tool.engine.save.joining import current_group

    group = current_group(process_group)
    with _MAKING:
        saver = _SAVERS.get(id(group))
        if saver is None:
            if not _SAVERS:
                atexit.register(_close_all)
            saver = _SAVERS[id(group)] = Saver(group)
        return saver


def _close_all() -> None:
    for saver in list(_SAVERS.values()):
        saver.close()
    _SAVERS.clear()


def _abandon_all() -> None:
    """In a copy of the process: what the writer says is not for it, nor may its end be that of the saves."""
    for saver in list(_LIVING):
        saver.abandon()
    _SAVERS.clear()
    global _MAKING  # noqa: PLW0603 - another thread may have held it
    _MAKING = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_abandon_all)
