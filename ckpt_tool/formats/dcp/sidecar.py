"""A sidecar is a copy of what ``.metadata`` says, as Arrow columns beside it, with the exact place of every payload.

A pickle of a million chunks takes seconds and gigabytes to read, and every item's head costs a request; the columns
take neither. A sidecar is only believed while it is of this very ``.metadata`` (by length and SHA-256) and the files
have the lengths that it knows; else it is left alone. Nothing needs it, and torch does not look at it.

The file is three Arrow IPC streams, one behind another: tensors, files, chunks. What is not a column is JSON in the
metadata of the first one's schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from ckpt_tool.dtypes import DTYPES
from ckpt_tool.errors import CkptError
from ckpt_tool.formats._dcp.metadata import METADATA_NAME
from ckpt_tool.formats._dcp.table import Tables, rank_of
from ckpt_tool.formats.base import Source
from ckpt_tool.manifest.items import ItemTable
from ckpt_tool.manifest.model import Blob, FileEntry, FileRange
from ckpt_tool.manifest.sections import section_of
from ckpt_tool.manifest.tables import SECTIONS, ChunkFlag, ChunkTable, FileTable, IntArray, TensorTable, pad_shapes
from ckpt_tool.records import dataclass

__all__ = ["MIN_CHUNKS", "SIDECAR_NAME", "Facts", "Sidecar", "read_sidecar", "sidecar_bytes"]

SIDECAR_NAME = ".metadata.arrow"
MIN_CHUNKS = 10_000
"""Below that ``.metadata`` is read faster than pyarrow is imported."""
_MIN_METADATA_NBYTES = 1 << 20
_KEY = b"ckpt.sidecar"
_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Facts:
    """What ``.metadata`` says beyond tensors and objects."""

    version: str | None
    save_id: str | None
    is_flattened: bool


@dataclass(frozen=True, slots=True, eq=False)
class Sidecar:
    """The tables of ``.metadata``, every chunk unresolved, and the first byte of each chunk's payload."""

    tables: Tables
    facts: Facts
    payload_offset: IntArray


def sidecar_bytes(sidecar: Sidecar, metadata: bytes) -> bytes:
    """The content of the file that stands beside a ``.metadata`` of the bytes ``metadata``."""
    import pyarrow as pa

    tables = sidecar.tables
    tensors, chunks = tables.tensors, tables.chunks
    facts = sidecar.facts
    described = {
        "schema": _SCHEMA,
        "metadata_nbytes": len(metadata),
        "metadata_sha256": _sha256(metadata),
        "version": facts.version,
        "save_id": facts.save_id,
        "is_flattened": facts.is_flattened,
        "empty": sorted(tables.empty.items()),
        "empty_items": np.stack([tables.items.file, tables.items.offset, tables.items.length], axis=1).tolist(),
        "blobs": [
            [blob.fqn, blob.path, blob.where.path, blob.where.offset, blob.where.length]
            for blob in tables.blobs
            if blob.where is not None
        ],
    }
    paths = tensors.paths or tuple((fqn,) for fqn in tensors.fqns)
    # As reading the metadata tells them, which knows names and keys alone.
    sections = [SECTIONS.index(section_of(path, fqn)) for path, fqn in zip(paths, tensors.fqns, strict=True)]
    is_flat = all(path == (fqn,) for path, fqn in zip(paths, tensors.fqns, strict=True))
    columns_of_tensors = pa.table(
        {
            "fqn": pa.array(tensors.fqns, pa.string()),
            "dtype": pa.array([dtype.name for dtype in tensors.dtypes], pa.string()),
            "shape": pa.array(tensors.shapes, pa.list_(pa.int64())),
            "section": pa.array(sections, pa.int8()),
            "path": pa.array([None if is_flat else json.dumps(path) for path in paths], pa.string()),
        }
    ).replace_schema_metadata({_KEY: json.dumps(described).encode()})
    columns_of_files = pa.table(
        {"path": pa.array(tables.files.paths, pa.string()), "nbytes": pa.array(tables.files.nbytes)}
    )
    columns_of_chunks = pa.table(
        {
            "tensor": pa.array(chunks.tensor),
            "offsets": _fixed(chunks.offsets),
            "sizes": _fixed(chunks.sizes),
            "file": pa.array(chunks.file),
            "item_offset": pa.array(chunks.offset),
            "item_length": pa.array(chunks.length),
            "payload_offset": pa.array(sidecar.payload_offset),
        }
    )
    sink = pa.BufferOutputStream()
    for table in (columns_of_tensors, columns_of_files, columns_of_chunks):
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


def read_sidecar(source: Source) -> Sidecar | str | None:
    """The sidecar; a sentence that says why it is not used; None where there is none or it would not pay.

    Two requests, one of them for ``.metadata``, which is not parsed.
    """
    listing = source.listing
    if SIDECAR_NAME not in listing or listing.sizes.get(METADATA_NAME, 0) < _MIN_METADATA_NBYTES:
        return None
    import pyarrow as pa

    metadata, data = source.read_wholes((METADATA_NAME, SIDECAR_NAME))
    ignored = f"{SIDECAR_NAME} is not used"
    try:
        stream = pa.BufferReader(data)
        tensors = pa.ipc.open_stream(stream).read_all()
        described = json.loads((tensors.schema.metadata or {})[_KEY])
        if described["schema"] != _SCHEMA:
            return f"{ignored}: it is of schema {described['schema']}, expected {_SCHEMA}"
        if described["metadata_nbytes"] != len(metadata) or (described["metadata_sha256"] != _sha256(metadata)):
            return f"{ignored}: {METADATA_NAME} is not the one that it was made of"
        files = pa.ipc.open_stream(stream).read_all()
        chunks = pa.ipc.open_stream(stream).read_all()
        found = _sidecar(described, tensors, files, chunks)
    except (pa.ArrowException, CkptError, AttributeError, LookupError, OSError, TypeError, ValueError) as error:
        return f"{ignored}: it is damaged ({error})"
    for entry in found.tables.files:
        if listing.sizes.get(entry.path) != entry.nbytes:
            return f"{ignored}: {entry.path} has not the length that it knows"
    return found


