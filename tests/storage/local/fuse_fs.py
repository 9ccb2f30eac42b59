"""``python fuse_fs.py ROOT MOUNT CONTROL``: a file system that shows ROOT at MOUNT and fails as CONTROL says.

CONTROL is a JSON file that is read again when it changes: ``estale`` (every call), ``eio_read_every`` and
``eio_write_every`` (a number of calls), ``eio_fsync``, ``eio_close``, ``enospc_after`` (bytes). Needs mfusepy and
libfuse.
"""

# ruff: noqa: D102 - the calls of a file system

from __future__ import annotations

import errno
import json
import os
import sys
import threading
from typing import Any

import mfusepy


class Failing(mfusepy.Operations):  # type: ignore[misc]
    """Passes everything on."""

    use_ns = True

    def __init__(self, root: str, control: str) -> None:
        self._root, self._control = root, control
        self._lock = threading.Lock()
        self._read, self._settings = 0.0, dict[str, Any]()
        self._n = {"read": 0, "write": 0}
        self._written = 0

    def _now(self) -> dict[str, Any]:
        """The settings; an error where all calls fail."""
        with self._lock:
            changed = os.stat(self._control).st_mtime_ns
            if changed != self._read:
                with open(self._control, encoding="utf-8") as file:
                    self._settings = json.load(file)
                self._read = changed
                self._n = {"read": 0, "write": 0}
        if self._settings.get("estale"):
            raise mfusepy.FuseOSError(errno.ESTALE)
        return self._settings

    def _count(self, kind: str) -> None:
        every = self._now().get(f"eio_{kind}_every")
        with self._lock:
            self._n[kind] += 1
            if every and self._n[kind] % every == 0:
                raise mfusepy.FuseOSError(errno.EIO)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        self._now()
        found = os.lstat(self._root + path)
        names = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid", "st_ino")
        times = {"st_atime": found.st_atime_ns, "st_mtime": found.st_mtime_ns, "st_ctime": found.st_ctime_ns}
        return {name: getattr(found, name) for name in names} | times

    def readdir(self, path: str, fh: int) -> list[str]:
        self._now()
        return [".", "..", *os.listdir(self._root + path)]

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        self._now()
        return os.open(self._root + path, os.O_RDWR | os.O_CREAT, mode)

    def open(self, path: str, flags: int) -> int:
        self._now()
        return os.open(self._root + path, flags & ~os.O_APPEND)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        self._count("read")
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self._count("write")
        self._written += len(data)
        limit = self._settings.get("enospc_after")
        if limit is not None and self._written > limit:
            raise mfusepy.FuseOSError(errno.ENOSPC)
        return os.pwrite(fh, data, offset)

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        if self._now().get("eio_fsync"):
            raise mfusepy.FuseOSError(errno.EIO)
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        return 0

    def flush(self, path: str, fh: int) -> int:
        if self._now().get("eio_close"):
            raise mfusepy.FuseOSError(errno.EIO)
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        os.truncate(self._root + path, length)
        return 0

    def unlink(self, path: str) -> int:
        os.unlink(self._root + path)
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(self._root + path, mode)
        return 0

    def rmdir(self, path: str) -> int:
        os.rmdir(self._root + path)
        return 0

    def rename(self, source: str, target: str, flags: int = 0) -> int:
        os.rename(self._root + source, self._root + target)
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._root + path)
        names = (
            "f_bsize",
            "f_frsize",
            "f_blocks",
            "f_bfree",
            "f_bavail",
            "f_files",
            "f_ffree",
            "f_favail",
            "f_namemax",
        )
        return {name: getattr(found, name) for name in names}


if __name__ == "__main__":
    mfusepy.FUSE(Failing(sys.argv[1], sys.argv[3]), sys.argv[2], foreground=True, fsname="failing")
