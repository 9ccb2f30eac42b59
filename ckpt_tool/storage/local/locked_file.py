"""A locked file is held by one living process: the system lets go of it when the process ends in whatever way."""

from __future__ import annotations

import os
import time
from pathlib import Path

__all__ = ["LockedFile", "hold", "is_held"]

_IS_WINDOWS = os.name == "nt"
_FOLLOWS_WITHIN_S = 5.0
"""How long copies of a killed process may take to end too on a busy machine; they hold what it held until then."""


class LockedFile:
    """A small text under a name that appears only when it is written and held."""

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        beside = path.with_name(path.name + ".new")
        self._fd = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        _try_lock(self._fd, is_shared=False)
        os.write(self._fd, text.encode("ascii"))
        os.fsync(self._fd)
        os.replace(beside, path)

    def replace(self, text: str) -> None:
        """Put another, not shorter text in its place."""
        os.pwrite(self._fd, text.encode("ascii"), 0)
        os.fsync(self._fd)

    def close(self) -> None:
        """Let go of it; the file stays."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def hold(fd: int) -> bool:
    """Hold a file until it is closed; False when a living process does.

    A run that goes on right after another was killed meets copies of that which are about to end, and waits for them.
    On a network file system without locks nobody holds anything.
    """
    until = time.monotonic() + _FOLLOWS_WITHIN_S
    while _is_taken(fd):
        if time.monotonic() >= until:
            return False
        time.sleep(0.02)
    return True


def is_held(path: Path) -> bool:
    """Whether a living process holds the file; True where the file system has no locks to tell by.

    Raises:
        FileNotFoundError: no such file.
    """
    fd = os.open(path, os.O_RDWR)
    try:
        return not _try_lock(fd, is_shared=True)
    finally:
        os.close(fd)


def _is_taken(fd: int) -> bool:
    """Whether another process holds it; if not this one does now."""
    if _IS_WINDOWS:
        return False
    import fcntl

    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no locks
        return False
    return False


def _try_lock(fd: int, *, is_shared: bool) -> bool:
    """Whether the lock was to be had."""
    if _IS_WINDOWS:
        return False
    import fcntl

    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:  # held, or a network file system without locks
        return False
    return True
