"""Metadata of a DCP checkpoint as columns: which box of which tensor is in which item of which file.

An *item* is what one ``_StorageInfo`` points at: a torch.save zip, a zstd frame around one, or a tensor inside a
safetensors blob. Where in its item the payload begins is not known here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt_tool.errors import FormatError, Unsupported
from ckpt_tool.formats.dcp.metadata import MetadataFile, TensorItem
from ckpt_tool.manifest.model import Blob, FileEntry, FileRange, KeyPath
from ckpt_tool.manifest.sections import section_of
from ckpt_tool.manifest.tables import SECTIONS, ChunkFlag, ChunkTable, FileTable, IntArray, TensorTable, pad_shapes
from ckpt_tool.storage.urls import check_path

__all__ = ["Tables", "rank_of", "tabulate"]

_FILE_NAME = re.compile(r"__(\d{1,9})_(\d{1,9})\.distcp")
_ZSTD = re.compile(r"stream\.zstd/1(\.\d+)*")


@dataclass(frozen=True)
class Tables:
    """The columns of a manifest, and what they leave out."""

    tensors: TensorTable
    chunks: ChunkTable
    files: FileTable
    blobs: tuple[Blob, ...]
    empty: Mapping[int, int]
    """Chunks without elements, by rank; -1 for unknown. They are not in ``chunks``."""


def rank_of(path: str) -> int:
    """Rank that wrote a file, -1 where its name does not tell.

    >>> rank_of("__12_0.distcp"), rank_of("weights.distcp")
    (12, -1)
    """
    match = _FILE_NAME.fullmatch(path)
    return int(match[1]) if match else -1


def tabulate(metadata: Sequence[MetadataFile], nbytes_of: Mapping[str, int]) -> Tables:
    """The union of several metadata files as columns; boxes listed by more than one are replicas of each other.

    Args:
        metadata: one file, or one per rank (``use_collectives=False``).
        nbytes_of: size of each file that is there.

    Raises:
        FormatError: chunks and storage do not match, numbers are negative or outside the tensor, a path leaves the
            root, or two files disagree about a tensor; the message names the fqn.
    """
    files = _Files(nbytes_of)
    tensors = _union(metadata)
    rows = _Rows()
    for part in metadata:
        _add_chunks(part, tensors, rows, files)
    blobs = [blob for part in metadata for blob in _blobs(part, files, is_shared=len(metadata) == 1)]
    table = _tensor_table(tensors, metadata)
    chunks = rows.columns(table)
    ranks = np.array([rank_of(path) for path in files.sources], dtype=np.int32)
    chunks = chunks.replace(rank=ranks[chunks.file]) if len(ranks) else chunks
    is_empty = chunks.volume == 0
    empty = Counter(chunks.rank[is_empty].tolist())
    return Tables(
        tensors=table,
        chunks=chunks.take(np.flatnonzero(~is_empty)),
        files=FileTable(tuple(files.entries)),
        blobs=tuple(blobs),
        empty=dict(sorted(empty.items())),
    )


def _union(metadata: Sequence[MetadataFile]) -> dict[str, TensorItem]:
    """Tensors of all files, in the order in which they are first listed; chunks are those of the first listing."""
    union: dict[str, TensorItem] = {}
    for part in metadata:
        for fqn, item in part.tensors.items():
            known = union.setdefault(fqn, item)
            if known.shape != item.shape or known.dtype != item.dtype:
                raise FormatError(
                    f"{fqn!r} is {known.dtype.name}{list(known.shape)} in {metadata[0].path} "
                    f"and {item.dtype.name}{list(item.shape)} here",
                    where=part.path,
                )
    return union


def _tensor_table(tensors: Mapping[str, TensorItem], metadata: Sequence[MetadataFile]) -> TensorTable:
    keys: dict[str, KeyPath] = {}
    for part in metadata:
        keys.update(part.paths)
    fqns = tuple(tensors)
    paths = tuple(keys.get(fqn, (fqn,)) for fqn in fqns)
    code = {name: number for number, name in enumerate(SECTIONS)}
    shapes = [item.shape for item in tensors.values()]
    return TensorTable(
        fqns=fqns,
        dtypes=tuple(item.dtype for item in tensors.values()),
        shape=pad_shapes(shapes, max(map(len, shapes), default=0), 1),
        ndim=np.array([len(shape) for shape in shapes], dtype=np.int8),
        section=np.array([code[section_of(path, fqn)] for path, fqn in zip(paths, fqns, strict=True)], dtype=np.int8),
        paths=paths if any(path != (fqn,) for path, fqn in zip(paths, fqns, strict=True)) else None,
    )


class _Files:
    """File rows, made on first use."""

    def __init__(self, nbytes_of: Mapping[str, int]) -> None:
        self._nbytes_of = nbytes_of
        self._rows: dict[str, int] = {}
        self.entries: list[FileEntry] = []
        self.sources: list[str] = []
        """Real file behind each entry."""

    def row(self, path: str, fqn: str, where: str) -> int:
        """Row of a file named by a storage record, after its path was checked."""
        row = self._rows.get(path)
        if row is None:
            check_path(path, root=f"{where}: {fqn!r}")
            row = self._rows[path] = self._add(FileEntry(path, self._nbytes_of.get(path, -1)), path)
        return row

    def decoded_row(self, part: FileRange) -> int:
        """Row of the decoded content of a zstd frame; its size is not known before it is decoded."""
        return self._add(FileEntry(f"{part.path}@{part.offset}", -1, "zstd", part), part.path)

    def _add(self, entry: FileEntry, source: str) -> int:
        self.entries.append(entry)
        self.sources.append(source)
        return len(self.entries) - 1


@dataclass
class _Rows:
    """Chunk rows while they are collected; boxes are grouped by their number of dimensions."""

    tensor: list[int] = field(default_factory=list)
    file: list[int] = field(default_factory=list)
    offset: list[int] = field(default_factory=list)
    length: list[int] = field(default_factory=list)
    boxes: dict[int, tuple[list[int], list[Sequence[int]], list[Sequence[int]]]] = field(default_factory=dict)

    def columns(self, tensors: TensorTable) -> ChunkTable:
        """Unresolved chunks, their numbers checked against the tensors' shapes."""
        n, width = len(self.tensor), tensors.shape.shape[1]
        offsets, sizes = np.zeros((n, width), dtype=np.int64), np.ones((n, width), dtype=np.int64)
        tensor = np.array(self.tensor, dtype=np.int32)
        for ndim, (rows, some_offsets, some_sizes) in self.boxes.items():
            picked = np.array(rows)
            offsets[picked, :ndim] = _integers(some_offsets, picked, tensor, tensors, ndim)
            sizes[picked, :ndim] = _integers(some_sizes, picked, tensor, tensors, ndim)
        shape = tensors.shape[tensor]
        wrong = np.flatnonzero(((offsets < 0) | (sizes < 0) | (sizes > shape - offsets)).any(axis=1))
        if len(wrong):
            row = int(wrong[0])
            ndim = int(tensors.ndim[tensor[row]])
            raise FormatError(
                f"chunk at {offsets[row, :ndim].tolist()} of sizes {sizes[row, :ndim].tolist()} does not lie inside "
                f"the tensor's shape {shape[row, :ndim].tolist()} ({len(wrong):,} such chunks)",
                where=tensors.fqns[tensor[row]],
            )
        return ChunkTable.from_columns(
            tensor=tensor,
            offsets=offsets,
            sizes=sizes,
            file=self.file,
            offset=self.offset,
            length=self.length,
            flags=np.full(n, ChunkFlag.UNRESOLVED, dtype=np.uint8),
        )


