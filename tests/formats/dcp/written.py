"""What a layout becomes on disk: the shortest engine there is, for tests of writers."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ckpt_tool.dtypes import DTYPES
from ckpt_tool.formats.base import BoxTable, LayOut
from ckpt_tool.manifest.model import TensorMeta
from ckpt_tool.manifest.tables import TensorTable
from tests.formats.conformance import Truth

__all__ = ["boxes_of", "numbers", "row_boxes", "table", "write"]


def write(layout: LayOut, truth: Mapping[str, Truth], root: Path, *, is_sealed: bool = True) -> None:
    """Write every chunk from ``truth``, then the segments; without the seal as a target that cannot go back has it."""
    manifest = layout.manifest
    for entry in manifest.files:
        (root / entry.path).write_bytes(bytes(entry.nbytes))

    def put(path: str, offset: int, data: bytes) -> None:
        (root / path).touch()  # a file of segments alone is not in the manifest
        with (root / path).open("r+b") as file:
            file.seek(offset)
            file.write(data)

    crc32s = np.zeros(len(manifest.chunks), dtype=np.uint32)
    for row in range(len(manifest.chunks)):
        chunk = manifest.chunks.record(row, manifest.tensors, manifest.files)
        tensor = truth[chunk.fqn]
        width = manifest.tensors.record(int(manifest.chunks.tensor[row])).dtype.itemsize
        whole = np.frombuffer(tensor.data, dtype=np.uint8).reshape(*tensor.shape, width)
        data = whole[chunk.box.slices].tobytes()
        assert len(data) == chunk.where.length
        put(chunk.where.path, chunk.where.offset, data)
        crc32s[row] = zlib.crc32(data)
    sealed = layout.seal(crc32s) if is_sealed and layout.seal is not None else ()
    for segment in (*layout.segments, *sealed):
        put(segment.path, segment.offset, segment.data)


def boxes_of(tensors: TensorTable, rows: Sequence[tuple[int, Sequence[int], Sequence[int], int]]) -> BoxTable:
    """Boxes from (tensor row, offsets, sizes, rank)."""
    width = tensors.shape.shape[1]
    offsets, sizes = np.zeros((len(rows), width), np.int64), np.ones((len(rows), width), np.int64)
    for number, (_, start, extent, _) in enumerate(rows):
        offsets[number, : len(start)] = start
        sizes[number, : len(extent)] = extent
    tensor, rank = (np.array([row[i] for row in rows], dtype=np.int32) for i in (0, 3))
    return BoxTable(tensor, offsets, sizes, rank)


def row_boxes(tensors: TensorTable, world_size: int) -> BoxTable:
    """Tensors cut along their first dimension as ``torch.chunk`` cuts, empty parts included; scalars on rank 0."""
    rows: list[tuple[int, Sequence[int], Sequence[int], int]] = []
    for number, tensor in enumerate(tensors):
        if not tensor.shape or not tensor.numel:
            rows.append((number, (0,) * len(tensor.shape), tensor.shape, 0))
            continue
        n, *rest = tensor.shape
        step = -(-n // world_size)
        for rank in range(world_size):
            start = min(rank * step, n)
            extent = (min(step, n - start), *rest)
            rows.append((number, (start, *(0 for _ in rest)), extent, rank))
    return boxes_of(tensors, rows)


def table(**shapes: tuple[int, ...]) -> TensorTable:
    """float32 tensors of the model section."""
    return TensorTable.from_records(
        TensorMeta(fqn, DTYPES["float32"], shape, "model", (fqn,)) for fqn, shape in shapes.items()
    )


def numbers(tensors: TensorTable) -> dict[str, Truth]:
    """Counting bytes for each tensor."""
    return {
        t.fqn: Truth(t.dtype.name, t.shape, (np.arange(t.nbytes) % 251).astype(np.uint8).tobytes()) for t in tensors
    }
