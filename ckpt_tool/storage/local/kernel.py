"""Calls of the Linux kernel that Python does not wrap. Elsewhere they report that they are not there."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import signal
import sys
from typing import Any

__all__ = ["die_with_parent", "exchange", "fallocate", "start_writeback"]

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_SYNC_FILE_RANGE_WRITE = 2
_PR_SET_PDEATHSIG = 1
_NOT_HERE = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.ENODEV})


@functools.cache
def _function(*names: str) -> Any:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    return next((getattr(libc, name) for name in names if hasattr(libc, name)), None)


def fallocate(fd: int, nbytes: int) -> bool:
    """Reserve blocks for the first ``nbytes`` of a file and make it at least that long; False where unsupported.

    Calls fallocate(2), not posix_fallocate(3): glibc emulates the latter by writing to every block.

    Raises:
        OSError: the file system refused, such as ENOSPC.
    """
    function = _function("fallocate64", "fallocate")
    if function is None or nbytes == 0:
        return False
    while True:
        if function(ctypes.c_int(fd), ctypes.c_int(0), ctypes.c_int64(0), ctypes.c_int64(nbytes)) == 0:
            return True
        code = ctypes.get_errno()
        if code in _NOT_HERE:
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


def exchange(first: str, second: str) -> bool:
    """Swap two names of one file system in one step; False where unsupported.

    Raises:
        OSError: the file system refused, such as ENOENT.
    """
    function = _function("renameat2")
    if function is None:
        return False
    here = ctypes.c_int(_AT_FDCWD)
    if function(here, os.fsencode(first), here, os.fsencode(second), ctypes.c_uint(_RENAME_EXCHANGE)) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NOT_HERE:
        return False
    raise OSError(code, os.strerror(code))


def start_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Let the system begin to write a part of a file to the device; a hint, which makes nothing durable."""
    function = _function("sync_file_range")
    if function is not None:
        function(ctypes.c_int(fd), ctypes.c_int64(offset), ctypes.c_int64(nbytes), _SYNC_FILE_RANGE_WRITE)


def die_with_parent(parent: int) -> None:
    """Let the system kill this process when the thread that made it ends; at once where that has happened."""
    function = _function("prctl")
    if function is not None:
        function(ctypes.c_int(_PR_SET_PDEATHSIG), ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
