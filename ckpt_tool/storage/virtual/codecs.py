"""A codec is how the content of a stored part is coded: one step, or several joined by ``|``, the outermost first.

``deflate`` (raw), ``zlib``, ``gzip`` and ``zstd`` unpack; ``slice:OFFSET:LENGTH`` takes bytes out of what came before;
``shuffle:WIDTH`` puts elements together of which first bytes stand first, then second ones (HDF5's filter);
``latin1`` is bytes as text in UTF-8, a character each (pickles up to protocol 2);
``blosc`` is Blosc's container, ``lz4`` a block of LZ4 behind its length (numcodecs' form), ``bz2`` and ``xz`` streams;
``zeros:LENGTH`` is content that is stored nowhere because all of it is zero. Knows no container and no store.
"""

from __future__ import annotations

import codecs
import io
import re
import zlib
from collections.abc import Iterable, Iterator
from typing import Protocol

from ckpt_tool.errors import CkptError, FormatError, Unsupported
from ckpt_tool.sizes import counted

__all__ = ["BLOCK_BYTES", "Readable", "check_codec", "content_blocks", "deflated_limit", "split_slice"]

BLOCK_BYTES = 1 << 20
"""Most bytes of a block."""
MAX_DEFLATE_RATIO = 1032
"""One length-distance pair of at least 2 bits yields 258 bytes at most (RFC 1951, 3.2.5)."""
MAX_LZ4_RATIO = 256
"""A byte of a match's length stands for 255 bytes at most."""

_MAX_WHOLE_BYTES = 1 << 30
"""Of content that can only be decoded at once."""
_STEP = (
    r"deflate|zlib|gzip|zstd|blosc|lz4|bz2|xz|latin1|slice:[0-9]{1,18}:[0-9]{1,18}|zeros:[0-9]{1,18}|shuffle:[0-9]{1,4}"
)
_DEFLATED = r"deflate|zlib|gzip"

_WINDOW_BITS = {"deflate": -zlib.MAX_WBITS, "zlib": zlib.MAX_WBITS, "gzip": zlib.MAX_WBITS | 16}


class Readable(Protocol):
    """Bytes from front to back."""

    def read(self, size: int = -1, /) -> bytes:
        """At most ``size`` bytes; none only at the end."""
        ...


def check_codec(codec: str | None, where: str) -> None:
    """Nothing, when ``codec`` is known.

    Raises:
        Unsupported: it is not.
    """
    if codec is None or not all(re.fullmatch(_STEP, step) for step in codec.split("|")):
        raise Unsupported(f"compressed with {codec}, expected deflate or zstd", where=where)


def deflated_limit(codec: str, nbytes: int) -> int | None:
    """Most bytes that a part of ``nbytes`` can become, None where the codec sets no limit."""
    return max(nbytes, 1) * MAX_DEFLATE_RATIO if re.fullmatch(_DEFLATED, codec) else None


def split_slice(codec: str) -> tuple[str, str]:
    """The steps before the first slice, and those from it on; the first are empty where there is none.

    >>> split_slice("zstd|slice:8:4|zstd"), split_slice("zstd")
    (('zstd', 'slice:8:4|zstd'), ('', 'zstd'))
    """
    before, found, rest = codec.partition("|slice:")
    return (before, f"slice:{rest}") if found else ("", codec)


def content_blocks(source: Readable, codec: str, where: str) -> Iterator[bytes]:
    """The content of ``source``, block by block; it is read as blocks are asked for.

    Raises:
        FormatError: it is not one whole stream of that codec.
        Unsupported: an unknown codec.
    """
    check_codec(codec, where)
    *outer, last = codec.split("|")
    for step in outer:
        source = io.BufferedReader(_BlockFile(_step_blocks(source, step, where)), BLOCK_BYTES)
    return _step_blocks(source, last, where)


def _step_blocks(source: Readable, step: str, where: str) -> Iterator[bytes]:
    name, *numbers = step.split(":")
    if name == "zeros":
        return _zeros(int(numbers[0]))
    if name == "slice":
        return _slice(source, int(numbers[0]), int(numbers[1]), where)
    if name == "shuffle":
        return _unshuffled(source, int(numbers[0]), where)
    if name == "latin1":
        return _latin1(source, where)
    if name == "blosc":
        from ckpt_tool.storage.virtual.blosc import blosc_blocks  # numpy and pyarrow, for such files only

        return blosc_blocks(_whole(source, where), where)
    if name == "lz4":
        return _lz4(source, where)
    if name in ("bz2", "xz"):
        return _streamed(source, name, where)
    if name == "zstd":
        return _unpacked_zstd(source, where)
    return _deflated(source, _WINDOW_BITS[name], where)


