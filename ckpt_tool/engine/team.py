"""A team is several processes that execute one plan into one local (or shared) folder, without talking.

Every member makes the same plan and takes its share of the units, which follows from the plan alone. The first one
leads: it claims the folder, makes the files, and says so by a file of its own, ``CKPT_TOGETHER.<token>``; the others
wait for that. A member that has written and journaled its share writes ``done`` into its ``CKPT_PROCESS.<token>.<n>``;
when all have, the leader writes what is left and commits. Both kinds of files are held locked while their process
lives, and the system lets go of a lock when a process ends in whatever way: so a dead leader's file invites nobody, a
dead member ends the run uncommitted, and nothing of an earlier run can be mistaken for this one's.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from ckpt_tool.engine.journal import Journal, UnitRecord
from ckpt_tool.errors import StorageError, UsageError
from ckpt_tool.records import dataclass
from ckpt_tool.storage.local.file_log import FileLog
from ckpt_tool.storage.local.locked_file import LockedFile, is_held
from ckpt_tool.storage.unfinished import JOURNAL_NAME, PROCESS_NAME, TOGETHER_NAME

__all__ = ["MISFIT", "Leader", "Member", "Share", "misfit_of", "records_of_processes", "refuse_misfit"]

MISFIT = "misfit"
"""What a process says that does not fit the first one, before it ends."""
_POLL_S = 0.02
_START_TIMEOUT_S = 600.0
"""How long a process waits for another one to appear."""


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of a plan a process executes."""

    index: int
    """From 0, which leads."""
    count: int
    run: str | None = None
    """A name that all processes of a run have, and no other run, where the launcher gives one."""

    def __str__(self) -> str:
        """As people count.

        >>> str(Share(0, 4))
        'process 1 of 4'
        """
        return f"process {self.index + 1} of {self.count}"


def misfit_of(share: Share, fingerprint: str, said: Mapping[str, object], *, where: str) -> UsageError | None:
    """Why a process cannot work with the first one, which has ``said`` its plan and the number of processes."""
    if said["count"] != share.count:
        text = f"the first process was told of {said['count']} processes, this one of {share.count}"
        return UsageError(text, where=where)
    if said["plan"] != fingerprint:
        text = f"{share} has made another plan than the first one"
        return UsageError(text, where=where, hint="give all of them the same arguments, --workers and --memory too")
    return None


def refuse_misfit(share: Share, *, where: str) -> NoReturn:
    """End the first process's wait for one that has said that it does not fit.

    Raises:
        UsageError: always.
    """
    hint = "see what it said; give all of them the same arguments, --workers and --memory too"
    raise UsageError(f"{share} was started in another way than this one", where=where, hint=hint)


