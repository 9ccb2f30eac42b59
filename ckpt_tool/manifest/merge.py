"""Several manifests as one, side by side, and back again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ckpt_tool.errors import FormatError
from ckpt_tool.geometry.columns import distinct
from ckpt_tool.geometry.runs import contiguous_strides_columns
from ckpt_tool.manifest.items import ItemTable
from ckpt_tool.manifest.model import Blob, FileEntry, FileRange, Manifest
from ckpt_tool.manifest.tables import ChunkTable, FileTable, IntArray, TensorTable
from ckpt_tool.records import dataclass

__all__ = ["PartRows", "merge_manifests", "replace_chunks", "rows_of_part", "split_manifest", "stacked_chunks"]


@dataclass(frozen=True, slots=True, eq=False)
class PartRows:
    """Which rows of a merged manifest one part has, ascending."""

    folder: str
    tensors: IntArray
    chunks: IntArray
    files: IntArray
    blobs: tuple[int, ...]


def merge_manifests(parts: Sequence[tuple[str, Manifest]], *, format_name: str, root: str) -> Manifest:
    """One manifest of ``(folder, manifest)`` parts; paths of files get their folder in front, names stay.

    Mesh, info and notes are left to the caller.

    Raises:
        FormatError: two parts have a tensor or an object of one name.
    """
    owner: dict[str, str] = {}
    for folder, part in parts:
        for fqn in (*part.tensors.fqns, *(blob.fqn for blob in part.blobs)):
            if owner.setdefault(fqn, folder) != folder:  # ranks of one part may have an object each
                raise FormatError(f"{fqn!r} is in {owner[fqn]!r} and in {folder!r}", where=root)
    width = max((part.tensors.shape.shape[1] for _, part in parts), default=0)
    tables = [part.tensors for _, part in parts]
    tensors = TensorTable(
        fqns=tuple(fqn for table in tables for fqn in table.fqns),
        dtypes=tuple(dtype for table in tables for dtype in table.dtypes),
        shape=np.concatenate([_widened(table.shape, width, 1) for table in tables]),
        ndim=np.concatenate([table.ndim for table in tables]),
        section=np.concatenate([table.section for table in tables]),
        paths=tuple(path for table in tables for path in table.paths or [(fqn,) for fqn in table.fqns]),
    )
    return Manifest(
        format=format_name,
        root=root,
        tensors=tensors,
        chunks=_merged_chunks([part for _, part in parts], width),
        files=FileTable(tuple(_below(folder, entry) for folder, part in parts for entry in part.files)),
        blobs=tuple(
            replace(blob, where=_range_below(folder, blob.where)) for folder, part in parts for blob in part.blobs
        ),
        items=ItemTable.joined([(part.items, len(part.files)) for _, part in parts]),
    )


def rows_of_part(manifest: Manifest, folder: str, tensors: tuple[int, int] | None) -> PartRows:
    """The rows of what lies in one folder, of a merged manifest or of some rows of it.

    Args:
        manifest: merged, perhaps without some chunks, files or objects.
        folder: of the part.
        tensors: first and behind the last row of its tensors, where all are there; else those that have chunks in it.
    """
    inside = f"{folder}/"
    files = np.flatnonzero(np.array([path.startswith(inside) for path in manifest.files.paths], dtype=bool))
    chunks = np.flatnonzero(np.isin(manifest.chunks.file, files))
    own = distinct(manifest.chunks.tensor[chunks]) if tensors is None else np.arange(*tensors)
    blobs = (row for row, blob in enumerate(manifest.blobs) if blob.where and blob.where.path.startswith(inside))
    return PartRows(folder, own.astype(np.int64), chunks, files, tuple(blobs))


def split_manifest(manifest: Manifest, part: PartRows, *, format_name: str) -> Manifest:
    """One part of a merged manifest as it was, with its own root."""
    chunks = manifest.chunks.take(part.chunks)
    tensors = manifest.tensors.take(part.tensors)
    width = tensors.shape.shape[1]
    return Manifest(
        format=format_name,
        root=f"{manifest.root.rstrip('/')}/{part.folder}",
        tensors=tensors,
        chunks=chunks.replace(
            tensor=np.searchsorted(part.tensors, chunks.tensor).astype(np.int32),
            file=np.searchsorted(part.files, chunks.file).astype(np.int32),
            offsets=chunks.offsets[:, :width],
            sizes=chunks.sizes[:, :width],
            strides=None if chunks.strides is None else chunks.strides[:, :width],
        ),
        files=FileTable(tuple(_without(part.folder, manifest.files.entries[row]) for row in part.files.tolist())),
        blobs=tuple(_blob_without(part.folder, manifest.blobs[row]) for row in part.blobs),
        items=None if manifest.items is None else manifest.items.take_files(part.files),
    )


def replace_chunks(manifest: Manifest, part: PartRows, chunks: ChunkTable) -> ChunkTable:
    """All chunks of a merged manifest, those of one part taken from that part's table."""
    new = chunks.replace(
        tensor=part.tensors[chunks.tensor].astype(np.int32), file=part.files[chunks.file].astype(np.int32)
    )
    n = len(manifest.chunks)
    order = np.arange(n)
    order[part.chunks] = n + np.arange(len(part.chunks))
    return stacked_chunks([manifest.chunks, new], manifest.tensors.shape.shape[1]).take(order)