def _sidecar(described: Mapping[str, Any], tensors: Any, files: Any, chunks: Any) -> Sidecar:
    shapes = tensors["shape"].to_pylist()
    width = max(map(len, shapes), default=0)
    paths = tuple(text and tuple(json.loads(text)) for text in tensors["path"].to_pylist())
    fqns = tuple(tensors["fqn"].to_pylist())
    names = tensors["dtype"].to_pylist()
    table = TensorTable(
        fqns=fqns,
        dtypes=tuple(map(DTYPES.__getitem__, names)),
        shape=pad_shapes(shapes, width, 1),
        ndim=np.array([len(shape) for shape in shapes], dtype=np.int8),
        section=tensors["section"].to_numpy().astype(np.int8),
        paths=None if None in paths else paths,
    )
    entries = zip(files["path"].to_pylist(), files["nbytes"].to_pylist(), strict=True)
    file_table = FileTable(tuple(FileEntry(path, nbytes) for path, nbytes in entries))
    ranks = np.array([rank_of(path) for path in file_table.paths], dtype=np.int32)
    file = chunks["file"].to_numpy()
    chunk_table = ChunkTable.from_columns(
        tensor=chunks["tensor"].to_numpy(),
        offsets=_unfixed(chunks["offsets"], width),
        sizes=_unfixed(chunks["sizes"], width),
        file=file,
        offset=chunks["item_offset"].to_numpy(),
        length=chunks["item_length"].to_numpy(),
        rank=ranks[file] if len(file) else None,
        flags=np.full(len(file), ChunkFlag.UNRESOLVED, dtype=np.uint8),
    )
    payload_offset = chunks["payload_offset"].to_numpy()
    _check(table, chunk_table, file_table, payload_offset)
    blobs = tuple(
        Blob(fqn, "torch_save", FileRange(path, int(offset), int(length)), path=tuple(keys))
        for fqn, keys, path, offset, length in described["blobs"]
    )
    facts = Facts(described["version"], described["save_id"], bool(described["is_flattened"]))
    empty = {int(rank): int(n) for rank, n in described["empty"]}
    items = _empty_items(described, len(file_table), has_some=bool(empty))
    return Sidecar(Tables(table, chunk_table, file_table, blobs, empty, items), facts, payload_offset)


def _empty_items(described: Mapping[str, Any], n_files: int, *, has_some: bool) -> ItemTable:
    """Items without elements; a sidecar that does not list them leaves open what else lies in the files."""
    items = ItemTable.of_full(n_files)
    rows = described.get("empty_items")
    if rows is None:
        return items.without_full(range(n_files if has_some else 0))
    file, offset, length = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    if len(file) and not (file.min() >= 0 and file.max() < n_files and offset.min() >= 0 and length.min() >= 0):
        raise ValueError("an item without elements is in no file")
    return items.with_rows(file, offset, length)


def _check(tensors: TensorTable, chunks: ChunkTable, files: FileTable, payload_offset: IntArray) -> None:
    """Raise ValueError where a number points beyond what it points into."""
    if not len(chunks):
        return
    if not (chunks.tensor.min() >= 0 and chunks.tensor.max() < len(tensors)):
        raise ValueError("a chunk is of no tensor")
    if not (chunks.file.min() >= 0 and chunks.file.max() < len(files)):
        raise ValueError("a chunk is in no file")
    shape = tensors.shape[chunks.tensor]
    if ((chunks.offsets < 0) | (chunks.sizes < 1) | (chunks.sizes > shape - chunks.offsets)).any():
        raise ValueError("a chunk is outside of its tensor")
    end = chunks.offset + chunks.length
    payload_end = payload_offset + chunks.volume * tensors.bits[chunks.tensor] // 8
    if ((chunks.offset < 0) | (end > files.nbytes[chunks.file]) | (payload_offset < chunks.offset)).any():
        raise ValueError("an item is outside of its file")
    if (payload_end > end).any():
        raise ValueError("a payload is outside of its item")


def _fixed(columns: IntArray) -> Any:
    """Rows of equal length as one column."""
    import pyarrow as pa

    width = columns.shape[1]
    return (
        pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(columns).reshape(-1)), width)
        if width
        else (pa.nulls(len(columns)))
    )


def _unfixed(column: Any, width: int) -> IntArray:
    n = len(column)
    if not width:
        return np.zeros((n, 0), dtype=np.int64)
    # `values` and not `flatten`, which imports pyarrow.compute: 100 ms.
    flat = np.concatenate([chunk.values.to_numpy() for chunk in column.chunks] or [np.zeros(0, dtype=np.int64)])
    return flat.reshape(n, width)


def _sha256(metadata: bytes) -> str:
    import hashlib  # 3 ms of start-up, and few checkpoints have a sidecar

    return hashlib.sha256(metadata).hexdigest()
