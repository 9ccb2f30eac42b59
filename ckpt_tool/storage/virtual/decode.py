"""A decoded file is the content of a compressed part of a stored file, readable at any offset.

Each part is decoded when it is first read, and kept: in memory within a budget, in a temporary file beyond it. When
room is needed, contents of which as many bytes were read as they have are let go: a copy reads each byte once, so what
was read through is not asked for again, and would be decoded again if it were. Knows no container: a manifest's file
table says which bytes are coded and how.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING

from ckpt_tool.errors import FormatError, StorageError
from ckpt_tool.manifest.model import FileEntry, FileRange
from ckpt_tool.records import dataclass, field
from ckpt_tool.sizes import counted
from ckpt_tool.storage.fetch import fetch_all
from ckpt_tool.storage.store import Listing, Store
from ckpt_tool.storage.urls import join_url
from ckpt_tool.storage.virtual.codecs import check_codec, content_blocks, deflated_limit, split_slice

if TYPE_CHECKING:
    from ckpt_tool.manifest.tables import FileTable

__all__ = ["DecodedStore", "decoded_blocks", "open_files"]

_READ_THROUGH_BYTES = 32 << 20
"""Contents that were read through are kept up to here, for who looks twice."""
_MAX_CONTAINER_BYTES = 64 << 20
"""A container of slices that is kept decoded, because others may lie in it; longer ones are decoded for each."""


def open_files(store: Store, files: FileTable, memory_budget_bytes: int) -> Store:
    """``store`` with the coded entries of ``files`` readable as files of their own; ``store`` itself if there are none.

    An entry whose size is not known is decoded twice: to measure it, and to keep it.

    Raises:
        FormatError: a coded entry does not say which bytes it is made of.
        Unsupported: an unknown codec.
    """
    coded = [entry for entry in files if entry.codec is not None]
    return DecodedStore(store, coded, memory_budget_bytes=memory_budget_bytes) if coded else store


def decoded_blocks(store: Store, part: FileRange, codec: str) -> Iterator[bytes]:
    """The content of a compressed part, block by block; requests are made as blocks are asked for.

    Raises:
        FormatError: the part is not one whole stream of that codec.
        Unsupported: an unknown codec.
    """
    return content_blocks(_PartFile(store, part), codec, _place(store.url, part))


def _place(url: str, part: FileRange) -> str:
    return str(FileRange(join_url(url, part.path), part.offset, part.length))


@dataclass(slots=True, eq=False)
class _Content:
    """Decoded bytes of one entry: ``data``, or ``spool_offset`` in the temporary file, or neither while not decoded."""

    entry: FileEntry
    part: FileRange
    nbytes: int
    """-1 until it is measured."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while it is decoded."""
    data: bytearray | None = None
    spool_offset: int = -1
    read_nbytes: int = 0
    """Bytes asked for since it was decoded."""

    @property
    def is_ready(self) -> bool:
        """Whether its bytes are at hand."""
        return self.data is not None or self.spool_offset >= 0

    @property
    def is_read_through(self) -> bool:
        """Whether as many bytes were read as it has."""
        return self.is_ready and self.read_nbytes >= self.nbytes


@dataclass(slots=True)
class _Spool:
    """A temporary file whose room is used again. Not safe by itself: the store's lock is held."""

    file: IO[bytes] | None = None
    nbytes: int = 0
    free: list[tuple[int, int]] = field(default_factory=list)
    """(offset, length) of room that was given back, by offset."""

    def take(self, nbytes: int) -> int:
        """Where ``nbytes`` bytes may be written."""
        for row, (offset, length) in enumerate(self.free):
            if length >= nbytes:
                self.free[row : row + 1] = [(offset + nbytes, length - nbytes)] if length > nbytes else []
                return offset
        self.nbytes += nbytes
        return self.nbytes - nbytes

    def give(self, offset: int, nbytes: int) -> None:
        """Room that is needed no more."""
        joined: list[tuple[int, int]] = []
        for start, length in sorted([*self.free, (offset, nbytes)]):
            if joined and sum(joined[-1]) == start:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((start, length))
        self.free = joined

    def opened(self) -> IO[bytes]:
        """The file."""
        if self.file is None:
            import tempfile  # 3 ms of start-up, for compressed members only

            self.file = tempfile.TemporaryFile(prefix="ckpt-decoded-")  # noqa: SIM115 - closed with the store
        return self.file


