"""Requests for the writers of torch files, and the files that their layouts become once the payload is in place."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from ckpt_tool.dtypes import DType
from ckpt_tool.formats.base import BoxTable, LayOut, WriteRequest
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.model import Blob, KeyPath, TensorMeta
from ckpt_tool.manifest.tables import TensorTable, pad_shapes


def request_of(
    tensors: Mapping[KeyPath, tuple[DType, tuple[int, ...]]],
    boxes: Sequence[tuple[int, Box, int]],
    *,
    world_size: int = 1,
    blobs: Sequence[Blob] = (),
    mesh: Mapping[str, int] | None = None,
) -> WriteRequest:
    """A request; ``boxes`` are (tensor, box, rank)."""
    mesh = mesh or {}
    metas = [
        TensorMeta(".".join(map(str, path)), dtype, shape, "model", path) for path, (dtype, shape) in tensors.items()
    ]
    table = TensorTable.from_records(metas)
    width = table.shape.shape[1]
    return WriteRequest(
        tensors=table,
        boxes=BoxTable(
            tensor=np.array([tensor for tensor, _, _ in boxes], dtype=np.int32),
            offsets=pad_shapes([box.offsets for _, box, _ in boxes], width, 0),
            sizes=pad_shapes([box.sizes for _, box, _ in boxes], width, 1),
            rank=np.array([rank for _, _, rank in boxes], dtype=np.int32),
        ),
        world_size=world_size,
        blobs=tuple(blobs),
        mesh_axes=tuple(mesh),
        mesh_sizes=tuple(mesh.values()),
    )


def filled(layout: LayOut, payload: Mapping[str, bytes], *, is_sealed: bool = True) -> dict[str, bytes]:
    """The files of a layout; ``payload`` has each whole tensor's bytes by fqn."""
    manifest = layout.manifest
    chunks = manifest.chunks
    files = {entry.path: bytearray(entry.nbytes) for entry in manifest.files}
    covered = {path: np.zeros(len(data), dtype=np.int64) for path, data in files.items()}
    crc32s = np.zeros(len(chunks), dtype=np.uint32)
    for row in range(len(chunks)):
        record = chunks.record(row, manifest.tensors, manifest.files)
        meta = manifest.tensor(record.fqn)
        elements = np.frombuffer(payload[record.fqn], dtype=np.uint8).reshape(*meta.shape, meta.dtype.itemsize)
        data = np.ascontiguousarray(elements[record.box.slices]).tobytes()
        assert len(data) == record.where.length
        files[record.where.path][record.where.offset : record.where.end] = data
        covered[record.where.path][record.where.offset : record.where.end] += 1
        crc32s[row] = zlib.crc32(data)
    for segment in layout.segments:
        files[segment.path][segment.offset : segment.offset + len(segment.data)] = segment.data
        covered[segment.path][segment.offset : segment.offset + len(segment.data)] += 1
    for path, counts in covered.items():
        assert counts.tolist() == [1] * len(counts), path
    if is_sealed:
        assert layout.seal is not None
        for segment in layout.seal(crc32s):
            files[segment.path][segment.offset : segment.offset + len(segment.data)] = segment.data
    return {path: bytes(data) for path, data in files.items()}
