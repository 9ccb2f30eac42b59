"""python throttled_folder.py FOLDER MOUNT MB_PER_SECOND [cached]: a read-only view of a folder behind a slow link.

All readers together get so many megabytes a second, as from a file server. Without ``cached`` no byte that one process
has read serves another one, as with object stores and O_DIRECT; with it the system's page cache is in between. Needs
FUSE and PyPI's ``mfusepy``.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

import mfusepy


class Throttled(mfusepy.Operations):  # type: ignore[misc]
    """Reads wait for their turn on one link."""

    use_ns = True

    def __init__(self, folder: str, bytes_per_second: float) -> None:
        self._folder, self._rate = folder, bytes_per_second
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    def getattr(self, path: str, fh: Any = None) -> dict[str, int]:
        """State of a file."""
        found = os.lstat(self._folder + path)
        names = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid", "st_ino", "st_dev")
        return {**{name: getattr(found, name) for name in names}, "st_mtime": found.st_mtime_ns}

    def readdir(self, path: str, fh: Any) -> list[str]:
        """Names in a folder."""
        return [".", "..", *os.listdir(self._folder + path)]

    def open(self, path: str, flags: int) -> int:
        """Open for reading."""
        return os.open(self._folder + path, os.O_RDONLY)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        """Bytes of a file, when the link is free."""
        with self._lock:
            begin = max(self._free_at, time.monotonic())
            self._free_at = begin + size / self._rate
            until = self._free_at
        time.sleep(max(until - time.monotonic(), 0))
        return os.pread(fh, size, offset)

    def release(self, path: str, fh: int) -> int:
        """Close."""
        os.close(fh)
        return 0


if __name__ == "__main__":
    folder, mount, megabytes, *cached = sys.argv[1:]
    options = {} if cached else {"direct_io": True}
    mfusepy.FUSE(Throttled(folder, float(megabytes) * 1e6), mount, foreground=True, ro=True, **options)