class Leader(AbstractContextManager["Leader"]):
    """The process that claims and commits; use after the target was claimed."""

    def __init__(
        self, root: str, share: Share, fingerprint: str, *, has_digests: bool, stamp: Callable[[], str] | None = None
    ) -> None:
        self.share = share
        self._root = Path(root)
        self._fingerprint = fingerprint
        self._has_digests = has_digests
        self._stamp = stamp
        self._token = os.urandom(8).hex()
        self._file: LockedFile | None = None

    def _journal(self, name: str) -> Journal:
        return _journal(self._root / name, self._fingerprint, has_digests=self._has_digests, stamp=self._stamp)

    def open(self, done: Mapping[int, UnitRecord]) -> Journal:
        """Invite the others, who all begin from ``done``; the journal of this process."""
        if done:
            beside = self._root / ("." + JOURNAL_NAME)
            beside.unlink(missing_ok=True)
            self._journal(beside.name).append(list(done.values()))
            beside.replace(self._root / JOURNAL_NAME)
        for old in _files(self._root, JOURNAL_NAME + ".", TOGETHER_NAME, PROCESS_NAME):
            if not is_held(old):
                old.unlink(missing_ok=True)
        said = {"plan": self._fingerprint, "count": self.share.count, "run": self.share.run, "token": self._token}
        self._file = LockedFile(self._root / f"{TOGETHER_NAME}.{self._token}", json.dumps(said))
        return self._journal(f"{JOURNAL_NAME}.{self._token}.0")

    def others(self) -> Iterator[Mapping[int, UnitRecord]]:
        """Records of the other processes, as these are done.

        Raises:
            StorageError: one has ended without being done, or did not appear within ten minutes.
            UsageError: one has another plan, or was told of another number of processes.
        """
        waiting = dict.fromkeys(range(1, self.share.count))
        started = time.monotonic()
        while waiting:
            for index in list(waiting):
                path = self._root / f"{PROCESS_NAME}.{self._token}.{index}"
                who = str(Share(index, self.share.count))
                try:
                    was_held = is_held(path)
                    text = path.read_text(encoding="ascii")
                except FileNotFoundError:
                    if time.monotonic() - started > _START_TIMEOUT_S:
                        raise StorageError(
                            f"{who} did not appear within {_START_TIMEOUT_S:,.0f} s",
                            where=str(self._root),
                            hint="start all of them, or one alone with --split 0/1",
                        ) from None
                    continue
                if text == "done":
                    del waiting[index]
                    yield self._journal(f"{JOURNAL_NAME}.{self._token}.{index}").load()
                elif text == MISFIT:
                    refuse_misfit(Share(index, self.share.count), where=str(self._root))
                elif not was_held:
                    raise StorageError(
                        f"{who} ended before its share was written",
                        where=str(self._root),
                        hint='see what it said; the same command with "--resume" goes on from what is done',
                    )
            time.sleep(_POLL_S)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave; whoever has not joined yet will not."""
        if self._file is not None:
            self._file.close()


class Member(AbstractContextManager["Member"]):
    """A process that writes its share into a folder that another one claims and commits."""

    def __init__(self, root: str, share: Share, fingerprint: str, *, has_digests: bool) -> None:
        self.share = share
        self._root = Path(root)
        self._fingerprint = fingerprint
        self._has_digests = has_digests
        self._invitation = Path()
        self._file: LockedFile | None = None

    def join(self) -> tuple[Journal, Mapping[int, UnitRecord]]:
        """Wait for the leader's invitation; the journal of this process, and what was done before.

        Raises:
            StorageError: there was none within ten minutes.
            UsageError: the leader has another plan, or another number of processes.
        """
        started = time.monotonic()
        while True:
            for path in _files(self._root, TOGETHER_NAME):
                said = _read_held(path)
                if said is not None and said["run"] == self.share.run:
                    return self._accept(path, said)
            if time.monotonic() - started > _START_TIMEOUT_S:
                raise StorageError(
                    f"{Share(0, self.share.count)}, which makes the files, did not appear within "
                    f"{_START_TIMEOUT_S:,.0f} s",
                    where=str(self._root),
                    hint="start all processes with the same arguments, or one alone with --split 0/1",
                )
            time.sleep(_POLL_S)

    def _accept(self, path: Path, said: Mapping[str, object]) -> tuple[Journal, Mapping[int, UnitRecord]]:
        own_name = f"{said['token']}.{self.share.index}"
        misfit = misfit_of(self.share, self._fingerprint, said, where=str(self._root))
        self._file = LockedFile(self._root / f"{PROCESS_NAME}.{own_name}", "" if misfit is None else MISFIT)
        if misfit is not None:
            raise misfit
        self._invitation = path
        own, base = (
            _journal(self._root / name, self._fingerprint, has_digests=self._has_digests)
            for name in (f"{JOURNAL_NAME}.{own_name}", JOURNAL_NAME)
        )
        return own, base.load()

    def check(self) -> None:
        """Go on only while the leader lives.

        Raises:
            StorageError: it has ended; nobody would commit, and another run may begin in the same folder.
        """
        with suppress(FileNotFoundError):
            if is_held(self._invitation):
                return
        raise StorageError(
            f"{Share(0, self.share.count)}, which commits, has ended",
            where=str(self._root),
            hint='see what it said; the same command with "--resume" goes on from what is done',
        )

    def finish(self) -> None:
        """Say that the share is written and journaled."""
        if self._file is not None:
            self._file.replace("done")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave, done or not."""
        if self._file is not None:
            self._file.close()


def records_of_processes(
    root: str, fingerprint: str, *, has_digests: bool, stamp: Callable[[], str] | None = None
) -> dict[int, UnitRecord]:
    """Finished units of an earlier run of the same plan by several processes.

    Raises:
        UsageError: a journal belongs to another plan, or the source has changed since.
    """
    done: dict[int, UnitRecord] = {}
    for path in _files(Path(root), JOURNAL_NAME + "."):
        done.update(_journal(path, fingerprint, has_digests=has_digests, stamp=stamp).load())
    return done


def _journal(path: Path, fingerprint: str, *, has_digests: bool, stamp: Callable[[], str] | None = None) -> Journal:
    return Journal(
        FileLog(str(path)), lambda: fingerprint, where=str(path.parent), has_digests=has_digests, stamp=stamp
    )


def _files(root: Path, *names: str) -> list[Path]:
    """Files whose names begin with one of ``names``; none while there is no folder."""
    try:
        return sorted(root / name for name in os.listdir(root) if name.startswith(names) and not name.endswith(".new"))
    except FileNotFoundError:
        return []


def _read_held(path: Path) -> dict[str, object] | None:
    """What a file says while a process holds it, else None."""
    try:
        said: dict[str, object] = json.loads(path.read_text(encoding="ascii"))
        return said if is_held(path) else None
    except FileNotFoundError:
        return None