def _merged_chunks(parts: Sequence[Manifest], width: int) -> ChunkTable:
    shifted = []
    n_tensors = n_files = 0
    for part in parts:
        shifted.append(
            part.chunks.replace(
                tensor=(part.chunks.tensor + n_tensors).astype(np.int32),
                file=(part.chunks.file + n_files).astype(np.int32),
            )
        )
        n_tensors += len(part.tensors)
        n_files += len(part.files)
    return stacked_chunks(shifted, width)


def stacked_chunks(tables: Sequence[ChunkTable], width: int) -> ChunkTable:
    """Rows of several chunk tables, one after another, for tensors of ``width`` dimensions at most."""
    strides = None
    if any(table.strides is not None for table in tables):
        strides = np.concatenate(
            [
                _widened(contiguous_strides_columns(t.sizes) if t.strides is None else t.strides, width, 1)
                for t in tables
            ]
        )
    return ChunkTable(
        tensor=np.concatenate([t.tensor for t in tables]),
        offsets=np.concatenate([_widened(t.offsets, width, 0) for t in tables]),
        sizes=np.concatenate([_widened(t.sizes, width, 1) for t in tables]),
        file=np.concatenate([t.file for t in tables]),
        offset=np.concatenate([t.offset for t in tables]),
        length=np.concatenate([t.length for t in tables]),
        rank=np.concatenate([t.rank for t in tables]),
        flags=np.concatenate([t.flags for t in tables]),
        strides=strides,
    )


def _widened(columns: IntArray, width: int, fill: int) -> IntArray:
    missing = width - columns.shape[1]
    if missing <= 0:
        return columns[:, :width]
    return np.concatenate([columns, np.full((len(columns), missing), fill, dtype=np.int64)], axis=1)


def _range_below(folder: str, where: FileRange | None) -> FileRange | None:
    return None if where is None else FileRange(f"{folder}/{where.path}", where.offset, where.length)


def _below(folder: str, entry: FileEntry) -> FileEntry:
    return replace(entry, path=f"{folder}/{entry.path}", part=_range_below(folder, entry.part))


def _without(folder: str, entry: FileEntry) -> FileEntry:
    part = entry.part
    inner = None if part is None else FileRange(part.path[len(folder) + 1 :], part.offset, part.length)
    return replace(entry, path=entry.path[len(folder) + 1 :], part=inner)


def _blob_without(folder: str, blob: Blob) -> Blob:
    where = blob.where
    inner = None if where is None else FileRange(where.path[len(folder) + 1 :], where.offset, where.length)
    return replace(blob, where=inner)