class _BlockFile(io.RawIOBase):
    """Blocks as a stream."""

    def __init__(self, blocks: Iterable[bytes]) -> None:
        self._blocks = iter(blocks)
        self._block = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview, /) -> int:  # type: ignore[override]
        """Fill ``buffer`` as far as the block at hand goes; 0 only at the end."""
        while not self._block:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._block = memoryview(block)
        n = min(len(buffer), len(self._block))
        buffer[:n] = self._block[:n]
        self._block = self._block[n:]
        return n


def _zeros(nbytes: int) -> Iterator[bytes]:
    whole = bytes(min(nbytes, BLOCK_BYTES))
    for start in range(0, nbytes, BLOCK_BYTES):
        yield whole[: nbytes - start]


def _slice(source: Readable, offset: int, length: int, where: str) -> Iterator[bytes]:
    for is_wanted, left in ((False, offset), (True, length)):
        remaining = left
        while remaining:
            piece = source.read(min(remaining, BLOCK_BYTES))
            if not piece:
                raise FormatError(f"ends before byte {offset + length:,} of its content", where=where)
            remaining -= len(piece)
            if is_wanted:
                yield piece


def _whole(source: Readable, where: str) -> bytes:
    """All content, where its first element needs bytes from all over it."""
    content = bytearray()
    while piece := source.read(BLOCK_BYTES):
        content += piece
        if len(content) > _MAX_WHOLE_BYTES:
            raise FormatError(
                f"content of more than {counted(_MAX_WHOLE_BYTES, 'byte')} that is coded as one", where=where
            )
    return bytes(content)


def _unshuffled(source: Readable, width: int, where: str) -> Iterator[bytes]:
    from ckpt_tool.storage.virtual.blosc import byte_unshuffled  # numpy, for such files only

    yield byte_unshuffled(_whole(source, where), max(width, 1))


def _lz4(source: Readable, where: str) -> Iterator[bytes]:
    from ckpt_tool.storage.virtual.blosc import unpacked_block  # numpy, for such files only

    content = _whole(source, where)
    nbytes = int.from_bytes(content[:4], "little")
    if len(content) < 4 or nbytes > min(_MAX_WHOLE_BYTES, len(content) * MAX_LZ4_RATIO):
        raise FormatError(f"{counted(len(content), 'byte')} of LZ4 that say they hold {nbytes:,}", where=where)
    yield unpacked_block(content[4:], "lz4_raw", nbytes, where)


def _latin1(source: Readable, where: str) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        while piece := source.read(BLOCK_BYTES):
            yield decoder.decode(piece).encode("latin-1")
        decoder.decode(b"", final=True)
    except UnicodeError as error:
        raise FormatError(f"not bytes that stand as text: {error}", where=where) from error


def _streamed(source: Readable, name: str, where: str) -> Iterator[bytes]:
    """Decoded blocks of one stream of bz2 or xz, which must end where its part does."""
    import bz2  # rare codecs of the standard library
    import lzma

    decoder = bz2.BZ2Decompressor() if name == "bz2" else lzma.LZMADecompressor()
    try:
        while not decoder.eof:
            piece = source.read(BLOCK_BYTES) if decoder.needs_input else b""
            if decoder.needs_input and not piece:
                raise FormatError(f"the {name} stream does not end within its part", where=where)
            yield decoder.decompress(piece, BLOCK_BYTES)
    except (OSError, EOFError, ValueError, lzma.LZMAError) as error:
        if isinstance(error, CkptError):
            raise
        raise FormatError(f"not a stream of {name}: {error}", where=where) from error
    if decoder.unused_data or source.read(1):
        raise FormatError(f"the {name} stream ends before its part does", where=where)


def _deflated(source: Readable, window_bits: int, where: str) -> Iterator[bytes]:
    """Decoded blocks of a deflate stream, which must end where its part does."""
    decoder = zlib.decompressobj(window_bits)
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


def _unpacked_zstd(source: Readable, where: str) -> Iterator[bytes]:
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
