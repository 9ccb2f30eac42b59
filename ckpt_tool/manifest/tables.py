"""The columns of a manifest: tensors, chunks and files, aligned numpy arrays checked once and then immutable.

Boxes of tensors with fewer dimensions than the widest one are padded behind with offset 0 and size 1, which changes
neither their volume nor their byte order. ``n`` counts rows, ``D`` is the padded number of dimensions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from enum import IntFlag
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt_tool.dtypes import DType
from ckpt_tool.errors import FormatError
from ckpt_tool.geometry.box import Box
from ckpt_tool.geometry.runs import contiguous_strides
from ckpt_tool.manifest.model import Chunk, FileEntry, FileRange, KeyPath, TensorMeta
from ckpt_tool.records import dataclass

__all__ = [
    "SECTIONS",
    "ChunkFlag",
    "ChunkTable",
    "FileTable",
    "IntArray",
    "TensorTable",
    "pad_shapes",
]

IntArray = npt.NDArray[np.int64]
SECTIONS = ("model", "optimizer", "other")


class ChunkFlag(IntFlag):
    """What must be done to a chunk's bytes before they are the tensor's, and what is not known yet."""

    NONE = 0
    BIG_ENDIAN = 1
    """Reverse the bytes of each component."""
    CONJUGATE = 2
    """Negate the imaginary part (a lazy ``conj`` view was saved)."""
    NEGATE = 4
    """Negate the value (a lazy ``neg`` view was saved)."""
    UNRESOLVED = 8
    """``offset`` and ``length`` are those of the container item; the payload's place inside it is not known yet."""


def pad_shapes(shapes: Sequence[Sequence[int]], width: int, fill: int) -> IntArray:
    """``shapes`` as rows of ``int64[n, width]``, filled behind with ``fill``.

    >>> pad_shapes([(2, 3), ()], 2, 1).tolist()
    [[2, 3], [1, 1]]
    """
    padded = np.full((len(shapes), width), fill, dtype=np.int64)
    ndim = np.fromiter(map(len, shapes), dtype=np.int64, count=len(shapes))
    padded[np.arange(width) < ndim[:, None]] = np.fromiter(chain.from_iterable(shapes), dtype=np.int64)
    return padded


def _freeze(array: npt.NDArray[Any]) -> None:
    array.flags.writeable = False


_MAX_TENSOR_BITS = 2.0**62
"""Half an exabyte: below it no number of bits or bytes leaves int64."""