class DecodedStore:
    """``inner`` with decoded files beside its own. Safe to use from several threads.

    Args:
        inner: where the compressed bytes are; closed with this store.
        entries: the coded files.
        memory_budget_bytes: decoded bytes to keep in memory at most; what does not fit goes to a temporary file.
    """

    def __init__(self, inner: Store, entries: Sequence[FileEntry], *, memory_budget_bytes: int) -> None:
        self.url = inner.url
        self.cost = inner.cost
        self._inner = inner
        self._contents = {entry.path: _Content(entry, self._checked(entry), entry.nbytes) for entry in entries}
        self._lock = threading.Lock()
        self._free_bytes = memory_budget_bytes
        self._kept: dict[_Content, None] = {}  # contents that are ready, in the order in which they became so
        self._spool = _Spool()
        self._container: tuple[tuple[FileRange, str], bytes] | None = None
        self._is_closed = False

    def listing(self, *, anew: bool = False) -> Listing:
        """Files of ``inner`` and the decoded ones."""
        inner = self._inner.listing(anew=anew)
        decoded = {path: content.nbytes for path, content in self._contents.items()}
        return Listing(inner.url, dict(sorted({**inner.sizes, **decoded}.items())), inner.entry)

    def read(self, path: str, offset: int, length: int) -> bytes:
        """``length`` bytes of ``path`` from ``offset``; a decoded file's first read decodes all of it."""
        content = self._contents.get(path)
        if content is None:
            return self._inner.read(path, offset, length)
        return bytes(self._decoded(content, offset, length))

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``path`` at ``offset``; as ``read``."""
        content = self._contents.get(path)
        if content is None:
            self._inner.read_into(path, offset, buffer)
        elif buffer.nbytes:
            buffer.cast("B")[:] = self._decoded(content, offset, buffer.nbytes)

    def fetch(self, ranges: Sequence[FileRange]) -> list[bytes]:
        """The bytes of each range, in order."""
        if any(r.path in self._contents for r in ranges):
            return fetch_all(lambda r: self.read(r.path, r.offset, r.length), ranges, concurrency=self.cost.concurrency)
        return self._inner.fetch(ranges)

    def close(self) -> None:
        """Let go of what was decoded, and close ``inner``."""
        with self._lock:
            self._is_closed = True
            if self._spool.file is not None:
                self._spool.file.close()
            self._kept.clear()
            self._container = None
        self._contents.clear()
        self._inner.close()

    def _decoded(self, content: _Content, offset: int, length: int) -> bytes | memoryview:
        """Bytes of a decoded file, which is decoded first where it is not."""
        self._measure(content)
        self._check_range(content, offset, length)
        while True:
            self._make_ready(content)
            with self._lock:
                if not content.is_ready:  # let go of by another thread in between
                    continue
                content.read_nbytes += length
                data = content.data
                if data is not None:
                    if content.is_read_through:
                        self._trim()
                    return memoryview(data)[offset : offset + length]
                spool = self._spool.opened()
                spool.seek(content.spool_offset + offset)
                return spool.read(length)

    def _trim(self) -> None:
        """Let go of the oldest contents that were read through, but for a few: a plan reads each of them once."""
        through = [other for other in self._kept if other.is_read_through and other.data is not None]
        excess = sum(other.nbytes for other in through) - _READ_THROUGH_BYTES
        for other in through:
            if excess <= 0:
                break
            excess -= other.nbytes
            self._let_go(other)

    def _let_go(self, content: _Content) -> None:
        del self._kept[content]
        self._give_back(content.nbytes, content.spool_offset)
        content.data, content.spool_offset = None, -1

    def _checked(self, entry: FileEntry) -> FileRange:
        where = join_url(self.url, entry.path)
        check_codec(entry.codec, where)
        if entry.part is None:
            raise FormatError("compressed, but its place is not known", where=where)
        limit = deflated_limit(entry.codec or "", entry.part.length)
        if limit is not None and entry.nbytes > limit:
            raise FormatError(
                f"{counted(entry.part.length, 'byte')} of deflate cannot hold the {entry.nbytes:,} that are declared",
                where=where,
            )
        return entry.part

    def _blocks(self, content: _Content) -> Iterator[bytes]:
        """The content of an entry; what contains it is kept, for its neighbours."""
        codec = content.entry.codec or ""
        around, own = split_slice(codec)
        if not around:
            return decoded_blocks(self._inner, content.part, codec)
        key = (content.part, around)
        with self._lock:
            known = self._container[1] if self._container is not None and self._container[0] == key else None
        if known is None:
            found = bytearray()
            for block in decoded_blocks(self._inner, content.part, around):
                found += block
                if len(found) > _MAX_CONTAINER_BYTES:
                    return decoded_blocks(self._inner, content.part, codec)
            known = bytes(found)
            with self._lock:
                self._container = (key, known)
        return content_blocks(io.BytesIO(known), own, _place(self.url, content.part))

    def _measure(self, content: _Content) -> None:
        with content.lock:
            if content.nbytes < 0:
                content.nbytes = sum(len(block) for block in self._blocks(content))

    def _check_range(self, content: _Content, offset: int, length: int) -> None:
        where = join_url(self.url, content.entry.path)
        if self._is_closed:
            raise StorageError("used after it was closed", where=where)
        if offset < 0 or length < 0:
            raise FormatError(f"expected a byte range, got offset {offset:,} and length {length:,}", where=where)
        got = min(max(content.nbytes - offset, 0), length)
        if got != length:
            raise StorageError(f"expected {counted(length, 'byte')}, got {got:,}", where=f"{where}:{offset}")

    def _make_ready(self, content: _Content) -> None:
        with content.lock:
            if content.is_ready:
                return
            nbytes = content.nbytes
            with self._lock:
                in_memory = self._has_room(nbytes)
                if in_memory:
                    self._free_bytes -= nbytes
                spool_offset = -1 if in_memory else self._spool.take(nbytes)
            data = bytearray() if in_memory else None
            try:
                self._fill(content, data, spool_offset)
            except BaseException:
                with self._lock:
                    self._give_back(nbytes, spool_offset)
                raise
            with self._lock:
                content.data, content.spool_offset, content.read_nbytes = data, spool_offset, 0
                self._kept[content] = None

    def _has_room(self, nbytes: int) -> bool:
        """Whether memory has room for so many bytes, once contents that were read through are let go."""
        if nbytes > self._free_bytes:
            for other in [other for other in self._kept if other.is_read_through]:
                self._let_go(other)
                if nbytes <= self._free_bytes:
                    break
        return nbytes <= self._free_bytes

    def _give_back(self, nbytes: int, spool_offset: int) -> None:
        if spool_offset < 0:
            self._free_bytes += nbytes
        else:
            self._spool.give(spool_offset, nbytes)

    def _fill(self, content: _Content, data: bytearray | None, spool_offset: int) -> None:
        where = _place(self.url, content.part)
        done = 0
        for block in self._blocks(content):
            if done + len(block) > content.nbytes:
                raise FormatError(
                    f"decodes to more than the {counted(content.nbytes, 'byte')} that are declared", where=where
                )
            if data is not None:
                data += block
            else:
                self._write_spool(spool_offset + done, block)
            done += len(block)
        if done != content.nbytes:
            raise FormatError(f"expected {counted(content.nbytes, 'decoded byte')}, got {done:,}", where=where)

    def _write_spool(self, offset: int, block: bytes) -> None:
        try:
            with self._lock:
                spool = self._spool.opened()
                spool.seek(offset)
                spool.write(block)
        except OSError as error:
            import tempfile

            hint = "set TMPDIR to a folder with more room, or allow more memory"
            message = f"no room for {counted(len(block), 'decoded byte')} at {offset:,}: {error}"
            raise StorageError(message, where=tempfile.gettempdir(), hint=hint) from error


class _PartFile(io.RawIOBase):
    """The compressed bytes as a stream; requests as long as the storage likes them."""

    def __init__(self, store: Store, part: FileRange) -> None:
        self._store = store
        self._part = part
        self._done = 0
        self._block = memoryview(b"")

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        """At most ``size`` bytes; none only at the end."""
        if not self._block:
            length = min(self._part.length - self._done, self._store.cost.max_read_bytes)
            if length == 0:
                return b""
            self._block = memoryview(self._store.read(self._part.path, self._part.offset + self._done, length))
            self._done += length
        n = len(self._block) if size < 0 else min(size, len(self._block))
        piece, self._block = bytes(self._block[:n]), self._block[n:]
        return piece
