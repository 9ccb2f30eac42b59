"""A file of zeros is one that is nowhere stored: what a target pads, and no source has, is read from it.

Knows no format; a manifest's file table names such files by their codec.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckpt_tool.errors import StorageError
from ckpt_tool.manifest.model import ZEROS, FileEntry, FileRange
from ckpt_tool.manifest.tables import FileTable
from ckpt_tool.sizes import counted
from ckpt_tool.storage.store import Listing, Store
from ckpt_tool.storage.urls import join_url

__all__ = ["ZerosStore", "with_zeros"]


def with_zeros(store: Store, files: FileTable) -> Store:
    """``store`` with those of ``files`` readable that are zeros; ``store`` itself if there are none."""
    entries = [entry for entry in files if entry.codec == ZEROS]
    return ZerosStore(store, entries) if entries else store


class ZerosStore:
    """``inner`` with files of zeros beside its own. Safe to use from several threads; closing it closes ``inner``."""

    def __init__(self, inner: Store, entries: Sequence[FileEntry]) -> None:
        self.url = inner.url
        self.cost = inner.cost
        self._inner = inner
        self._nbytes = {entry.path: entry.nbytes for entry in entries}

    def listing(self, *, anew: bool = False) -> Listing:
        """Files of ``inner``."""
        return self._inner.listing(anew=anew)

    def read(self, path: str, offset: int, length: int) -> bytes:
        """``length`` bytes of ``path`` from ``offset``."""
        if path not in self._nbytes:
            return self._inner.read(path, offset, length)
        self._check(path, offset, length)
        return bytes(length)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``path`` at ``offset``."""
        if path not in self._nbytes:
            self._inner.read_into(path, offset, buffer)
            return
        self._check(path, offset, buffer.nbytes)
        np.frombuffer(buffer, dtype=np.uint8).fill(0)

    def fetch(self, ranges: Sequence[FileRange]) -> list[bytes]:
        """The bytes of each range, in order."""
        stored = iter(self._inner.fetch([r for r in ranges if r.path not in self._nbytes]))
        return [self.read(r.path, r.offset, r.length) if r.path in self._nbytes else next(stored) for r in ranges]

    def close(self) -> None:
        """Close ``inner``."""
        self._inner.close()

    def _check(self, path: str, offset: int, length: int) -> None:
        if offset < 0 or length < 0 or offset + length > self._nbytes[path]:
            raise StorageError(
                f"expected {counted(length, 'byte')} from {offset:,}, there are {self._nbytes[path]:,} zeros",
                where=join_url(self.url, path),
            )
