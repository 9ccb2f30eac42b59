"""A summing store takes the CRC-32 of every range that is read through it, so that files need no reading of their own.

What nobody read is read when a file's sum is asked for. Knows no format.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from ckpt_tool.checksum import crc32, crc32_combine
from ckpt_tool.manifest.model import FileRange
from ckpt_tool.sizes import counted
from ckpt_tool.storage.store import Listing, Store

__all__ = ["SummingStore"]

_BLOCK_BYTES = 4 << 20
_GAPS_AT_ONCE = 64
_N_RECENT = 256

_Range = tuple[int, int, int]
"""First byte, one past the last, CRC-32."""


class SummingStore:
    """``inner``, with the CRC-32 of what was read. Safe to use from several threads; closing it leaves ``inner`` open.

    Memory: a record for each stretch of a file that was read in one go, front to back.
    """

    def __init__(self, inner: Store) -> None:
        self.url = inner.url
        self.cost = inner.cost
        self._inner = inner
        self._lock = threading.Lock()
        self._ending: dict[str, dict[int, _Range]] = {}
        self._local = threading.local()

    def listing(self, *, anew: bool = False) -> Listing:
        """As ``inner``."""
        return self._inner.listing(anew=anew)

    def read(self, path: str, offset: int, length: int) -> bytes:
        """As ``inner``, and summed."""
        data = self._inner.read(path, offset, length)
        self.note(path, offset, length, crc32(data))
        return data

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """As ``inner``, and summed."""
        self._inner.read_into(path, offset, buffer)
        self.note(path, offset, buffer.nbytes, crc32(buffer))

    def fetch(self, ranges: Sequence[FileRange]) -> list[bytes]:
        """As ``inner``, and summed."""
        found = self._inner.fetch(ranges)
        for r, data in zip(ranges, found, strict=True):
            self.note(r.path, r.offset, r.length, crc32(data))
        return found

    def close(self) -> None:
        """Nothing."""

    def holder(self, path: str) -> Store:  # noqa: ARG002 - the one that has it
        """The store that has a file."""
        return self._inner

    def drained(self) -> list[tuple[str, int, int, int]]:
        """Path, first byte, bytes and CRC-32 of each stretch, for another store's ``note``; here they are forgotten."""
        with self._lock:
            stretches = [
                (path, first, stop - first, crc)
                for path, ending in self._ending.items()
                for first, stop, crc in ending.values()
            ]
            self._ending.clear()
        return stretches

    def recent_crc32(self, path: str, offset: int, length: int) -> int | None:
        """The CRC-32 of a range, if it is one of the last that this thread read."""
        recent: dict[tuple[str, int, int], int] = getattr(self._local, "recent", {})
        return recent.get((path, offset, length))

    def file_crc32(self, path: str, nbytes: int) -> int:
        """The CRC-32 of a file of ``nbytes`` bytes; reads what was not read before, and that only.

        Raises:
            StorageError: the file is shorter.
        """
        value = at = 0
        with self._lock:
            known = sorted(self._ending.get(path, {}).values())
        for batch in _batches(_filled(known, nbytes)):
            gaps = [FileRange(path, first, last - first) for first, last, crc in batch if crc is None]
            read = iter(self._inner.fetch(gaps))
            for first, last, crc in batch:
                value = crc32_combine(value, crc32(next(read)) if crc is None else crc, last - first)
                at = last
        if at != nbytes:
            raise ValueError(f"ranges cover {at:,} of {counted(nbytes, 'byte')}")
        return value

    def note(self, path: str, offset: int, length: int, crc: int) -> None:
        """That a range was read elsewhere, and its CRC-32."""
        if not length:
            return
        recent: dict[tuple[str, int, int], int] | None = getattr(self._local, "recent", None)
        if recent is None or len(recent) >= _N_RECENT:
            recent = self._local.recent = {}
        recent[path, offset, length] = crc
        with self._lock:
            ending = self._ending.setdefault(path, {})
            before = ending.pop(offset, None)
            first = offset
            if before is not None:  # the stretch goes on
                first, crc = before[0], crc32_combine(before[2], crc, length)
            known = ending.get(offset + length)
            if known is None or known[0] > first:  # of two that end alike the longer one says more
                ending[offset + length] = (first, offset + length, crc)


def _filled(known: Sequence[_Range], nbytes: int) -> Iterator[tuple[int, int, int | None]]:
    """Ranges that cover a file once, front to back: known ones that don't overlap, and blocks between them."""
    at = 0
    for first, last, crc in [*known, (nbytes, nbytes, 0)]:
        if first < at:
            continue
        for start in range(at, first, _BLOCK_BYTES):
            yield start, min(start + _BLOCK_BYTES, first), None
        if last > first:
            yield first, last, crc
        at = last


def _batches(ranges: Iterator[tuple[int, int, int | None]]) -> Iterator[list[tuple[int, int, int | None]]]:
    """Ranges in groups of which the unknown ones fit a few blocks together."""
    batch: list[tuple[int, int, int | None]] = []
    n_gaps = left = 0
    for item in ranges:
        batch.append(item)
        if item[2] is None:
            n_gaps, left = n_gaps + 1, left + item[1] - item[0]
        if n_gaps >= _GAPS_AT_ONCE or left >= 2 * _BLOCK_BYTES:
            yield batch
            batch, n_gaps, left = [], 0, 0
    if batch:
        yield batch
