"""Metadata of a DCP checkpoint as columns: which box of which tensor is in which item of which file.

An *item* is what one ``_StorageInfo`` points at: a torch.save zip, a zstd frame around one, or a tensor inside a
safetensors blob. Where in its item the payload begins is not known here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import NoReturn

import numpy as np

from ckpt_tool.errors import FormatError, Unsupported
from ckpt_tool.formats._dcp.metadata import MetadataFile, TensorItem
from ckpt_tool.manifest.items import ItemTable
from ckpt_tool.manifest.model import Blob, FileEntry, FileRange, KeyPath
from ckpt_tool.manifest.sections import section_of
from ckpt_tool.manifest.tables import SECTIONS, ChunkFlag, ChunkTable, FileTable, IntArray, TensorTable, pad_shapes
from ckpt_tool.records import dataclass, field
from ckpt_tool.sizes import counted
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
    items: ItemTable
    """Their items, which are stored as any other. Nothing but items lies in the files."""


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
    numbers = {fqn: number for number, fqn in enumerate(tensors)}
    for part in metadata:
        _add_chunks(part, numbers, rows, files)
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
        items=ItemTable.of_full(len(files.entries)).with_chunks(chunks.take(np.flatnonzero(is_empty))),
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
    """Chunk rows while they are collected, in parts that are aligned row by row."""

    counts: list[tuple[int, int]] = field(default_factory=list)
    """Tensor row and number of chunks, in the order of rows."""
    offsets: list[tuple[int, ...]] = field(default_factory=list)
    sizes: list[tuple[int, ...]] = field(default_factory=list)
    file: list[IntArray] = field(default_factory=list)
    offset: list[IntArray] = field(default_factory=list)
    length: list[IntArray] = field(default_factory=list)

    def columns(self, tensors: TensorTable) -> ChunkTable:
        """Unresolved chunks, their numbers checked against the tensors' shapes."""
        tensor = np.repeat(*np.array(self.counts, dtype=np.int64).reshape(-1, 2).T)
        offsets = _padded(self.offsets, tensor, tensors, fill=0)
        sizes = _padded(self.sizes, tensor, tensors, fill=1)
        shape = tensors.shape[tensor]
        wrong = np.flatnonzero(((offsets < 0) | (sizes < 0) | (sizes > shape - offsets)).any(axis=1))
        if len(wrong):
            row = int(wrong[0])
            raise FormatError(
                f"chunk at {list(self.offsets[row])} of sizes {list(self.sizes[row])} does not lie inside the tensor's "
                f"shape {list(tensors.shape_of(int(tensor[row])))} ({counted(len(wrong), 'such chunk')})",
                where=tensors.fqns[tensor[row]],
            )
        none = np.zeros(0, dtype=np.int64)
        return ChunkTable.from_columns(
            tensor=tensor,
            offsets=offsets,
            sizes=sizes,
            file=np.concatenate([none, *self.file]),
            offset=np.concatenate([none, *self.offset]),
            length=np.concatenate([none, *self.length]),
            flags=np.full(len(tensor), ChunkFlag.UNRESOLVED, dtype=np.uint8),
        )


def _padded(boxes: list[tuple[int, ...]], tensor: IntArray, tensors: TensorTable, *, fill: int) -> IntArray:
    """int64[n, D] of tuples that are to hold one whole number per dimension of their tensor."""
    n, width = len(boxes), tensors.shape.shape[1]
    ndim = tensors.ndim[tensor].astype(np.int64)
    lengths = np.fromiter(map(len, boxes), dtype=np.int64, count=n)
    wrong = np.flatnonzero(lengths != ndim)
    if len(wrong):
        row = int(wrong[0])
        raise FormatError(
            f"chunk with offsets or sizes {list(boxes[row])}, expected {ndim[row]} of each",
            where=tensors.fqns[tensor[row]],
        )
    padded = np.full((n, width), fill, dtype=np.int64)
    try:
        numbers = np.fromiter(chain.from_iterable(boxes), dtype=np.int64, count=int(ndim.sum()))
    except OverflowError as error:
        raise FormatError("a chunk has offsets or sizes beyond 64 bits") from error
    padded[np.arange(width) < ndim[:, None]] = numbers
    return padded


