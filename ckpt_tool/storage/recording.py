"""A recording store notes every range that is read; a memory store holds its files in a dict.

Together they stand in for real storage where the number and size of requests is what matters.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from ckpt_tool.errors import FormatError, NotFound, StorageError
from ckpt_tool.manifest.model import FileRange
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted
from ckpt_tool.storage.store import Listing, ReadCost, Store
from ckpt_tool.storage.urls import check_path, join_url

__all__ = ["MEMORY_COST", "MemoryStore", "ReadCall", "RecordingStore"]

MEMORY_COST = ReadCost(max_gap_bytes=1 << 10, max_read_bytes=1 << 20, concurrency=1)


@dataclass(frozen=True, slots=True)
class ReadCall:
    """One request for bytes."""

    path: str
    offset: int
    length: int


class RecordingStore:
    """``inner``, with a record of what was read from it. Safe to use from several threads."""

    def __init__(self, inner: Store) -> None:
        self.url = inner.url
        self.cost = inner.cost
        self._inner = inner
        self._lock = threading.Lock()
        self._calls: list[ReadCall] = []

    @property
    def calls(self) -> tuple[ReadCall, ...]:
        """All requests so far, in the order in which they were made; failed ones too."""
        with self._lock:
            return tuple(self._calls)

    @property
    def nbytes(self) -> int:
        """Sum of the lengths of ``calls``."""
        return sum(call.length for call in self.calls)

    def clear(self) -> None:
        """Forget all calls."""
        with self._lock:
            self._calls.clear()

    def listing(self) -> Listing:
        """Listing of ``inner``; not recorded."""
        return self._inner.listing()

    def read(self, path: str, offset: int, length: int) -> bytes:
        """As ``inner``; one call."""
        self._note([ReadCall(path, offset, length)])
        return self._inner.read(path, offset, length)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """As ``inner``; one call."""
        self._note([ReadCall(path, offset, buffer.nbytes)])
        self._inner.read_into(path, offset, buffer)

    def fetch(self, ranges: Sequence[FileRange]) -> list[bytes]:
        """As ``inner``; one call for each range."""
        self._note([ReadCall(r.path, r.offset, r.length) for r in ranges])
        return self._inner.fetch(ranges)

    def close(self) -> None:
        """Close ``inner``; the record stays."""
        self._inner.close()

    def _note(self, calls: list[ReadCall]) -> None:
        with self._lock:
            self._calls += calls


class MemoryStore:
    """The files of a dict."""

    def __init__(
        self,
        files: Mapping[str, bytes],
        *,
        url: str = "memory:",
        cost: ReadCost = MEMORY_COST,
    ) -> None:
        self.url = url
        self.cost = cost
        self._files = dict(files)
        self._is_closed = False

    def listing(self) -> Listing:
        """All files."""
        return Listing(self.url, {path: len(data) for path, data in sorted(self._files.items())})

    def read(self, path: str, offset: int, length: int) -> bytes:
        """``length`` bytes of ``path`` from ``offset``."""
        where = join_url(self.url, check_path(path, root=self.url))
        if self._is_closed:
            raise StorageError("used after it was closed", where=where)
        if offset < 0 or length < 0:
            raise FormatError(f"expected a byte range, got offset {offset:,} and length {length:,}", where=where)
        if path not in self._files:
            raise NotFound("no such file", where=where)
        data = self._files[path][offset : offset + length]
        if len(data) != length:
            raise StorageError(f"expected {counted(length, 'byte')}, got {len(data):,}", where=f"{where}:{offset}")
        return data

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``path`` at ``offset``."""
        data = self.read(path, offset, buffer.nbytes)
        if data:
            buffer.cast("B")[:] = data

    def fetch(self, ranges: Sequence[FileRange]) -> list[bytes]:
        """The bytes of each range, in order."""
        return [self.read(r.path, r.offset, r.length) for r in ranges]

    def close(self) -> None:
        """Make further reads fail; the files are let go."""
        self._is_closed = True
        self._files.clear()