@dataclass(frozen=True, eq=False)
class TensorTable:
    """One row per tensor."""

    fqns: tuple[str, ...]
    dtypes: tuple[DType, ...]
    """One per tensor; records are shared, not copied."""
    shape: IntArray  # int64[n, D]
    """Global shapes, padded behind with 1."""
    ndim: npt.NDArray[np.int8]  # int8[n]
    section: npt.NDArray[np.int8]  # int8[n], index into SECTIONS
    paths: tuple[KeyPath, ...] | None = None
    """Nested keys per tensor, None when every path is ``(fqn,)``."""

    def __post_init__(self) -> None:
        """Check that the columns are aligned and names unique."""
        n = len(self.fqns)
        lengths = {n, len(self.dtypes), len(self.shape), len(self.ndim), len(self.section)}
        if len(lengths) != 1 or (self.paths is not None and len(self.paths) != n):
            raise FormatError(f"tensor columns differ in length: {sorted(lengths)}")
        if len(self.index) != n:
            seen: set[str] = set()
            twice = next(f for f in self.fqns if f in seen or seen.add(f))  # type: ignore[func-returns-value]
            raise FormatError(f"tensor {twice!r} is listed twice")
        too_large = np.prod(self.shape, axis=1, dtype=np.float64) * self.bits >= _MAX_TENSOR_BITS
        if too_large.any():
            row = int(np.flatnonzero(too_large)[0])
            raise FormatError(
                f"tensor {self.fqns[row]!r} of shape {list(self.shape_of(row))}, {self.dtypes[row].name}, is claimed, "
                "which is larger than any file"
            )
        for column in (self.shape, self.ndim, self.section):
            _freeze(column)

    @classmethod
    def from_records(cls, records: Iterable[TensorMeta]) -> TensorTable:
        """Columns of ``records``, in their order."""
        rows = list(records)
        width = max((len(r.shape) for r in rows), default=0)
        flat = all(r.path == (r.fqn,) for r in rows)
        return cls(
            fqns=tuple(r.fqn for r in rows),
            dtypes=tuple(r.dtype for r in rows),
            shape=pad_shapes([r.shape for r in rows], width, 1),
            ndim=np.array([len(r.shape) for r in rows], dtype=np.int8),
            section=np.array([SECTIONS.index(r.section) for r in rows], dtype=np.int8),
            paths=None if flat else tuple(r.path for r in rows),
        )

    def __len__(self) -> int:
        """Number of tensors."""
        return len(self.fqns)

    def __iter__(self) -> Iterator[TensorMeta]:
        """Records in row order."""
        paths = ((fqn,) for fqn in self.fqns) if self.paths is None else self.paths
        rows = zip(self.fqns, self.dtypes, self.shapes, self.section.tolist(), paths, strict=True)
        return (TensorMeta(fqn, dtype, shape, SECTIONS[at], path) for fqn, dtype, shape, at, path in rows)

    @cached_property
    def index(self) -> dict[str, int]:
        """Row of each fqn."""
        return {fqn: row for row, fqn in enumerate(self.fqns)}

    @cached_property
    def bits(self) -> IntArray:
        """int64[n]: width of one element in bits."""
        return np.array([d.bits for d in self.dtypes], dtype=np.int64)

    @cached_property
    def kinds(self) -> tuple[tuple[DType, ...], IntArray]:
        """The element types in use, in order of first sight, and int64[n]: which of them each tensor has."""
        numbers: dict[DType, int] = {}
        of_tensor = np.array([numbers.setdefault(d, len(numbers)) for d in self.dtypes], dtype=np.int64)
        return tuple(numbers), of_tensor

    @cached_property
    def numel(self) -> IntArray:
        """int64[n]: number of elements."""
        numel: IntArray = np.prod(self.shape, axis=1, dtype=np.int64)
        return numel

    @cached_property
    def nbytes(self) -> IntArray:
        """int64[n]: bytes of the packed elements."""
        return (self.numel * self.bits + 7) // 8

    @cached_property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Global shapes, without padding."""
        return tuple([tuple(row[:n]) for row, n in zip(self.shape.tolist(), self.ndim.tolist(), strict=True)])

    def shape_of(self, row: int) -> tuple[int, ...]:
        """Global shape of one tensor, without padding."""
        return tuple(self.shape[row, : self.ndim[row]].tolist())

    def record(self, row: int) -> TensorMeta:
        """One row as a record."""
        fqn = self.fqns[row]
        path = self.paths[row] if self.paths is not None else (fqn,)
        return TensorMeta(fqn, self.dtypes[row], self.shape_of(row), SECTIONS[self.section[row]], path)

    def take(self, rows: IntArray | Sequence[int]) -> TensorTable:
        """The rows named by ``rows``, in that order."""
        picked = np.asarray(rows, dtype=np.int64)
        width = int(self.ndim[picked].max()) if len(picked) else 0
        return TensorTable(
            fqns=tuple(self.fqns[i] for i in picked),
            dtypes=tuple(self.dtypes[i] for i in picked),
            shape=self.shape[picked, :width],
            ndim=self.ndim[picked],
            section=self.section[picked],
            paths=None if self.paths is None else tuple(self.paths[i] for i in picked),
        )


@dataclass(frozen=True, eq=False)
class ChunkTable:
    """One row per stored box; replicas of a box are rows of their own."""

    tensor: npt.NDArray[np.int32]  # int32[n], row of TensorTable
    offsets: IntArray  # int64[n, D], global coordinates
    sizes: IntArray  # int64[n, D]
    file: npt.NDArray[np.int32]  # int32[n], row of FileTable
    offset: IntArray  # int64[n], byte of the box's first element (lowest address for odd strides)
    length: IntArray  # int64[n], bytes from there to the end of the last element
    rank: npt.NDArray[np.int32]  # int32[n], -1 where unknown
    flags: npt.NDArray[np.uint8]  # uint8[n], ChunkFlag bits
    strides: IntArray | None = None  # int64[n, D] in elements, None when every chunk is packed row-major

    def __post_init__(self) -> None:
        """Check that the columns are aligned."""
        columns: list[npt.NDArray[Any]] = [self.tensor, self.offsets, self.sizes, self.file, self.offset, self.length]
        columns += [self.rank, self.flags]
        if self.strides is not None:
            columns.append(self.strides)
        if len({len(c) for c in columns}) != 1:
            raise FormatError(f"chunk columns differ in length: {[len(c) for c in columns]}")
        for column in columns:
            _freeze(column)

    @classmethod
    def from_columns(  # noqa: PLR0913 - the columns are what a table is
        cls,
        *,
        tensor: npt.ArrayLike,
        offsets: npt.ArrayLike,
        sizes: npt.ArrayLike,
        file: npt.ArrayLike,
        offset: npt.ArrayLike,
        length: npt.ArrayLike,
        rank: npt.ArrayLike | None = None,
        flags: npt.ArrayLike | None = None,
        strides: npt.ArrayLike | None = None,
    ) -> ChunkTable:
        """A table from anything array-like; ``rank`` defaults to unknown, ``flags`` to none."""
        tensor_column = np.array(tensor, dtype=np.int32)
        n = len(tensor_column)
        return cls(
            tensor=tensor_column,
            offsets=np.array(offsets, dtype=np.int64).reshape(n, -1 if n else 0),
            sizes=np.array(sizes, dtype=np.int64).reshape(n, -1 if n else 0),
            file=np.array(file, dtype=np.int32),
            offset=np.array(offset, dtype=np.int64),
            length=np.array(length, dtype=np.int64),
            rank=np.full(n, -1, dtype=np.int32) if rank is None else np.array(rank, dtype=np.int32),
            flags=np.zeros(n, dtype=np.uint8) if flags is None else np.array(flags, dtype=np.uint8),
            strides=None if strides is None else np.array(strides, dtype=np.int64).reshape(n, -1 if n else 0),
        )

    @classmethod
    def from_records(cls, records: Iterable[Chunk], tensors: TensorTable, files: FileTable) -> ChunkTable:
        """Columns of ``records``, in their order; fqns and paths are looked up in ``tensors`` and ``files``."""
        rows = list(records)
        width = tensors.shape.shape[1]
        strides = None
        if any(r.strides is not None for r in rows):
            strides = pad_shapes([r.strides or contiguous_strides(r.box.sizes) for r in rows], width, 1)
        return cls.from_columns(
            tensor=[tensors.index[r.fqn] for r in rows],
            offsets=pad_shapes([r.box.offsets for r in rows], width, 0),
            sizes=pad_shapes([r.box.sizes for r in rows], width, 1),
            file=[files.index[r.where.path] for r in rows],
            offset=[r.where.offset for r in rows],
            length=[r.where.length for r in rows],
            rank=[-1 if r.rank is None else r.rank for r in rows],
            flags=[r.flags for r in rows],
            strides=strides,
        )

    def __len__(self) -> int:
        """Number of chunks."""
        return len(self.tensor)

    @cached_property
    def volume(self) -> IntArray:
        """int64[n]: number of elements in each box."""
        volume: IntArray = np.prod(self.sizes, axis=1, dtype=np.int64)
        return volume

    @cached_property
    def by_tensor(self) -> tuple[IntArray, IntArray]:
        """``(order, starts)``: rows grouped by tensor, those of tensor ``t`` are ``order[starts[t]:starts[t + 1]]``."""
        order = np.argsort(self.tensor, kind="stable")
        n_tensors = int(self.tensor.max()) + 1 if len(self) else 0
        starts = np.searchsorted(self.tensor[order], np.arange(n_tensors + 1))
        return order.astype(np.int64), starts.astype(np.int64)

    def rows_of(self, tensor: int) -> IntArray:
        """int64[m]: rows of one tensor, in table order."""
        order, starts = self.by_tensor
        return order[starts[tensor] : starts[tensor + 1]] if tensor + 1 < len(starts) else order[:0]

    def box(self, row: int, ndim: int) -> Box:
        """Box of one row, without padding."""
        return Box(tuple(self.offsets[row, :ndim].tolist()), tuple(self.sizes[row, :ndim].tolist()))

    def record(self, row: int, tensors: TensorTable, files: FileTable) -> Chunk:
        """One row as a record."""
        tensor = int(self.tensor[row])
        ndim = int(tensors.ndim[tensor])
        strides = None
        if self.strides is not None:
            found = tuple(self.strides[row, :ndim].tolist())
            strides = None if found == contiguous_strides(tuple(self.sizes[row, :ndim].tolist())) else found
        return Chunk(
            fqn=tensors.fqns[tensor],
            box=self.box(row, ndim),
            where=FileRange(files.paths[self.file[row]], int(self.offset[row]), int(self.length[row])),
            strides=strides,
            flags=int(self.flags[row]),
            rank=None if self.rank[row] < 0 else int(self.rank[row]),
        )

    def take(self, rows: npt.ArrayLike) -> ChunkTable:
        """The rows named by ``rows``, in that order."""
        picked = np.asarray(rows, dtype=np.int64)
        return ChunkTable(
            tensor=self.tensor[picked],
            offsets=self.offsets[picked],
            sizes=self.sizes[picked],
            file=self.file[picked],
            offset=self.offset[picked],
            length=self.length[picked],
            rank=self.rank[picked],
            flags=self.flags[picked],
            strides=None if self.strides is None else self.strides[picked],
        )

    def replace(self, **columns: Any) -> ChunkTable:
        """A copy with some columns changed."""
        return replace(self, **columns)


@dataclass(frozen=True, eq=False)
class FileTable:
    """One row per file that chunks or blobs lie in."""

    entries: tuple[FileEntry, ...] = ()

    def __len__(self) -> int:
        """Number of files."""
        return len(self.entries)

    def __iter__(self) -> Iterator[FileEntry]:
        """Records in row order."""
        return iter(self.entries)

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Path of each row."""
        return tuple(e.path for e in self.entries)

    @cached_property
    def index(self) -> dict[str, int]:
        """Row of each path."""
        return {path: row for row, path in enumerate(self.paths)}

    @cached_property
    def n_stored(self) -> int:
        """Number of files on the storage: coded parts of one file count once."""
        return len({e.path if e.part is None else e.part.path for e in self.entries})

    @cached_property
    def nbytes(self) -> IntArray:
        """int64[n]: size of each file, -1 where unknown."""
        return np.array([e.nbytes for e in self.entries], dtype=np.int64)
