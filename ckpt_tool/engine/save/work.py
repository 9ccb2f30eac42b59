"""The work of one save in a writer process: lay out, write, commit, discard; each runs in a thread of its own."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any

from ckpt_tool.engine.save.arena import Arena
from ckpt_tool.engine.save.assignment import Assigned, GlobalState
from ckpt_tool.engine.save.commands import SaveCommand, Structure
from ckpt_tool.engine.save.coordinator import Coordinator
from ckpt_tool.engine.save.links import Place
from ckpt_tool.engine.save.rank_file import write_rank_files
from ckpt_tool.engine.save.rounds import Report
from ckpt_tool.engine.save.sums import BoxPlace, are_cheap, places_of
from ckpt_tool.errors import StorageError
from ckpt_tool.formats.joint import RankLayOut
from ckpt_tool.formats.registry import joint_writer
from ckpt_tool.storage.shared_target import SharedTarget, open_shared

__all__ = ["Layouts", "Work"]

Layouts = MutableMapping[tuple[str, str], tuple[RankLayOut, list[BoxPlace]]]
"""What one rank writes, and where it lies in the tensors, by format and structure."""


class Work:
    """One save of one rank."""

    def __init__(self, command: SaveCommand, place: Place, token: str, arena: Arena | None, layouts: Layouts) -> None:
        self._command = command
        self._place = place
        self._token = token
        self._arena = arena
        self._layouts = layouts
        self._is_given_up = threading.Event()
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._is_lowered = False
        self._is_urgent = threading.Event()
        if command.is_urgent:
            self._is_urgent.set()
        self._operations: list[list[Any]] = []

    def write(self, structure: Structure, assigned: Assigned) -> dict[str, Any]:
        """Write this rank's part and make it durable; returns what the root needs to know of it.

        Raises:
            StorageError: the storage failed.
            Cancelled: another rank's failure has ended the save.
        """
        command, arena = self._command, self._arena
        if arena is None:
            raise StorageError("the staged memory is not there")
        self._is_idle.clear()
        try:
            self._lower_priority()
            target = self._target
            target.check()
            with self._operation("lay out", assigned.nbytes):
                layout, places = self._layout(structure, assigned)
            objects = list(command.objects)
            if not command.is_partial:
                objects = [objects[row] for row in assigned.objects]
            keys = [structure.held.names.objects[row] for row in assigned.objects]
            boxes = structure.staged(assigned, is_partial=command.is_partial)
            takes_digests = are_cheap(places) if command.digests is None else command.digests
            with self._operation("write", assigned.nbytes):
                written = write_rank_files(
                    target, layout, boxes, arena.memory, list(zip(keys, objects, strict=True)),
                    places if takes_digests else None, is_cancelled=self._is_given_up.is_set,
                )  # fmt: skip
        finally:
            self._is_idle.set()
        return {
            "key": command.key, "url": command.url, "format": command.format, "files": written.files,
            "objects": written.objects, "receipts": written.receipts,
            "linear": written.linear.hex() if takes_digests else None, "payload_nbytes": written.payload_nbytes,
            "operations": self._taken(),
        }  # fmt: skip

    def commit(self, coordinator: Coordinator, report: Report) -> dict[str, Any]:
        """As the root: make everybody's files a checkpoint.

        Raises:
            CkptError: see `Coordinator.commit`.
        """
        with self._operation("commit", 0):
            nbytes = coordinator.commit(report, self._target, joint_writer(self._command.format))
        return {"nbytes": nbytes, "operations": self._taken()}

    def give_up(self) -> None:
        """Let ``write`` stop at the next block."""
        self._is_given_up.set()

    def discard(self) -> None:
        """Remove what was written, once nothing is being written by this process any more."""
        self._is_idle.wait()
        with suppress(Exception):
            self._target.discard()
        self.close()

    def close(self) -> None:
        """Release what reaches the storage, once nothing is being written by this process any more."""
        self._is_idle.wait()
        if "_target" in self.__dict__:  # who was never told what to write has opened nothing
            with suppress(Exception):
                self._target.close()

    def hurry(self) -> None:
        """Somebody waits: write as this process was started, where the system allows to go back to it."""
        self._is_urgent.set()
        if self._is_lowered:
            for thread in threading.enumerate():  # the one that writes first: what it starts from now on is as it is
                if thread.native_id is not None:
                    _schedule(thread.native_id, *_USUAL)

    def _lower_priority(self) -> None:
        """Leave the processors to training while nobody waits; threads that this one starts do as well."""
        if not self._is_urgent.is_set():
            _schedule(threading.get_native_id(), getattr(os, "SCHED_IDLE", None), 0)
            self._is_lowered = True
            if self._is_urgent.is_set():  # since a moment ago
                self.hurry()

    @cached_property
    def _target(self) -> SharedTarget:
        command = self._command
        commit_path = joint_writer(command.format).commit_path
        return open_shared(command.url, self._token, commit_path, overwrite=command.overwrite, durable=command.durable)

    def _layout(self, structure: Structure, assigned: Assigned) -> tuple[RankLayOut, list[BoxPlace]]:
        key = (self._command.format, structure.key)
        found = self._layouts.get(key)
        if found is None:
            rank = self._place.rank
            state = GlobalState({rank: assigned.held})
            boxes = state.boxes({rank: assigned.boxes})
            layout = joint_writer(self._command.format).lay_out_rank(state.tensors, boxes, rank, self._place.size)
            found = self._layouts[key] = (layout, places_of(assigned.boxes))
        return found

    @contextmanager
    def _operation(self, name: str, nbytes: int) -> Iterator[None]:
        start, begun = time.time(), time.perf_counter()
        yield
        self._operations.append([name, nbytes, start, time.perf_counter() - begun])

    def _taken(self) -> list[list[Any]]:
        operations, self._operations = self._operations, []
        return operations


def _schedule(thread_id: int, policy: int | None, priority: int) -> None:
    """Schedule a thread otherwise, where the system has such a policy and allows it."""
    if policy is not None:
        with suppress(OSError):
            os.sched_setscheduler(thread_id, policy, os.sched_param(priority))


def _usual() -> tuple[int | None, int]:
    """Policy and priority of this process, which are those of its rank."""
    if not hasattr(os, "sched_getscheduler"):
        return None, 0
    return os.sched_getscheduler(0), os.sched_getparam(0).sched_priority


_USUAL = _usual()
