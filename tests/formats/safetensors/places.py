"""Files built by hand, byte by byte, so that no test of a reader goes through our writer, and the other way round."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_tool.dtypes import dtype
from ckpt_tool.formats.base import BoxTable, LayOut, Source, WriteRequest
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.model import TensorMeta
from ckpt_tool.manifest.tables import TensorTable, pad_shapes
from ckpt_tool.storage.memory import MemoryStore
from ckpt_tool.storage.open import open_store
from tests.storage.recording import RecordingStore


def file_bytes(listed: Any, payload: bytes) -> bytes:
    """A safetensors file with ``listed`` as its header, whatever it says."""
    text = listed if isinstance(listed, bytes) else json.dumps(listed).encode()
    return len(text).to_bytes(8, "little") + text + payload


def model_bytes(tensors: Mapping[str, bytes], metadata: Mapping[str, str] | None = None) -> bytes:
    """A safetensors file of U8 vectors."""
    listed: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name, data in tensors.items():
        listed[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [start, start + len(data)]}
        start += len(data)
    return file_bytes(listed, b"".join(tensors.values()))


def index_bytes(weight_map: Mapping[str, Any], total_size: Any = None) -> bytes:
    """An index."""
    metadata = {} if total_size is None else {"total_size": total_size}
    return json.dumps({"metadata": metadata, "weight_map": dict(weight_map)}).encode()


def source_and_store(files: Mapping[str, bytes]) -> tuple[Source, RecordingStore]:
    """Files in memory, and the store that records every request."""
    store = RecordingStore(MemoryStore(dict(files)))
    return Source(store, store.listing()), store


@contextmanager
def opened(location: Path) -> Iterator[Source]:
    """The files at a path."""
    store, listing = open_store(location)
    try:
        yield Source(store, listing)
    finally:
        store.close()


def meta(fqn: str, dtype_name: str, shape: Sequence[int], **fields: Any) -> TensorMeta:
    """A tensor."""
    return TensorMeta(fqn, dtype(dtype_name), tuple(shape), fields.get("section", "model"), fields.get("path", (fqn,)))


def request(
    metas: Sequence[TensorMeta], boxes: Sequence[tuple[str, Box, int]] | None = None, world_size: int = 1, **fields: Any
) -> WriteRequest:
    """A request for ``boxes`` (fqn, box, rank); one whole box of each tensor by default."""
    if boxes is None:
        boxes = [(m.fqn, Box.whole(m.shape), 0) for m in metas]
    tensors = TensorTable.from_records(metas)
    width = tensors.shape.shape[1]
    table = BoxTable(
        tensor=np.array([tensors.index[fqn] for fqn, _, _ in boxes], dtype=np.int32),
        offsets=pad_shapes([box.offsets for _, box, _ in boxes], width, 0),
        sizes=pad_shapes([box.sizes for _, box, _ in boxes], width, 1),
        rank=np.array([rank for _, _, rank in boxes], dtype=np.int32),
    )
    return WriteRequest(tensors, table, world_size, **fields)


def written(layout: LayOut, payloads: Sequence[bytes]) -> dict[str, bytes]:
    """The files that a layout describes, with ``payloads`` (one per row of boxes) in their places.

    Every byte is written exactly once, or stays zero.
    """
    files: dict[str, bytearray] = {e.path: bytearray(e.nbytes) for e in layout.manifest.files}
    covered = {path: bytearray(len(data)) for path, data in files.items()}
    for segment in layout.segments:
        target = files.setdefault(segment.path, bytearray(len(segment.data)))
        marks = covered.setdefault(segment.path, bytearray(len(segment.data)))
        end = segment.offset + len(segment.data)
        assert end <= len(target), segment.path
        target[segment.offset : end] = segment.data
        marks[segment.offset : end] = bytes(b + 1 for b in marks[segment.offset : end])
    chunks = layout.manifest.chunks
    for row, data in enumerate(payloads):
        path = layout.manifest.files.paths[chunks.file[row]]
        start, length = int(chunks.offset[row]), int(chunks.length[row])
        assert length == len(data), (row, length, len(data))
        files[path][start : start + length] = data
        covered[path][start : start + length] = bytes(b + 1 for b in covered[path][start : start + length])
    assert all(max(marks, default=0) <= 1 for marks in covered.values())
    return {path: bytes(data) for path, data in files.items()}
