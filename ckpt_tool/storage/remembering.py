"""A remembering store keeps the small pieces that were read last, because metadata is looked at more than once.

Probes, readers and checks each ask for what they need of heads, indexes and directories, and far away each answer costs
a request. Payload, which is read into buffers, is not kept.
"""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from ckpt_tool.errors import StorageError
from ckpt_tool.geometry.runs import merge_runs
from ckpt_tool.manifest.model import FileRange
from ckpt_tool.storage.store import Listing, ReadCost, Store

__all__ = ["RememberingStore"]

_MAX_BYTES = 32 << 20
_MAX_PIECES = 4096
_MAX_GAP_BYTES = 64 << 10
_MAX_MERGED_BYTES = 1 << 20
"""Heads and counters that lie close together are read as one; these reads wait in memory for each other."""


class RememberingStore:
    """``inner``, whose files do not change while it is open. Safe to use from several threads."""

    def __init__(self, inner: Store, *, max_bytes: int = 0) -> None:
        """At least ``max_bytes`` are kept, of one piece half of what is."""
        self._inner = inner
        self._max_bytes = max(max_bytes, _MAX_BYTES)
        self._lock = threading.Lock()
        self._pieces: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        """By path and offset, those asked for last at the end."""
        self._offsets: dict[str, list[int]] = {}
        """Of the pieces of a file, sorted."""
        self._nbytes = 0

    @property
    def url(self) -> str:
        """As the inner one's."""
        return self._inner.url

    @property
    def cost(self) -> ReadCost:
        """As the inner one's."""
        return self._inner.cost

    def listing(self, *, anew: bool = False) -> Listing:
        """As the inner one's."""
        return self._inner.listing(anew=anew)

    def read(self, path: str, offset: int, length: int) -> bytes:
        """``length`` bytes of ``path`` from ``offset``: one request, or none."""
        known = self._known(path, offset, length)
        if known is None:
            [known] = self._completed([FileRange(path, offset, length)])
        return known

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``path`` at ``offset``: one request for what is between known pieces, or none."""
        rest = buffer.cast("B")
        known = self._known(path, offset, rest.nbytes)
        for part in [known] if known is not None else self._parts(FileRange(path, offset, rest.nbytes)):
            if isinstance(part, FileRange):
                self._inner.read_into(path, part.offset, rest[: part.length])
                rest = rest[part.length :]
            else:
                rest[: len(part)] = part
                rest = rest[len(part) :]

    def fetch(self, ranges: Sequence[FileRange]) -> list[bytes]:
        """The bytes of each range, in order; one request for each that is not known, close neighbours together."""
        found = [self._known(r.path, r.offset, r.length) for r in ranges]
        missing = [row for row, data in enumerate(found) if data is None]
        if missing:
            for row, data in zip(missing, self._completed([ranges[row] for row in missing]), strict=True):
                found[row] = data
        return [data for data in found if data is not None]

    def _completed(self, ranges: Sequence[FileRange]) -> list[bytes]:
        """Ranges that no one piece has: of those that are known for the most part what is not known is read."""
        parts = [self._parts(r) for r in ranges]
        unknown = [part for own in parts for part in own if isinstance(part, FileRange)]
        try:
            read = iter(self._fetched(unknown))
        except StorageError:
            if len(unknown) == len(ranges):
                raise
            return self._fetched(ranges)  # which says of the whole range what is wrong
        whole = []
        for r, own in zip(ranges, parts, strict=True):
            data = [next(read) if isinstance(part, FileRange) else part for part in own]
            whole.append(data[0] if len(data) == 1 else b"".join(data))
            if len(data) > 1:
                self._keep(r.path, r.offset, whole[-1])
        return whole

    def _parts(self, wanted: FileRange) -> list[FileRange | bytes]:
        """A range as what is known of it and what is between; the range itself where that is more than half of it."""
        parts: list[FileRange | bytes] = []
        n_known, at = 0, wanted.offset
        with self._lock:
            offsets = self._offsets.get(wanted.path, [])
            while at < wanted.end:
                behind = bisect_right(offsets, at)
                start = offsets[behind - 1] if behind else at
                known = self._pieces[wanted.path, start][at - start : wanted.end - start] if behind else b""
                if known:
                    parts.append(known)
                    n_known += len(known)
                    at += len(known)
                else:
                    stop = min(offsets[behind] if behind < len(offsets) else wanted.end, wanted.end)
                    parts.append(FileRange(wanted.path, at, stop - at))
                    at = stop
        return parts if 2 * n_known >= wanted.length > 0 else [wanted]

    def _fetched(self, ranges: Sequence[FileRange]) -> list[bytes]:
        """Ranges that are not known."""
        reads, read_of = _merged(ranges)
        try:
            answers = self._inner.fetch(reads)
        except StorageError:
            if len(reads) == len(ranges):
                raise
            return self._inner.fetch(ranges)  # which says of the very range what is wrong
        for read, data in zip(reads, answers, strict=True):
            self._keep(read.path, read.offset, data)
        starts = [r.offset - reads[read].offset for r, read in zip(ranges, read_of, strict=True)]
        return [answers[read][at : at + r.length] for r, read, at in zip(ranges, read_of, starts, strict=True)]

    def close(self) -> None:
        """Close the inner one, and let go of what is kept."""
        with self._lock:
            self._pieces.clear()
            self._offsets.clear()
            self._nbytes = 0
        self._inner.close()

    def _known(self, path: str, offset: int, length: int) -> bytes | None:
        """A range that lies within the piece that begins last before it, or within the head of its file."""
        with self._lock:
            offsets = self._offsets.get(path)
            if not offsets or length <= 0:
                return None
            before = bisect_right(offsets, offset)
            for start in {offsets[before - 1], offsets[0]} if before else ():
                piece = self._pieces[path, start]
                if offset + length <= start + len(piece):
                    self._pieces.move_to_end((path, start))
                    return piece[offset - start : offset - start + length]
        return None

    def _keep(self, path: str, offset: int, data: bytes) -> None:
        if not 0 < len(data) <= self._max_bytes // 2:
            return
        with self._lock:
            earlier = self._pieces.get((path, offset), b"")
            if len(earlier) >= len(data):
                return
            if not earlier:
                insort(self._offsets.setdefault(path, []), offset)
            self._pieces[path, offset] = data
            self._nbytes += len(data) - len(earlier)
            while self._nbytes > self._max_bytes or len(self._pieces) > _MAX_PIECES:
                (old_path, old_offset), old = self._pieces.popitem(last=False)
                self._offsets[old_path].remove(old_offset)
                self._nbytes -= len(old)


def _merged(ranges: Sequence[FileRange]) -> tuple[list[FileRange], list[int]]:
    """Reads that cover all ranges, and which of them covers each."""
    rows_of: dict[str, list[int]] = {}
    for row, r in enumerate(ranges):
        rows_of.setdefault(r.path, []).append(row)
    reads: list[FileRange] = []
    read_of = [0] * len(ranges)
    for path, rows in rows_of.items():
        starts, lengths, of_run = merge_runs(
            np.array([ranges[row].offset for row in rows], dtype=np.int64),
            np.array([ranges[row].length for row in rows], dtype=np.int64),
            max_gap_bytes=_MAX_GAP_BYTES, max_read_bytes=_MAX_MERGED_BYTES, split=False,
        )  # fmt: skip
        n_before = len(reads)
        reads += [FileRange(path, *place) for place in zip(starts.tolist(), lengths.tolist(), strict=True)]
        for row, read in zip(rows, of_run.tolist(), strict=True):
            read_of[row] = n_before + read if read >= 0 else len(reads)
            if read < 0:
                reads.append(ranges[row])  # nothing to read, but the file must be there
    return reads, read_of
