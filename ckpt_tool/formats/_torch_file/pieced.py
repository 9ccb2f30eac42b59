"""A torch file whose storages are put together from several pieces of payload, with zeros between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ckpt_tool.checksum import crc32, crc32_combine
from ckpt_tool.formats._pickle.dump import dump_pickle
from ckpt_tool.formats._zip.layout import ZipLayout, torch_members
from ckpt_tool.formats.base import Segment
from ckpt_tool.records import dataclass

__all__ = ["PiecedFile", "PiecedStorage", "StoragePiece"]

_N_SMALL_MEMBERS = 4  # data.pkl, .format_version, .storage_alignment, byteorder stand before the storages


@dataclass(frozen=True, slots=True)
class StoragePiece:
    """Bytes of one box, in a storage."""

    row: int
    """Row of the request's boxes."""
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class PiecedStorage:
    """A storage: its pieces in order, or bytes that are known."""

    nbytes: int
    pieces: tuple[StoragePiece, ...] = ()
    data: bytes | None = None

    def crc32(self, crc32s: Sequence[int]) -> int:
        """The checksum of all of it, from that of each row's bytes."""
        if self.data is not None:
            return crc32(self.data)
        value, end = 0, 0
        for piece in self.pieces:
            value = _with_zeros(value, piece.offset - end)
            value = crc32_combine(value, int(crc32s[piece.row]), piece.nbytes)
            end = piece.offset + piece.nbytes
        return _with_zeros(value, self.nbytes - end)


@dataclass(frozen=True)
class PiecedFile:
    """One file's layout."""

    path: str
    zip: ZipLayout
    storages: tuple[PiecedStorage, ...]

    @classmethod
    def of(cls, path: str, value: Any, storages: Sequence[PiecedStorage]) -> PiecedFile:
        """The layout of ``value``, whose tensors (`written.fresh_tensor`) lie in ``storages``, numbered from 0 on.

        Raises:
            Unsupported: an object in ``value`` cannot be pickled.
        """
        members = torch_members(dump_pickle(value), [storage.nbytes for storage in storages])
        return cls(path, ZipLayout(members), tuple(storages))

    @property
    def starts(self) -> list[int]:
        """Where the payload of each storage starts."""
        return list(self.zip.payload_offsets[_N_SMALL_MEMBERS : _N_SMALL_MEMBERS + len(self.storages)])

    def places(self) -> Iterator[tuple[int, int]]:
        """Row and byte in the file of each piece."""
        for start, storage in zip(self.starts, self.storages, strict=True):
            for piece in storage.pieces:
                yield piece.row, start + piece.offset

    def heads(self) -> Iterator[Segment]:
        """Bytes that do not depend on payload, and storages that are known."""
        yield from (Segment(self.path, offset, data) for offset, data in self.zip.heads)
        for start, storage in zip(self.starts, self.storages, strict=True):
            if storage.data:
                yield Segment(self.path, start, storage.data)

    def tail(self, crc32s: Sequence[int]) -> Iterator[Segment]:
        """Descriptors and directory, given the CRC-32 of each row of the request's boxes."""
        own = [storage.crc32(crc32s) for storage in self.storages]
        return (Segment(self.path, offset, data) for offset, data in self.zip.tail(own))

    def tail_without_checksums(self) -> Iterator[Segment]:
        """The same with 0, which stands for "not recorded"; for targets that cannot go back."""
        return (Segment(self.path, offset, data) for offset, data in self.zip.tail([0] * len(self.storages)))


def _with_zeros(value: int, nbytes: int) -> int:
    """The checksum of bytes with zeros behind them."""
    return crc32_combine(value, crc32(bytes(nbytes)), nbytes) if nbytes else value
