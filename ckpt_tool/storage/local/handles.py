"""A handle is an open file that is read and written at explicit offsets; a bounded number of them stays open.

Knows no root, no listing and no format. Where the system has no positional calls (Windows), a lock for each handle
makes seek and transfer one step.
"""

from __future__ import annotations

import io
import os
import threading
from collections import OrderedDict
from collections.abc import Callable

from ckpt_tool.errors import StorageError
from ckpt_tool.records import dataclass, field

__all__ = ["Handle", "Handles", "Loan"]


@dataclass(slots=True, eq=False)
class Handle:
    """One open file."""

    file: io.FileIO
    users: int = 1
    seek_lock: threading.Lock = field(default_factory=threading.Lock)

    def read_at(self, offset: int, length: int) -> bytes:
        """At most ``length`` bytes from ``offset``; fewer only at the end of the file."""
        if not hasattr(os, "pread"):
            buffer = bytearray(length)
            return bytes(buffer[: self.read_into_at(offset, memoryview(buffer))])
        first = os.pread(self.file.fileno(), length, offset)
        done = len(first)
        if done == length or not done:
            return first
        pieces = [first]
        while done < length:
            piece = os.pread(self.file.fileno(), length - done, offset + done)
            if not piece:
                break
            pieces.append(piece)
            done += len(piece)
        return b"".join(pieces)

    def read_into_at(self, offset: int, buffer: memoryview) -> int:
        """Fill ``buffer`` from ``offset``; returns the bytes read, fewer than asked for only at the end of the file."""
        done = 0
        while done < len(buffer):
            if hasattr(os, "preadv"):
                n = os.preadv(self.file.fileno(), [buffer[done:]], offset + done)
            else:
                with self.seek_lock:
                    self.file.seek(offset + done)
                    n = self.file.readinto(buffer[done:]) or 0
            if n == 0:
                break
            done += n
        return done

    def write_at(self, offset: int, buffer: memoryview) -> None:
        """Write all of ``buffer`` at ``offset``, in as many calls as the system needs."""
        done = 0
        while done < len(buffer):
            if hasattr(os, "pwrite"):
                n = os.pwrite(self.file.fileno(), buffer[done:], offset + done)
            else:
                with self.seek_lock:
                    self.file.seek(offset + done)
                    n = self.file.write(buffer[done:])
            done += _some(n)


def _some(n: int) -> int:
    if n <= 0:
        raise StorageError("the system wrote nothing and reported no error")
    return n


class Handles:
    """Open files by path, the least recently used idle ones closed beyond ``limit``. Safe to use from several threads.

    Handles in use are never closed, so that more than ``limit`` are open while more than ``limit`` threads work.
    """

    def __init__(self, open_file: Callable[[str], io.FileIO], *, limit: int) -> None:
        self._open_file = open_file
        self._limit = limit
        self._lock = threading.Lock()
        self._open: OrderedDict[str, Handle] = OrderedDict()
        self._is_closed = False

    def borrow(self, path: str) -> Loan:
        """A block with the handle of ``path``, opened when it is not, and kept open for the length of the block."""
        return Loan(self, path)

    def take(self, path: str) -> Handle:
        """The handle of ``path``, opened when it is not; for `Loan`, which gives it back."""
        with self._lock:
            handle = self._reuse(path)
        if handle is not None:
            return handle
        opened = Handle(self._open_file(path))  # outside the lock: opening may take a network's round trip
        with self._lock:
            try:
                handle = self._reuse(path)
            except StorageError:
                opened.file.close()
                raise
            if handle is not None:  # another thread was faster
                opened.file.close()
                return handle
            self._open[path] = opened
            self._close_idle(self._limit)
        return opened

    def give_back(self, handle: Handle) -> None:
        """End the use of a handle that was taken."""
        with self._lock:
            handle.users -= 1
            if self._is_closed or len(self._open) > self._limit:
                self._close_idle(0 if self._is_closed else self._limit)

    def forget(self, path: str) -> None:
        """Open ``path`` anew the next time; those who have the old handle keep it."""
        with self._lock:
            handle = self._open.pop(path, None)
            if handle is not None and handle.users == 0:
                handle.file.close()

    def __len__(self) -> int:
        """Number of open files."""
        return len(self._open)

    def close(self) -> None:
        """Close all files; those in use as soon as they are given back."""
        with self._lock:
            self._is_closed = True
            self._close_idle(0)

    def __del__(self) -> None:
        """Close what a forgotten store left open: the files are a cache, of which its user knows nothing."""
        self.close()

    def _reuse(self, path: str) -> Handle | None:
        if self._is_closed:
            raise StorageError("used after it was closed", where=path)
        handle = self._open.get(path)
        if handle is not None:
            handle.users += 1
            self._open.move_to_end(path)
        return handle

    def _close_idle(self, limit: int) -> None:
        if len(self._open) <= limit:
            return
        for path, handle in list(self._open.items()):
            if handle.users == 0:
                handle.file.close()
                del self._open[path]
            if len(self._open) <= limit:
                return


class Loan:
    """A handle for the length of a block; a generator in its place takes three times as long, for each small read."""

    __slots__ = ("_handle", "_handles", "_path")

    def __init__(self, handles: Handles, path: str) -> None:
        self._handles = handles
        self._path = path

    def __enter__(self) -> Handle:
        """Take the handle."""
        self._handle = self._handles.take(self._path)
        return self._handle

    def __exit__(self, *_: object) -> None:
        """Give it back."""
        self._handles.give_back(self._handle)
