"""Several manifests as one, side by side, and back again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ckpt_tool.errors import FormatError
from ckpt_tool.geometry.runs import contiguous_strides_columns
from ckpt_tool.manifest.model import Blob, FileEntry, FileRange, Manifest
from ckpt_tool.manifest.tables import ChunkTable, FileTable, IntArray, TensorTable
from ckpt_tool.records import dataclass

__all__ = ["PartBounds", "bounds_of", "merge_manifests", "replace_chunks", "split_manifest", "stacked_chunks"]


@dataclass(frozen=True, slots=True)
class PartBounds:
    """Which rows of a merged manifest one part has: tensors, chunks, files and blobs are runs of rows."""

    folder: str
    tensors: tuple[int, int]
    chunks: tuple[int, int]
    files: tuple[int, int]
    blobs: tuple[int, int]


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
    )


def bounds_of(parts: Sequence[tuple[str, Manifest]]) -> tuple[PartBounds, ...]:
    """The rows that each part has in the manifest that ``merge_manifests`` makes of them."""
    bounds = []
    at = [0, 0, 0, 0]
    for folder, part in parts:
        counts = (len(part.tensors), len(part.chunks), len(part.files), len(part.blobs))
        tensors, chunks, files, blobs = ((start, start + count) for start, count in zip(at, counts, strict=True))
        bounds.append(PartBounds(folder, tensors, chunks, files, blobs))
        at = [tensors[1], chunks[1], files[1], blobs[1]]
    return tuple(bounds)


def split_manifest(manifest: Manifest, bounds: PartBounds, *, format_name: str) -> Manifest:
    """One part of a merged manifest as it was, with its own root.

    ``split_manifest(merge_manifests(parts), bounds_of(parts)[i])`` has the rows of ``parts[i]``.
    """
    (t0, t1), (c0, c1), (f0, f1), (b0, b1) = bounds.tensors, bounds.chunks, bounds.files, bounds.blobs
    chunks = manifest.chunks.take(np.arange(c0, c1))
    tensors = manifest.tensors.take(np.arange(t0, t1))
    width = tensors.shape.shape[1]
    return Manifest(
        format=format_name,
        root=f"{manifest.root.rstrip('/')}/{bounds.folder}",
        tensors=tensors,
        chunks=chunks.replace(
            tensor=(chunks.tensor - t0).astype(np.int32),
            file=(chunks.file - f0).astype(np.int32),
            offsets=chunks.offsets[:, :width],
            sizes=chunks.sizes[:, :width],
            strides=None if chunks.strides is None else chunks.strides[:, :width],
        ),
        files=FileTable(tuple(_without(bounds.folder, entry) for entry in manifest.files.entries[f0:f1])),
        blobs=tuple(_blob_without(bounds.folder, blob) for blob in manifest.blobs[b0:b1]),
    )


def replace_chunks(manifest: Manifest, bounds: PartBounds, chunks: ChunkTable) -> ChunkTable:
    """All chunks of a merged manifest, those of one part taken from that part's table."""
    part = chunks.replace(
        tensor=(chunks.tensor + bounds.tensors[0]).astype(np.int32),
        file=(chunks.file + bounds.files[0]).astype(np.int32),
    )
    before = manifest.chunks.take(np.arange(bounds.chunks[0]))
    behind = manifest.chunks.take(np.arange(bounds.chunks[1], len(manifest.chunks)))
    return stacked_chunks([before, part, behind], manifest.tensors.shape.shape[1])


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
