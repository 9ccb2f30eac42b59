"""A decoded file is the content of a compressed part of a stored file, readable at any offset.

Each part is decoded once, when it is first read, and kept: in memory within a budget, in a temporary file beyond it.
Knows codecs, but no container: a manifest's file table says which bytes are compressed and how.
"""

from __future__ import annotations

import io
import tempfile
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING

from ckpt_tool.errors import CkptError, FormatError, StorageError, Unsupported
from ckpt_tool.manifest.model import FileEntry, FileRange
from ckpt_tool.storage.fetch import fetch_all
from ckpt_tool.storage.store import Listing, Store
from ckpt_tool.storage.urls import join_url

if TYPE_CHECKING:
    from ckpt_tool.manifest.tables import FileTable

__all__ = ["DecodedStore", "decoded_blocks", "open_files"]

BLOCK_BYTES = 1 << 20
"""Decoded bytes that are held beside the kept ones while a part is decoded."""
MAX_DEFLATE_RATIO = 1032
"""One length-distance pair of at least 2 bits yields 258 bytes at most (RFC 1951, 3.2.5)."""


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
    where = str(FileRange(join_url(store.url, part.path), part.offset, part.length))
    if codec not in _DECODERS:
        raise Unsupported(f"compressed with {codec}, expected {' or '.join(_DECODERS)}", where=where)
    return _DECODERS[codec](_PartFile(store, part), where)


