"""A team whose target has no file locks: processes on any machines that send files of their own to S3 or HDFS.

Every target file is one process's, which follows from the plan alone (`around.owners_of`). The first process leads: it
marks the target, says so in a note, joins all files and commits. The others take their files up where an earlier run
left them, send the rest, and say in notes of their own which parts there are. Each process writes its note anew every
few seconds while it lives: a note that stays as it is for two minutes is that of a process that has ended, and one that
never changes invites nobody.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from types import TracebackType
from typing import Any

from ckpt_tool.engine.journal import Journal, UnitRecord
from ckpt_tool.engine.team import MISFIT, Share, misfit_of, refuse_misfit
from ckpt_tool.errors import CkptError, StorageError
from ckpt_tool.storage.parts.log import PartNotes
from ckpt_tool.storage.parts.target import PartTarget

__all__ = ["RemoteLeader", "RemoteMember"]

_POLL_S = 0.5
_BEAT_S = 3.0
_SILENCE_S = 120.0
"""A process that says nothing for so long has ended."""
_START_TIMEOUT_S = 600.0
"""How long a process waits for another one to appear."""
_INVITATION = "together"
_GO_ON = 'see what it said; the same command with "--resume" goes on from what is done'


class _Pulse:
    """A note that is written anew, with another number, while this process lives."""

    def __init__(self, notes: PartNotes, name: str) -> None:
        self._notes = notes
        self._name = name
        self._beat = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ckpt-pulse", daemon=True)
        self._say("at work")
        self._thread.start()

    def end(self, state: str | None, **more: Any) -> None:
        """Write nothing any more; ``state`` is the last word."""
        if not self._is_over.is_set():
            self._is_over.set()
            self._thread.join()
            if state is not None:
                self._say(state, **more)

    def _run(self) -> None:
        while not self._is_over.wait(_BEAT_S):
            with suppress(CkptError):  # storage that fails for good is seen by those that move bytes
                self._say("at work")

    def _say(self, state: str, **more: Any) -> None:
        self._beat += 1
        self._notes.put(self._name, json.dumps({"beat": self._beat, "state": state, **more}).encode())


class _Watch:
    """What another process's note says, and whether that process lives."""

    def __init__(self, notes: PartNotes, name: str) -> None:
        self._notes = notes
        self._name = name
        self._since = time.monotonic()
        self.said: dict[str, Any] | None = None
        """None before the first word."""
        self.has_changed = False

    def look(self) -> float:
        """Read the note; seconds since it said something new."""
        found = self._notes.get(self._name)
        said = None if found is None else json.loads(found)
        if said is not None and said != self.said:
            self.has_changed = self.said is not None
            self.said = said
            self._since = time.monotonic()
        return time.monotonic() - self._since


