"""Writer of rank files (``rank_schema`` describes the format)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from math import prod
from typing import Any

import numpy as np

from ckpt_tool.dtypes import DTYPES, DType
from ckpt_tool.errors import LayoutError, Unsupported, UsageError
from ckpt_tool.formats._safetensors.header import build_header, has_type
from ckpt_tool.formats.base import BoxTable, LayOut, Segment, WriteRequest
from ckpt_tool.formats.joint import Joined, PlacedObject, PlainEntries, RankLayOut
from ckpt_tool.formats.safetensors.names import SUFFIX, rank_file
from ckpt_tool.formats.safetensors.rank_schema import (
    LAYOUT_FILE,
    OBJECTS_FILE,
    Layout,
    box_fields,
    rank_metadata,
    tensor_fields,
)
from ckpt_tool.manifest.model import Blob, FileEntry, FileRange, MeshInfo, TensorMeta
from ckpt_tool.manifest.plain import to_plain
from ckpt_tool.manifest.tables import IntArray, TensorTable
from ckpt_tool.sizes import counted

__all__ = ["WRITER", "RankFilesWriter"]

_BYTES = DTYPES["uint8"]
_Told = tuple[TensorMeta, dict[str, Any]]
"""A tensor, and what is said of each of its boxes."""
_SUFFIXES = {"torch_save": ".pt", "pickle": ".pkl"}


class RankFilesWriter(PlainEntries):
    """Lays out a file per rank with the boxes that the request gives it: wide elements first, else in its order."""

    name = "rank-files"
    per_rank = True
    commit_path = LAYOUT_FILE

    def lay_out(self, request: WriteRequest) -> LayOut:
        """Every rank gets a file, also one that stores nothing; ``ckpt_layout.json`` is the commit file.

        Empty tensors without a box are stored by rank 0. Objects go into ``ckpt_objects.json`` if they are plain
        values, else into files of their own: in their original bytes if given, else pickled anew.

        Raises:
            LayoutError: a tensor has no box, or a rank is outside of the world.
            Unsupported: a box of a sub-byte type does not end on a byte, or an object cannot be written.
        """
        _check(request)
        n = len(request.boxes)
        offset, length = np.zeros(n, np.int64), np.zeros(n, np.int64)
        segments, entries = [], []
        by_rank = _rows_by_rank(request)
        told = cache(partial(_told, request.tensors))  # most tensors lie on many ranks
        for rank in range(request.world_size):
            path = rank_file(rank)
            rows = by_rank[rank]
            described, fields = _describe(request, rows, told, adds_empty=rank == 0)
            metadata = rank_metadata(
                rank=rank,
                world_size=request.world_size,
                axes=request.mesh_axes,
                mesh_sizes=request.mesh_sizes,
                boxes=fields,
            )
            data, header = build_header(described, {**metadata, **request.options.metadata})
            segments.append(Segment(path, 0, data))
            entries.append(FileEntry(path, header.data_start + header.payload_nbytes))
            for row, entry in zip(rows, header.entries, strict=False):  # empty tensors without a row come last
                offset[row], length[row] = header.data_start + entry.start, entry.nbytes
        # What the source lacks is no property of the target, and the world is that of the target.
        info = {key: value for key, value in request.info.items() if key not in {"missing_files", "world_size"}}
        blobs, blob_segments = _lay_out_blobs(request)
        segments += blob_segments
        entries += [FileEntry(s.path, len(s.data)) for s in blob_segments]
        layout = Layout(
            world_size=request.world_size,
            files={e.path: e.nbytes for e in entries},
            order=request.tensors.fqns,
            axes=request.mesh_axes,
            mesh_sizes=request.mesh_sizes,
            blobs=blobs,
            info=info,
        )
        segments.append(Segment(LAYOUT_FILE, 0, layout.to_json()))
        mesh = MeshInfo(request.mesh_axes, request.mesh_sizes, LAYOUT_FILE) if request.mesh_axes else None
        manifest = request.manifest(
            self.name, entries, file=request.boxes.rank, offset=offset, blobs=blobs, mesh=mesh
        ).replace(info={**info, "world_size": request.world_size})
        return LayOut(manifest, tuple(segments), LAYOUT_FILE)

    def lay_out_rank(self, tensors: TensorTable, boxes: BoxTable, rank: int, world_size: int) -> RankLayOut:
        """The rank's file, empty tensors that have no box included, and one with its objects back to back.

        Raises:
            Unsupported: a box of a sub-byte type does not end on a byte.
        """
        order = _stored_order(tensors, boxes)
        request = WriteRequest(tensors, boxes, world_size)
        described, fields = _describe(request, order, partial(_told, tensors), adds_empty=True)
        metadata = rank_metadata(rank=rank, world_size=world_size, axes=(), mesh_sizes=(), boxes=fields)
        data, header = build_header(described, metadata)
        path = rank_file(rank)
        return RankLayOut(
            files={path: header.data_start + header.payload_nbytes},
            paths=(path,) * len(boxes),
            order=order,
            heads=(b"",) * len(boxes),
            rear=lambda row, crc32: b"",  # noqa: ARG005
            object_path=lambda _: f"objects/{path.removesuffix(SUFFIX)}.bin",
            starts={path: data},
        )

    def join(self, tensors: TensorTable, boxes: BoxTable, world_size: int) -> Joined:
        """``ckpt_layout.json``."""
        del boxes

        def layout(objects: Sequence[PlacedObject], files: Mapping[str, int]) -> tuple[Segment, ...]:
            blobs = tuple(Blob(each.fqn, "torch_save", each.where, path=each.path) for each in objects)
            content = Layout(world_size=world_size, files=files, order=tensors.fqns, blobs=blobs)
            return (Segment(LAYOUT_FILE, 0, content.to_json()),)

        return Joined(tensors.fqns, layout)


def _check(request: WriteRequest) -> None:
    ranks = request.boxes.rank
    if len(ranks) and not (int(ranks.min()) >= 0 and int(ranks.max()) < request.world_size):
        raise LayoutError(
            f"expected ranks 0 to {request.world_size - 1:,}, got {int(ranks.min()):,} to {int(ranks.max()):,}"
        )
    absent = (np.bincount(request.boxes.tensor, minlength=len(request.tensors)) == 0) & (request.tensors.numel > 0)
    if absent.any():
        first = request.tensors.fqns[int(np.flatnonzero(absent)[0])]
        raise LayoutError(
            f"{counted(int(absent.sum()), 'tensor', 'have')} no box on any rank, {first!r} is one", where=first
        )
    reserved = [key for key in request.options.metadata if key.startswith("ckpt.")]
    if reserved:
        raise UsageError(f"metadata key {reserved[0]!r} is one of the format's own")


def _rows_by_rank(request: WriteRequest) -> list[IntArray]:
    """Rows of the boxes of each rank as its file has them: wide elements first, empty boxes last, else as given."""
    order = _stored_order(request.tensors, request.boxes)
    starts = np.searchsorted(request.boxes.rank[order], np.arange(request.world_size + 1))
    return [order[starts[r] : starts[r + 1]] for r in range(request.world_size)]


def _stored_order(tensors: TensorTable, boxes: BoxTable) -> IntArray:
    """Rows by rank, and within a rank as its file has them."""
    is_empty = (boxes.sizes == 0).any(axis=1)
    order = np.lexsort((np.arange(len(boxes)), -tensors.bits[boxes.tensor], is_empty, boxes.rank))
    return order.astype(np.int64)


def _told(tensors: TensorTable, row: int) -> _Told:
    meta = tensors.record(row)
    return meta, tensor_fields(meta)


def _describe(
    request: WriteRequest, rows: IntArray, told: Callable[[int], _Told], *, adds_empty: bool
) -> tuple[list[tuple[str, DType, tuple[int, ...]]], dict[str, dict[str, Any]]]:
    """``(entries, ckpt.boxes)`` of one rank's file."""
    described: list[tuple[str, DType, tuple[int, ...]]] = []
    fields: dict[str, dict[str, Any]] = {}
    for tensor, offsets, sizes in _boxes(request, rows, adds_empty=adds_empty):
        meta, of_tensor = told(tensor)
        stored = _free_name(meta.fqn, fields, request)
        numel = prod(sizes)
        if numel * meta.dtype.bits % 8:
            raise Unsupported(
                f"a box {offsets}+{sizes} of {meta.dtype.name} does not end on a whole byte",
                where=meta.fqn,
                hint="keep tensors of this type whole",
            )
        is_bytes = not has_type(meta.dtype, sizes)
        described.append((stored, _BYTES, (meta.dtype.nbytes(numel),)) if is_bytes else (stored, meta.dtype, sizes))
        fields[stored] = box_fields(stored, meta, of_tensor, offsets, sizes, is_bytes=is_bytes)
    return described, fields


