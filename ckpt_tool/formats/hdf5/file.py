"""An HDF5 file as h5py sees it: a stream over byte ranges of a store, in blocks that are kept.

HDF5's own library parses the structure, because it has grown through twelve versions of its file format; payload is
never read through it. A ``.keras`` file is a zip whose member ``model.weights.h5`` is such a file, stored as it is.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ckpt_tool.errors import CkptError, FormatError, Unsupported
from ckpt_tool.formats._zip.directory import ZipDirectory, payload_offset, read_directory
from ckpt_tool.formats.base import Source

__all__ = ["MAGIC", "WEIGHTS", "end_of_file", "opened", "span_of", "zip_of"]

MAGIC = b"\x89HDF\r\n\x1a\n"
WEIGHTS = "model.weights.h5"
_BLOCK_NBYTES = 64 << 10
_MAX_BLOCKS = 1024
_SUPERBLOCK_NBYTES = 64


def span_of(source: Source, path: str) -> tuple[int, int]:
    """Where the HDF5 file begins in ``path``, and how long it is.

    Raises:
        FormatError: neither HDF5 nor a zip with such a file in it.
        Unsupported: it is compressed in its zip.
    """
    nbytes = source.listing.nbytes(path)
    if source.head(path, 8) == MAGIC:
        return 0, nbytes

    member = zip_of(source, path).members.get(WEIGHTS)
    if member is None:
        raise FormatError(f"no {WEIGHTS} in it", where=path)
    if not member.is_stored:
        raise Unsupported(f"{WEIGHTS} is compressed in its zip", where=path, hint="unpack it, and name the file inside")
    start = payload_offset(lambda offset, length: source.store.read(path, offset, length), member, where=path)
    return start, member.nbytes


def end_of_file(source: Source, path: str) -> int | None:
    """Where the superblock says that the file ends, which HDF5's library asks of no file that is longer.

    None for one whose superblock does not begin the file, or is of another version. Source: HDF5 File Format
    Specification 3.0, II.A.
    """
    head = source.head(path, _SUPERBLOCK_NBYTES)
    at = {0: 24, 1: 28, 2: 12, 3: 12}.get(head[8] if len(head) == _SUPERBLOCK_NBYTES else -1)
    if at is None or head[:8] != MAGIC:
        return None
    width = head[9] if at == 12 else head[13]
    end = at + 3 * width  # behind the base address and that of free space or of an extension
    return int.from_bytes(head[end - width : end], "little") if width in (2, 4, 8) else None


def zip_of(source: Source, path: str) -> ZipDirectory:
    """The directory of a ``.keras`` file.

    Raises:
        FormatError: it is no zip.
    """
    nbytes = source.listing.nbytes(path)
    return read_directory(lambda offset, length: source.store.read(path, offset, length), nbytes, where=path)


@contextmanager
def opened(source: Source, path: str, start: int, nbytes: int) -> Iterator[Any]:
    """The file as ``h5py.File``; whatever the library raises becomes an error of this package.

    Raises:
        Unsupported: h5py is not installed.
        FormatError: the library cannot read it.
    """
    try:
        import h5py
    except ImportError as error:
        raise Unsupported("HDF5 files need the package h5py", where=path, hint="pip install 'ckpt-tool[h5]'") from error
    try:
        with h5py.File(_StoreFile(source, path, start, nbytes), "r") as file:
            yield file
    except CkptError:
        raise
    except (OSError, RuntimeError, ValueError, TypeError, LookupError, MemoryError, OverflowError) as error:
        raise FormatError(f"HDF5's library cannot read it: {str(error)[:200]}", where=path) from error


class _StoreFile(io.RawIOBase):
    """Bytes of a file in a store, read in blocks of 64 KiB that are kept."""

    def __init__(self, source: Source, path: str, start: int, nbytes: int) -> None:
        self._store = source.store
        self._path = path
        self._start = start
        self._nbytes = nbytes
        self._at = 0
        self._blocks: dict[int, bytes] = {}

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._nbytes}[whence]
        self._at = max(base + offset, 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        """Fill ``buffer`` as far as the file goes."""
        view = memoryview(buffer).cast("B")
        length = min(len(view), max(self._nbytes - self._at, 0))
        done = 0
        while done < length:
            number, inside = divmod(self._at + done, _BLOCK_NBYTES)
            piece = self._block(number)[inside : inside + length - done]
            view[done : done + len(piece)] = piece
            done += len(piece)
        self._at += length
        return length

    def _block(self, number: int) -> bytes:
        block = self._blocks.get(number)
        if block is None:
            first = number * _BLOCK_NBYTES
            block = self._store.read(self._path, self._start + first, min(_BLOCK_NBYTES, self._nbytes - first))
            if len(self._blocks) >= _MAX_BLOCKS:
                self._blocks.pop(next(iter(self._blocks)))
            self._blocks[number] = block
        return block
