"""Reads boxes of tensors into memory: the same plan and the same workers as a conversion, with arrays as the target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt_tool.engine.worker import Worker
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.model import Chunk, FileEntry, FileRange, Manifest
from ckpt_tool.manifest.tables import ChunkTable, FileTable
from ckpt_tool.plan.build import make_plan
from ckpt_tool.plan.limits import PlanLimits
from ckpt_tool.storage.store import Store

__all__ = ["read_boxes"]

_AHEAD_BYTES = 64 << 20


class _ArraySink:
    """Byte arrays by path, filled in place."""

    def __init__(self, files: FileTable) -> None:
        self.arrays = {entry.path: np.empty(entry.nbytes, dtype=np.uint8) for entry in files}

    def write(self, path: str, offset: int, data: memoryview) -> None:
        """Copy ``data`` to its place."""
        self.arrays[path][offset : offset + data.nbytes] = np.frombuffer(data, dtype=np.uint8)


def read_boxes(
    manifest: Manifest, store: Store, boxes: Sequence[tuple[str, Box]], *, limits: PlanLimits
) -> list[npt.NDArray[Any]]:
    """One array per (fqn, box in global coordinates), in the tensor's own dtype; reads only the bytes needed.

    Opaque and packed types come as raw bytes (numpy ``V``). Chunks must be resolved.

    Raises:
        CoverageError: the checkpoint has no data for part of a box.
    """
    names = list(dict.fromkeys(fqn for fqn, _ in boxes))
    tensors = manifest.tensors.take([manifest.tensor_id(fqn) for fqn in names])
    records = [manifest.tensor(fqn) for fqn, _ in boxes]
    entries, chunks = [], []
    for number, ((fqn, box), record) in enumerate(zip(boxes, records, strict=True)):
        nbytes = record.dtype.nbytes(box.volume)
        entries.append(FileEntry(str(number), nbytes))
        chunks.append(Chunk(fqn, box, FileRange(str(number), 0, nbytes), None, 0, None))
    files = FileTable(tuple(entries))
    target = Manifest("memory", "memory", tensors, ChunkTable.from_records(chunks, tensors, files), files)
    sink = _ArraySink(files)
    plan = make_plan(manifest, target, limits=limits)
    worker = Worker(plan, store, sink, with_crc32=False, ahead_bytes=_AHEAD_BYTES)
    units = range(plan.tiles.n_units)
    with worker.ahead(units):
        for unit in units:
            worker.run_unit(unit, lambda _nbytes: None)
    return [
        sink.arrays[str(number)].view(record.dtype.as_numpy()).reshape(box.sizes)
        for number, ((_, box), record) in enumerate(zip(boxes, records, strict=True))
    ]