def _boxes(
    request: WriteRequest, rows: IntArray, *, adds_empty: bool
) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """``(tensor, offsets, sizes)`` of ``rows``, then of the empty tensors that no row has."""
    tensors = request.boxes.tensor[rows]
    columns = (tensors, request.tensors.ndim[tensors], request.boxes.offsets[rows], request.boxes.sizes[rows])
    for tensor, ndim, offsets, sizes in zip(*(column.tolist() for column in columns), strict=True):
        yield tensor, tuple(offsets[:ndim]), tuple(sizes[:ndim])
    if adds_empty:
        has_box = np.zeros(len(request.tensors), dtype=np.bool_)
        has_box[request.boxes.tensor] = True
        for tensor in np.flatnonzero(~has_box & (request.tensors.numel == 0)).tolist():
            shape = request.tensors.shape_of(tensor)
            yield tensor, (0,) * len(shape), shape


def _free_name(fqn: str, taken: dict[str, dict[str, Any]], request: WriteRequest) -> str:
    """``fqn``, or the first ``fqn@i`` that is neither taken nor the name of another tensor."""
    if fqn not in taken:
        return fqn
    i = 1
    while f"{fqn}@{i}" in taken or f"{fqn}@{i}" in request.tensors.index:
        i += 1
    return f"{fqn}@{i}"