@dataclass(slots=True, eq=False)
class _Content:
    """Decoded bytes of one entry, once ``is_ready``: ``data``, or the spool file from ``spool_offset``."""

    entry: FileEntry
    part: FileRange
    nbytes: int
    """-1 until it is measured."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_ready: bool = False
    data: bytearray | None = None
    spool_offset: int = 0


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
        self._spool: IO[bytes] | None = None
        self._spooled_bytes = 0
        self._is_closed = False

    def listing(self) -> Listing:
        """Files of ``inner`` and the decoded ones."""
        inner = self._inner.listing()
        decoded = {path: content.nbytes for path, content in self._contents.items()}
        return Listing(inner.url, dict(sorted({**inner.sizes, **decoded}.items())), inner.entry)

    def read(self, path: str, offset: int, length: int) -> bytes:
        """``length`` bytes of ``path`` from ``offset``; a decoded file's first read decodes all of it."""
        content = self._contents.get(path)
        if content is None:
            return self._inner.read(path, offset, length)
        self._measure(content)
        self._check_range(content, offset, length)
        self._make_ready(content)
        if content.data is not None:
            return bytes(memoryview(content.data)[offset : offset + length])
        with self._lock:
            spool = self._open_spool()
            spool.seek(content.spool_offset + offset)
            return spool.read(length)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``path`` at ``offset``; as ``read``."""
        if path not in self._contents:
            self._inner.read_into(path, offset, buffer)
            return
        data = self.read(path, offset, buffer.nbytes)
        if data:
            buffer.cast("B")[:] = data

    def fetch(self, ranges: Sequence[FileRange]) -> list[bytes]:
        """The bytes of each range, in order."""
        if any(r.path in self._contents for r in ranges):
            return fetch_all(lambda r: self.read(r.path, r.offset, r.length), ranges, concurrency=self.cost.concurrency)
        return self._inner.fetch(ranges)

    def close(self) -> None:
        """Let go of what was decoded, and close ``inner``."""
        with self._lock:
            self._is_closed = True
            if self._spool is not None:
                self._spool.close()
        self._contents.clear()
        self._inner.close()

    def _checked(self, entry: FileEntry) -> FileRange:
        where = join_url(self.url, entry.path)
        if entry.codec not in _DECODERS:
            raise Unsupported(f"compressed with {entry.codec}, expected {' or '.join(_DECODERS)}", where=where)
        if entry.part is None:
            raise FormatError("compressed, but its place is not known", where=where)
        if entry.codec == "deflate" and entry.nbytes > max(entry.part.length, 1) * MAX_DEFLATE_RATIO:
            raise FormatError(
                f"{entry.part.length:,} bytes of deflate cannot hold the {entry.nbytes:,} that are declared",
                where=where,
            )
        return entry.part

    def _measure(self, content: _Content) -> None:
        with content.lock:
            if content.nbytes < 0:
                blocks = decoded_blocks(self._inner, content.part, content.entry.codec or "")
                content.nbytes = sum(len(block) for block in blocks)

    def _check_range(self, content: _Content, offset: int, length: int) -> None:
        where = join_url(self.url, content.entry.path)
        if self._is_closed:
            raise StorageError("used after it was closed", where=where)
        if offset < 0 or length < 0:
            raise FormatError(f"expected a byte range, got offset {offset:,} and length {length:,}", where=where)
        got = min(max(content.nbytes - offset, 0), length)
        if got != length:
            raise StorageError(f"expected {length:,} bytes, got {got:,}", where=f"{where}:{offset}")

    def _make_ready(self, content: _Content) -> None:
        with content.lock:
            if content.is_ready:
                return
            nbytes = content.nbytes
            with self._lock:
                if nbytes <= self._free_bytes:
                    self._free_bytes -= nbytes
                    content.data = bytearray()
                else:
                    content.spool_offset = self._spooled_bytes
                    self._spooled_bytes += nbytes
            try:
                self._fill(content)
            except BaseException:
                if content.data is not None:
                    content.data = None
                    with self._lock:
                        self._free_bytes += nbytes
                raise
            content.is_ready = True

    def _fill(self, content: _Content) -> None:
        where = str(FileRange(join_url(self.url, content.part.path), content.part.offset, content.part.length))
        done = 0
        for block in decoded_blocks(self._inner, content.part, content.entry.codec or ""):
            if done + len(block) > content.nbytes:
                raise FormatError(f"decodes to more than the {content.nbytes:,} bytes that are declared", where=where)
            if content.data is not None:
                content.data += block
            else:
                self._write_spool(content.spool_offset + done, block)
            done += len(block)
        if done != content.nbytes:
            raise FormatError(f"expected {content.nbytes:,} decoded bytes, got {done:,}", where=where)

    def _write_spool(self, offset: int, block: bytes) -> None:
        try:
            with self._lock:
                spool = self._open_spool()
                spool.seek(offset)
                spool.write(block)
        except OSError as error:
            hint = "set TMPDIR to a folder with more room, or allow more memory"
            message = f"no room for {len(block):,} decoded bytes at {offset:,}: {error}"
            raise StorageError(message, where=tempfile.gettempdir(), hint=hint) from error

    def _open_spool(self) -> IO[bytes]:
        if self._spool is None:
            self._spool = tempfile.TemporaryFile(prefix="ckpt-decoded-")  # noqa: SIM115 - closed with the store
        return self._spool


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


def _deflated(source: _PartFile, where: str) -> Iterator[bytes]:
    """Decoded blocks of a raw deflate stream, which must end where its part does."""
    decoder = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        while not decoder.eof:
            piece = decoder.unconsumed_tail or source.read(BLOCK_BYTES)
            block = decoder.decompress(piece, BLOCK_BYTES)  # without a piece: what the decoder still holds
            if not (piece or block or decoder.eof):
                raise FormatError("the deflate stream does not end within its part", where=where)
            yield block
    except zlib.error as error:
        raise FormatError(f"not a deflate stream: {error}", where=where) from error
    if decoder.unused_data or source.read(1):
        raise FormatError("the deflate stream ends before its part does", where=where)


def _unpacked_zstd(source: _PartFile, where: str) -> Iterator[bytes]:
    """Decoded blocks of one or more zstd frames."""
    import pyarrow as pa  # 90 ms of start-up that only such files need

    try:
        stream = pa.CompressedInputStream(pa.PythonFile(source, mode="r"), "zstd")
        while block := stream.read(BLOCK_BYTES):
            yield block
    except CkptError:
        raise
    except (OSError, pa.ArrowException) as error:
        raise FormatError(f"not a zstd stream: {error}", where=where) from error


_DECODERS = {"deflate": _deflated, "zstd": _unpacked_zstd}