def _integers(
    boxes: list[Sequence[int]], rows: npt.NDArray[Any], tensor: npt.NDArray[np.int32], tensors: TensorTable, ndim: int
) -> IntArray:
    """int64[n, ndim] of tuples that are to hold whole numbers."""
    array = np.array(boxes).reshape(len(boxes), -1) if ndim else np.zeros((len(boxes), 0), dtype=np.int64)
    if array.dtype.kind != "i":
        row = next(i for i, box in enumerate(boxes) if not all(type(n) is int and abs(n) < 2**62 for n in box))
        raise FormatError(f"box {boxes[row]!r} is not made of whole numbers", where=tensors.fqns[tensor[rows[row]]])
    return array.astype(np.int64)


def _add_chunks(part: MetadataFile, tensors: Mapping[str, TensorItem], rows: _Rows, files: _Files) -> None:
    """Append a row for each chunk that ``part`` lists."""
    storage = part.storage
    numbers = {fqn: number for number, fqn in enumerate(tensors)}
    used: set[tuple[str, Any]] = set()
    for fqn, item in part.tensors.items():
        number, ndim = numbers[fqn], len(item.shape)
        box_rows, box_offsets, box_sizes = rows.boxes.setdefault(ndim, ([], [], []))
        for offsets, sizes in item.chunks:
            key = (fqn, offsets)
            if key in used:  # empty chunks of several ranks begin at the same place and are stored once
                continue
            used.add(key)
            info = storage.get(key)
            if info is None:
                raise FormatError(
                    f"no storage is recorded for the chunk at {list(offsets)} of {fqn!r}", where=part.path
                )
            if len(offsets) != ndim or len(sizes) != ndim:
                raise FormatError(
                    f"chunk at {list(offsets)} of sizes {list(sizes)} in a tensor of shape {list(item.shape)}: "
                    f"expected {ndim} numbers each",
                    where=fqn,
                )
            box_rows.append(len(rows.tensor))
            box_offsets.append(offsets)
            box_sizes.append(sizes)
            rows.tensor.append(number)
            path, offset, length, transforms = info
            row = files.row(path, fqn, part.path)
            if transforms:
                _check_transforms(transforms, fqn, part.path)
                row = files.decoded_row(FileRange(files.entries[row].path, offset, length))
                offset = 0
            rows.file.append(row)
            rows.offset.append(offset)
            rows.length.append(length)
    listed = used | {(fqn, None) for fqn in part.blobs}
    if len(storage) != len(listed) or storage.keys() - listed:
        stray = next(iter(storage.keys() - listed), None) or next(iter(listed - storage.keys()))
        what = "an object" if stray[1] is None else f"a chunk at {list(stray[1])}"
        raise FormatError(f"storage and list disagree: {what} of {stray[0]!r} is in one of them only", where=part.path)


def _check_transforms(transforms: Sequence[object], fqn: str, where: str) -> None:
    """Nothing, when the only transform is zstd (torch/distributed/checkpoint/_extension.py, 2.13)."""
    if len(transforms) != 1 or not isinstance(transforms[0], str) or not _ZSTD.fullmatch(transforms[0]):
        raise Unsupported(
            f"{fqn!r} was stored through {list(transforms)}, expected ['stream.zstd/1']",
            where=where,
            hint="load it with the program that wrote it, and save it without that extension",
        )


def _blobs(part: MetadataFile, files: _Files, *, is_shared: bool) -> Iterable[Blob]:
    """Objects that ``part`` lists; with ``is_shared`` they belong to no rank."""
    for fqn in part.blobs:
        path, offset, length, transforms = part.storage[fqn, None]
        checked = files.entries[files.row(path, fqn, part.path)].path
        if transforms:
            _check_transforms(transforms, fqn, part.path)
        rank = rank_of(checked)
        yield Blob(
            fqn=fqn,
            kind="torch_save+zstd" if transforms else "torch_save",
            where=FileRange(checked, offset, length),
            path=part.paths.get(fqn, (fqn,)),
            rank=None if is_shared or rank < 0 else rank,
        )