def _lay_out_blobs(request: WriteRequest) -> tuple[tuple[Blob, ...], list[Segment]]:
    """Objects with their new places, and the files that hold them."""
    placed: list[Blob] = []
    files: list[Segment] = []
    lines: list[bytes] = []
    position = 2  # after "[\n"
    if len(request.blobs) > len(request.blob_bytes):
        from ckpt_tool.formats._torch_file.objects import check_objects  # 7 ms, and most need none

        check_objects(request.blobs, request.blob_bytes)
    for blob in request.blobs:
        raw, kind = request.blob_bytes.get(blob.fqn), blob.kind
        if raw is None:
            line = _plain_line(blob)
            if line is not None:
                where = FileRange(OBJECTS_FILE, position, len(line))
                lines.append(line)
                position += len(line) + 2
                placed.append(replace(blob, kind="json", where=where))
                continue
            raw, kind = _pickled(blob), "pickle"
        path = f"objects/{len(files):05d}{_SUFFIXES.get(kind, '.bin')}"
        files.append(Segment(path, 0, bytes(raw)))
        placed.append(replace(blob, kind=kind, where=FileRange(path, 0, len(raw))))
    if lines:
        files.append(Segment(OBJECTS_FILE, 0, b"[\n" + b",\n".join(lines) + b"\n]\n"))
    return tuple(placed), files


def _plain_line(blob: Blob) -> bytes | None:
    """The object as one line of JSON, None when it is not a plain value."""
    try:
        return json.dumps(to_plain(blob.value, blob.fqn), separators=(",", ":"), allow_nan=False).encode()
    except Unsupported:
        return None


def _pickled(blob: Blob) -> bytes:
    """The object as a pickle, which has no place for what its tensors hold."""
    from ckpt_tool.formats._pickle.dump import dump_pickle  # 7 ms, and most objects are plain values

    return dump_pickle(blob.value)


WRITER = RankFilesWriter()
