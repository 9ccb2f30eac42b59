"""A store whose files are those of a dict. Knows paths and bytes, no checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckpt_tool.errors import FormatError, NotFound, StorageError
from ckpt_tool.manifest.model import FileRange
from ckpt_tool.sizes import counted
from ckpt_tool.storage.store import Listing, ReadCost
from ckpt_tool.storage.urls import check_path, join_url

__all__ = ["MEMORY_COST", "MemoryStore"]

MEMORY_COST = ReadCost(max_gap_bytes=1 << 10, max_read_bytes=1 << 20, concurrency=1)


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

    def listing(self, *, anew: bool = False) -> Listing:  # noqa: ARG002 - it is what it always was
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