class RemoteLeader(AbstractContextManager["RemoteLeader"]):
    """The process that marks the target and commits; use after the target was claimed."""

    def __init__(self, target: PartTarget, share: Share, fingerprint: str, *, has_digests: bool) -> None:
        self.share = share
        self._target = target
        self._fingerprint = fingerprint
        self._has_digests = has_digests
        self._token = os.urandom(8).hex()
        self._pulse: _Pulse | None = None

    def earlier(self) -> dict[int, UnitRecord]:
        """Finished units of an earlier run of the same plan by as many processes.

        Raises:
            UsageError: a journal belongs to another plan.
        """
        done: dict[int, UnitRecord] = {}
        for index in range(1, self.share.count):
            done |= _journal(self._target, index, self._fingerprint, has_digests=self._has_digests).load()
        return done

    def open(self) -> None:
        """Invite the others, once all files are created."""
        said = {
            "plan": self._fingerprint, "count": self.share.count, "run": self.share.run, "token": self._token,
            "begun": self._target.receipts(), "alone": self._target.is_alone,
        }  # fmt: skip
        self._pulse = _Pulse(self._target.notes, f"{self._token}-0")
        self._target.notes.put(_INVITATION, json.dumps(said).encode())

    def others(self) -> Iterator[Mapping[int, UnitRecord]]:
        """Records of the other processes, as these are done; their files are adopted.

        Raises:
            StorageError: one has ended without being done, or did not appear within ten minutes.
            UsageError: one has another plan, or was told of another number of processes.
        """
        names = {index: f"{self._token}-{index}" for index in range(1, self.share.count)}
        waiting = {index: _Watch(self._target.notes, name) for index, name in names.items()}
        where = self._target.url
        while waiting:
            for index, watch in list(waiting.items()):
                who, silence_s = str(Share(index, self.share.count)), watch.look()
                said = watch.said
                if said is None:
                    if silence_s > _START_TIMEOUT_S:
                        text = f"{who} did not appear within {_START_TIMEOUT_S:,.0f} s"
                        raise StorageError(text, where=where, hint="start all of them, or one alone with --split 0/1")
                elif said["state"] == "done":
                    del waiting[index]
                    for path, receipt in said["files"].items():
                        self._target.adopt(path, receipt)
                    yield _journal(self._target, index, self._fingerprint, has_digests=self._has_digests).load()
                elif said["state"] == MISFIT:
                    refuse_misfit(Share(index, self.share.count), where=where)
                elif said["state"] != "at work" or silence_s > _SILENCE_S:
                    raise StorageError(f"{who} ended before its share was written", where=where, hint=_GO_ON)
            if waiting:
                time.sleep(_POLL_S)
        if self._pulse is not None:
            self._pulse.end(None)  # notes go with the commit

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave; whoever is still at work is told."""
        if self._pulse is not None:
            with suppress(CkptError):
                self._pulse.end("ended")


class RemoteMember(AbstractContextManager["RemoteMember"]):
    """A process that sends files of its own to a target that another one claims and commits."""

    def __init__(self, target: PartTarget, share: Share, fingerprint: str, *, has_digests: bool) -> None:
        self.share = share
        self._target = target
        self._fingerprint = fingerprint
        self._has_digests = has_digests
        self._leader: _Watch | None = None
        self._pulse: _Pulse | None = None

    def join(self) -> tuple[Journal, Mapping[int, UnitRecord]]:
        """Wait for the leader's invitation; the journal of this process, and what it has done before.

        Raises:
            StorageError: there was none within ten minutes.
            UsageError: the leader has another plan, or another number of processes.
        """
        notes, started, where = self._target.notes, time.monotonic(), self._target.url
        watches: dict[str, _Watch] = {}
        while True:
            found = notes.get(_INVITATION)
            said = None if found is None else json.loads(found)
            if said is not None and said["run"] == self.share.run:
                token = str(said["token"])
                watch = watches.setdefault(token, _Watch(notes, f"{token}-0"))
                watch.look()
                if watch.has_changed and watch.said is not None and watch.said["state"] == "at work":
                    return self._accept(watch, said)
            if time.monotonic() - started > _START_TIMEOUT_S:
                raise StorageError(
                    f"{Share(0, self.share.count)}, which commits, did not appear within {_START_TIMEOUT_S:,.0f} s",
                    where=where,
                    hint="start all processes with the same arguments, or one alone with --split 0/1",
                )
            time.sleep(_POLL_S)

    def _accept(self, leader: _Watch, said: Mapping[str, Any]) -> tuple[Journal, Mapping[int, UnitRecord]]:
        own_name = f"{said['token']}-{self.share.index}"
        misfit = misfit_of(self.share, self._fingerprint, said, where=self._target.url)
        if misfit is not None:
            self._target.notes.put(own_name, json.dumps({"beat": 1, "state": MISFIT}).encode())
            raise misfit
        self._leader = leader
        self._target.begin_from(said["begun"], is_alone=said["alone"])
        journal = _journal(self._target, self.share.index, self._fingerprint, has_digests=self._has_digests)
        done = journal.load()
        journal.append([])  # parts that are found later are trusted because of it
        self._pulse = _Pulse(self._target.notes, own_name)
        return journal, done

    def check(self) -> None:
        """Go on only while the leader lives.

        Raises:
            StorageError: it has ended; nobody would commit.
        """
        leader = self._leader
        if leader is None or (leader.look() <= _SILENCE_S and leader.said and leader.said["state"] == "at work"):
            return
        who = str(Share(0, self.share.count))
        raise StorageError(f"{who}, which commits, has ended", where=self._target.url, hint=_GO_ON)

    def finish(self, paths: list[str]) -> None:
        """Say that these files are sent."""
        receipts = self._target.receipts()
        if self._pulse is not None:
            self._pulse.end("done", files={path: receipts[path] for path in paths})

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave, done or not."""
        if self._pulse is not None:
            with suppress(CkptError):
                self._pulse.end("ended")


def _journal(target: PartTarget, index: int, fingerprint: str, *, has_digests: bool) -> Journal:
    return Journal(target.log_of(index), lambda: fingerprint, where=target.url, has_digests=has_digests)
