"""Rows collect pieces of tensors, file by file, into the columns of a manifest.

They know where a storage lies and how a tensor lies in its storage; which pieces make a tensor is told to them.
"""

from __future__ import annotations

from ckpt_tool.dtypes import DType
from ckpt_tool.errors import FormatError
from ckpt_tool.formats._torch_file.placed import Piece
from ckpt_tool.geometry.runs import contiguous_strides
from ckpt_tool.manifest.model import FileEntry, KeyPath, TensorMeta
from ckpt_tool.manifest.tables import ChunkFlag, ChunkTable, FileTable, TensorTable, pad_shapes
from ckpt_tool.records import dataclass, field

__all__ = ["Rows", "StoragePlace"]


@dataclass(frozen=True, slots=True)
class StoragePlace:
    """Where the bytes of one storage are."""

    key: str
    file: FileEntry
    """The file itself, or the decoded content of a compressed member."""
    offset: int
    """Byte in ``file`` of the storage's first element."""
    nbytes: int
    crc32: int | None = None
    """As the archive records it, None where it does not."""
    is_exact: bool = True
    """False when ``offset`` is reckoned from its neighbours, and its own header was not read."""


@dataclass(slots=True)
class Rows:
    """Columns under construction; ids are rows of the tables that `tables` returns."""

    metas: list[TensorMeta] = field(default_factory=list)
    index: dict[str, int] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    entries: list[FileEntry] = field(default_factory=list)
    _chunks: list[tuple[int, Piece, int, int, int, int, int, tuple[int, ...] | None]] = field(default_factory=list)

    def add_tensor(self, fqn: str, dtype: DType, shape: tuple[int, ...], section: str, path: KeyPath) -> int:
        """Id of a tensor, new or known.

        Raises:
            FormatError: it is known with another dtype or shape.
        """
        known = self.index.get(fqn)
        if known is not None:
            meta = self.metas[known]
            if (meta.dtype, meta.shape) != (dtype, shape):
                raise FormatError(
                    f"{dtype.name}{list(shape)} here, {meta.dtype.name}{list(meta.shape)} in another file", where=fqn
                )
            return known
        self.metas.append(TensorMeta(fqn, dtype, shape, section, path))
        self.index[fqn] = len(self.metas) - 1
        return len(self.metas) - 1

    def add_file(self, entry: FileEntry) -> int:
        """Id of a file, new or known by its path."""
        row = self.files.setdefault(entry.path, len(self.entries))
        if row == len(self.entries):
            self.entries.append(entry)
        return row

    def add_piece(self, tensor: int, piece: Piece, place: StoragePlace, *, rank: int | None, big_endian: bool) -> None:
        """A chunk for one piece that is not empty.

        Raises:
            FormatError: the piece ends beyond its storage.
        """
        source, box = piece.tensor, piece.local
        width = source.dtype.itemsize
        steps = list(zip(box.offsets, box.sizes, source.strides, strict=True))
        first = source.offset + sum(offset * stride for offset, _, stride in steps)
        span = 1 + sum((size - 1) * stride for _, size, stride in steps)
        if (first + span) * width > place.nbytes:
            raise FormatError(
                f"elements end at byte {(first + span) * width:,} of storage {place.key!r}, which has {place.nbytes:,}",
                where=f"{place.file.path}: {self.metas[tensor].fqn}",
            )
        packed = contiguous_strides(box.sizes)
        strides = tuple(p if size == 1 else s for p, (_, size, s) in zip(packed, steps, strict=True))
        flags = ChunkFlag.NONE if place.is_exact else ChunkFlag.UNRESOLVED
        if big_endian and source.dtype.component_bytes > 1:
            flags |= ChunkFlag.BIG_ENDIAN
        flags |= ChunkFlag.CONJUGATE if source.conj else 0
        flags |= ChunkFlag.NEGATE if source.neg else 0
        self._chunks.append(
            (
                tensor,
                piece,
                self.add_file(place.file),
                place.offset + first * width,
                span * width,
                -1 if rank is None else rank,
                int(flags),
                None if strides == packed else strides,
            )
        )

    def tables(self) -> tuple[TensorTable, ChunkTable, FileTable]:
        """The finished columns."""
        tensors = TensorTable.from_records(self.metas)
        width = tensors.shape.shape[1]
        boxes = [chunk[1].box for chunk in self._chunks]
        strides = None
        if any(chunk[7] is not None for chunk in self._chunks):
            found = [chunk[7] or contiguous_strides(box.sizes) for chunk, box in zip(self._chunks, boxes, strict=True)]
            strides = pad_shapes(found, width, 1)
        chunks = ChunkTable.from_columns(
            tensor=[chunk[0] for chunk in self._chunks],
            offsets=pad_shapes([box.offsets for box in boxes], width, 0),
            sizes=pad_shapes([box.sizes for box in boxes], width, 1),
            file=[chunk[2] for chunk in self._chunks],
            offset=[chunk[3] for chunk in self._chunks],
            length=[chunk[4] for chunk in self._chunks],
            rank=[chunk[5] for chunk in self._chunks],
            flags=[chunk[6] for chunk in self._chunks],
            strides=strides,
        )
        return tensors, chunks, FileTable(tuple(self.entries))
