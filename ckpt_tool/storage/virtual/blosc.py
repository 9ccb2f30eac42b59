"""Blosc's container (format version 2, of c-blosc 1): a header, where each block starts, and the blocks' streams.

Source: c-blosc's ``README_CHUNK_FORMAT.rst`` (1.21). A block is shuffled by itself, and compressed in one stream, or in
one for each byte of an element.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

import numpy as np

from ckpt_tool.errors import FormatError, Unsupported
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted
from ckpt_tool.storage.virtual.blosclz import unpacked_blosclz

__all__ = ["bit_unshuffled", "blosc_blocks", "byte_unshuffled", "unpacked_block"]

_HEADER = struct.Struct("<BBBBiii")  # version, version of the codec, flags, width, bytes, bytes of a block, coded bytes
_VERSION = 2
_BYTE_SHUFFLE, _STORED, _BIT_SHUFFLE, _ONE_STREAM = 1, 2, 4, 16
_CODECS = ("blosclz", "lz4_raw", "snappy", "zlib", "zstd")
_MAX_STREAMS = 16
_MIN_STREAM_ELEMENTS = 128
_MAX_BLOCK_NBYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class _Header:
    flags: int
    width: int
    nbytes: int
    block_nbytes: int

    @property
    def codec(self) -> str:
        return _CODECS[self.flags >> 5]

    def n_streams(self, nbytes: int) -> int:
        """Streams of a block of ``nbytes``: the last one, where it is shorter, has one."""
        is_whole = nbytes == self.block_nbytes and not self.flags & _ONE_STREAM
        is_wide = self.width <= _MAX_STREAMS and self.block_nbytes >= _MIN_STREAM_ELEMENTS * self.width
        return self.width if is_whole and is_wide else 1


def blosc_blocks(content: bytes, where: str) -> Iterator[bytes]:
    """What a container holds, block by block.

    Raises:
        FormatError: it is damaged, or not all of it is here.
        Unsupported: its compression is not known.
    """
    header = _header(content, where)
    if header.flags & _STORED:
        if len(content) != _HEADER.size + header.nbytes:
            raise FormatError(
                f"{counted(header.nbytes, 'byte')} stored in a Blosc container of {len(content):,}", where=where
            )
        yield content[_HEADER.size :]
        return
    n_blocks = -(-header.nbytes // header.block_nbytes) if header.nbytes else 0
    index = content[_HEADER.size : _HEADER.size + 4 * n_blocks]
    if len(index) != 4 * n_blocks:
        raise FormatError(f"a Blosc container of {counted(len(content), 'byte')} ends within its index", where=where)
    for number, start in enumerate(struct.unpack(f"<{n_blocks}i", index)):
        nbytes = min(header.block_nbytes, header.nbytes - number * header.block_nbytes)
        yield _unshuffled(header, _block(header, content, start, nbytes, where))


def _header(content: bytes, where: str) -> _Header:
    if len(content) < _HEADER.size:
        raise FormatError(f"{counted(len(content), 'byte')}, expected a Blosc container", where=where)
    version, _, flags, width, nbytes, block_nbytes, coded_nbytes = _HEADER.unpack_from(content)
    if version != _VERSION or flags >> 5 >= len(_CODECS):
        raise Unsupported(f"Blosc's format version {version}, codec {flags >> 5}; expected version 2", where=where)
    is_sound = nbytes >= 0 and 0 < block_nbytes <= max(nbytes, 1) and coded_nbytes == len(content)
    if (nbytes and not is_sound) or not width or min(block_nbytes, nbytes) > _MAX_BLOCK_NBYTES:
        raise FormatError(
            f"a Blosc header of {counted(nbytes, 'byte')} in blocks of {block_nbytes:,}, {coded_nbytes:,} coded: "
            f"there are {len(content):,}",
            where=where,
        )
    return _Header(flags, width, nbytes, block_nbytes)


def _block(header: _Header, content: bytes, start: int, nbytes: int, where: str) -> bytes:
    """One block, still shuffled."""
    n_streams = header.n_streams(nbytes)
    wanted = nbytes // n_streams
    parts = []
    for _ in range(n_streams):
        length = struct.unpack_from("<i", content, start)[0] if 0 <= start <= len(content) - 4 else -1
        end = start + 4 + length
        if length < 0 or end > len(content) or length > wanted:
            raise FormatError(f"a block of a Blosc container lies at {start:,}+{length:,}", where=where)
        stream = content[start + 4 : end]
        parts.append(stream if length == wanted else unpacked_block(stream, header.codec, wanted, where))
        start = end
    return b"".join(parts)


def unpacked_block(stream: bytes, codec: str, nbytes: int, where: str) -> bytes:
    """The ``nbytes`` bytes that a block of ``blosclz``, ``lz4_raw``, ``snappy``, ``zlib`` or ``zstd`` holds.

    Raises:
        FormatError: it does not hold them.
    """
    if codec == "blosclz":
        return unpacked_blosclz(stream, nbytes, where)
    import pyarrow as pa  # 90 ms of start-up that only such files need

    try:
        if codec == "zlib":
            decoder = zlib.decompressobj()
            found = decoder.decompress(stream, nbytes + 1)
        else:
            found = pa.Codec(codec).decompress(stream, nbytes, asbytes=True)
    except (OSError, ValueError, zlib.error, pa.ArrowException) as error:
        raise FormatError(f"not a block of {codec}: {str(error)[:200]}", where=where) from error
    if len(found) != nbytes:
        raise FormatError(f"a block of {codec} holds {counted(len(found), 'byte')}, expected {nbytes:,}", where=where)
    return found


def _unshuffled(header: _Header, block: bytes) -> bytes:
    if header.flags & _BYTE_SHUFFLE and header.width > 1:
        return byte_unshuffled(block, header.width)
    if header.flags & _BIT_SHUFFLE and len(block) >= header.width:
        return bit_unshuffled(block, header.width)
    return block


def byte_unshuffled(content: bytes, width: int) -> bytes:
    """Elements of ``width`` bytes, of which first bytes stand first, then second ones; what is over stays behind.

    >>> byte_unshuffled(b"acebdfx", 2)
    b'abcdefx'
    """
    n = len(content) // width
    planes = np.frombuffer(content, dtype=np.uint8, count=n * width).reshape(width, n)
    return planes.T.tobytes() + content[n * width :]


def bit_unshuffled(content: bytes, width: int) -> bytes:
    """Elements of ``width`` bytes, of which first bits stand first; only full groups of 8 elements are shuffled."""
    n = len(content) // width
    if n % 8:
        return content
    bits = np.unpackbits(np.frombuffer(content, dtype=np.uint8, count=n * width), bitorder="little")
    elements = np.packbits(bits.reshape(width * 8, n).T, axis=None, bitorder="little")
    return elements.tobytes() + content[n * width :]