def _add_chunks(part: MetadataFile, numbers: Mapping[str, int], rows: _Rows, files: _Files) -> None:
    """Append a row for each chunk that ``part`` lists."""
    row_of = part.storage.row
    n_objects = sum((fqn, None) in row_of for fqn in part.blobs)
    stored: list[int | None] = []
    fqns: list[str] = []
    for fqn, item in part.tensors.items():
        # Empty chunks of several ranks begin at the same place and are stored once.
        chunks = dict(item.chunks)
        rows.counts.append((numbers[fqn], len(chunks)))
        rows.offsets += chunks
        rows.sizes += chunks.values()
        fqns.append(fqn)
        stored += map(row_of.get, zip(repeat(fqn), chunks))
    if None in stored:
        _raise_absent(part, stored.index(None))
    if n_objects + len(stored) != len(row_of) or n_objects != len(part.blobs):
        _raise_stray(part)
    of_storage = np.array(stored, dtype=np.int64)
    counts = np.array([n for _, n in rows.counts[len(rows.counts) - len(fqns) :]], dtype=np.int64)
    file, offset = _placed(part, of_storage, np.repeat(np.arange(len(fqns)), counts), fqns, files)
    rows.file.append(file)
    rows.offset.append(offset)
    rows.length.append(part.storage.length[of_storage])


def _raise_absent(part: MetadataFile, number: int) -> NoReturn:
    """Name the chunk of this number, which is not stored."""
    listed = [(fqn, offsets) for fqn, item in part.tensors.items() for offsets in dict(item.chunks)]
    fqn, offsets = listed[number]
    raise FormatError(f"no storage is recorded for the chunk at {list(offsets)} of {fqn!r}", where=part.path)


def _raise_stray(part: MetadataFile) -> NoReturn:
    """Name what is listed but not stored, or stored but not listed."""
    listed: set[tuple[str, tuple[int, ...] | None]] = {(fqn, None) for fqn in part.blobs}
    listed.update((fqn, offsets) for fqn, item in part.tensors.items() for offsets, _ in item.chunks)
    fqn, offsets = min(listed ^ part.storage.row.keys(), key=repr)
    what = "the object" if offsets is None else f"a chunk at {list(offsets)} of"
    side = "listed, but not stored" if (fqn, offsets) in listed else "stored, but not listed"
    raise FormatError(f"{what} {fqn!r} is {side}", where=part.path)


def _placed(
    part: MetadataFile, of_storage: IntArray, tensor: IntArray, fqns: Sequence[str], files: _Files
) -> tuple[IntArray, IntArray]:
    """File row of each item, after its path was checked, and its first byte there; ``tensor`` counts in ``fqns``."""
    storage = part.storage
    number = {path: at for at, path in enumerate(dict.fromkeys(storage.paths))}
    path_of_item = np.fromiter(map(number.__getitem__, storage.paths), dtype=np.int64, count=len(storage.paths))
    path = path_of_item[of_storage]
    used, first = np.unique(path, return_index=True)
    names = list(number)
    file_of_path = np.full(len(names), -1, dtype=np.int64)
    for at in np.argsort(first, kind="stable").tolist():
        fqn = fqns[tensor[first[at]]]
        file_of_path[used[at]] = files.row(names[used[at]], fqn, part.path)
    file, offset = file_of_path[path], storage.offset[of_storage]
    if storage.transforms:
        for row in np.flatnonzero(np.isin(of_storage, list(storage.transforms))).tolist():
            item = int(of_storage[row])
            _check_transforms(storage.transforms[item], fqns[tensor[row]], part.path)
            where = FileRange(storage.paths[item], int(storage.offset[item]), int(storage.length[item]))
            file[row], offset[row] = files.decoded_row(where), 0  # a decoded item begins its file
    return file, offset


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
        row = part.storage.row[fqn, None]
        transforms = part.storage.transforms.get(row)
        checked = files.entries[files.row(part.storage.paths[row], fqn, part.path)].path
        if transforms:
            _check_transforms(transforms, fqn, part.path)
        rank = rank_of(checked)
        yield Blob(
            fqn=fqn,
            kind="torch_save+zstd" if transforms else "torch_save",
            where=FileRange(checked, int(part.storage.offset[row]), int(part.storage.length[row])),
            path=part.paths.get(fqn, (fqn,)),
            rank=None if is_shared or rank < 0 else rank,
        )
