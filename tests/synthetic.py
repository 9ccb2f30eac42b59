"""Checkpoints made in memory: random contents, any cut, any byte order, with the arrays that they must read as.

Builds manifests and bytes by hand, so that readers and writers of formats are not part of what is tested.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt_tool.dtypes import DType, dtype
from ckpt_tool.formats.base import LayOut
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.model import Chunk, FileEntry, FileRange, Manifest, TensorMeta
from ckpt_tool.manifest.tables import ChunkTable, FileTable, TensorTable
from ckpt_tool.plan.limits import PlanLimits

__all__ = ["Synthetic", "layout_of", "limits", "make_source", "make_target"]


@dataclass(frozen=True)
class Synthetic:
    """A manifest, the content of its files, and the arrays that its tensors are."""

    manifest: Manifest
    files: dict[str, bytes]
    arrays: dict[str, npt.NDArray[Any]]


def limits(tile: int = 64, odd: int = 1 << 20, unit: int = 128) -> PlanLimits:
    """Small limits, so that small tensors have many tiles."""
    return PlanLimits(max_tile_bytes=tile, max_odd_tile_bytes=odd, unit_bytes=unit)


def make_source(
    arrays: Mapping[str, npt.NDArray[Any]],
    cuts: Mapping[str, Sequence[Box]],
    *,
    n_files: int = 2,
    kinds: Mapping[str, DType] | None = None,
) -> Synthetic:
    """Boxes of each array, packed, one after another with gaps of 3 bytes, dealt out to ``n_files`` files."""
    tensors = _tensors(arrays, kinds or {})
    content: dict[str, bytearray] = {f"f{i}": bytearray(b"head") for i in range(n_files)}
    chunks = []
    for fqn, boxes in cuts.items():
        for number, box in enumerate(boxes):
            path = f"f{number % n_files}"
            data = np.ascontiguousarray(arrays[fqn][box.slices]).tobytes()
            chunks.append(Chunk(fqn, box, FileRange(path, len(content[path]), len(data)), None, 0, number))
            content[path] += data + b"gap"
    files = FileTable(tuple(FileEntry(path, len(data)) for path, data in content.items()))
    table = ChunkTable.from_records(chunks, tensors, files)
    manifest = Manifest("synthetic", "memory://source", tensors, table, files)
    return Synthetic(manifest, {path: bytes(data) for path, data in content.items()}, dict(arrays))


def make_target(
    source: Manifest, cuts: Mapping[str, Sequence[Box]], *, n_files: int = 2, dtypes: Mapping[str, str] | None = None
) -> Manifest:
    """Boxes of the same tensors laid out anew, in the order of ``cuts``, dealt out to ``n_files`` files."""
    order = [source.tensors.index[fqn] for fqn in cuts]
    records = [source.tensors.record(row) for row in order]
    kinds = {fqn: dtype(name) for fqn, name in (dtypes or {}).items()}
    tensors = TensorTable.from_records(
        TensorMeta(r.fqn, kinds.get(r.fqn, r.dtype), r.shape, r.section, r.path) for r in records
    )
    ends = [0] * n_files
    chunks = []
    for fqn, boxes in cuts.items():
        kind = tensors.dtypes[tensors.index[fqn]]
        for number, box in enumerate(boxes):
            slot = number % n_files
            nbytes = kind.nbytes(box.volume)
            chunks.append(Chunk(fqn, box, FileRange(f"t{slot}", ends[slot], nbytes), None, 0, number))
            ends[slot] += nbytes
    files = FileTable(tuple(FileEntry(f"t{slot}", end) for slot, end in enumerate(ends)))
    return Manifest("synthetic", "memory://target", tensors, ChunkTable.from_records(chunks, tensors, files), files)


def layout_of(target: Manifest, *, needs_crc32: bool = False) -> LayOut:
    """A layout without headers around the payload of ``target``."""
    return LayOut(target, (), None, needs_crc32=needs_crc32)


def _tensors(arrays: Mapping[str, npt.NDArray[Any]], kinds: Mapping[str, DType]) -> TensorTable:
    return TensorTable.from_records(
        TensorMeta(fqn, kinds.get(fqn) or dtype(array.dtype.name), array.shape, "model", (fqn,))
        for fqn, array in arrays.items()
    )
