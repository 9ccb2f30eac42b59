"""A manifest as JSON and back.

Schema ``ckpt-tool/manifest/1``; keys marked ? are absent where they would say nothing new::

    schema      "ckpt-tool/manifest/1"
    format      name of the reader
    root        URL that file paths are relative to
    mesh        null or {"axes": [..], "sizes": [..], "evidence": text}
    info        what else the format says
    notes       [text]
    tensors     [{"fqn", "dtype", "shape", "nbytes", "section", "chunks": how many, "path"?, "type"?}]
    files       [{"path", "nbytes" (-1 unknown), "codec"?, "part"?}]
    blobs       [{"fqn", "kind", "path", "rank"?, "where"?, "within"?, "value"? (see plain.py)}]
    chunks?     [{"fqn", "offsets", "sizes", "file", "offset", "length", "rank" (null unknown), "flags"?, "strides"?}]

``offsets``, ``sizes`` and ``strides`` are in elements, ``offset`` and ``length`` in bytes of ``file``. ``part`` and
``where`` are ``{"file", "offset", "length"}``. ``type`` is there for element types that are not in `dtypes.DTYPES`:
``{"bits", "kind", "safetensors"?, "storage"?, "numpy"?}``. Values of blobs are carried as far as they are loaded and
plain; other blobs come back not loaded. ``codec`` tells nothing of Arrow: see ``arrow``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ckpt_tool.dtypes import DTYPES, DType
from ckpt_tool.errors import FormatError, Unsupported, UsageError
from ckpt_tool.manifest.model import Blob, FileEntry, FileRange, KeyPath, Manifest, MeshInfo, TensorMeta
from ckpt_tool.manifest.plain import from_plain, to_plain
from ckpt_tool.manifest.tables import SECTIONS, ChunkTable, FileTable, TensorTable, pad_shapes

__all__ = ["SCHEMA", "from_json", "to_json", "without_chunks"]

SCHEMA = "ckpt-tool/manifest/1"
_DTYPE_FIELDS = ("safetensors", "storage", "numpy")


def to_json(manifest: Manifest, *, shards: bool) -> dict[str, Any]:
    """``manifest`` as JSON-able data; ``shards`` adds every chunk, without which it cannot be read back whole."""
    found = _header_json(manifest)
    if shards:
        found["chunks"] = _chunks_json(manifest)
    return found


def _header_json(manifest: Manifest) -> dict[str, Any]:
    counts = np.bincount(manifest.chunks.tensor, minlength=len(manifest.tensors)).tolist()
    mesh = manifest.mesh
    return {
        "schema": SCHEMA,
        "format": manifest.format,
        "root": manifest.root,
        "mesh": mesh and {"axes": list(mesh.axes), "sizes": list(mesh.sizes), "evidence": mesh.evidence},
        "info": dict(manifest.info),
        "notes": list(manifest.notes),
        "tensors": [_tensor_json(meta, n) for meta, n in zip(manifest.tensors, counts, strict=True)],
        "files": [_file_json(entry) for entry in manifest.files],
        "blobs": [_blob_json(blob) for blob in manifest.blobs],
    }


def _tensor_json(meta: TensorMeta, n_chunks: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "fqn": meta.fqn,
        "dtype": meta.dtype.name,
        "shape": list(meta.shape),
        "nbytes": meta.nbytes,
        "section": meta.section,
        "chunks": n_chunks,
    }
    if meta.path != (meta.fqn,):
        found["path"] = list(meta.path)
    if DTYPES.get(meta.dtype.name) != meta.dtype:
        stated = {name: getattr(meta.dtype, name) for name in _DTYPE_FIELDS}
        found["type"] = {"bits": meta.dtype.bits, "kind": meta.dtype.kind, **{k: v for k, v in stated.items() if v}}
    return found


def _range_json(where: FileRange) -> dict[str, Any]:
    return {"file": where.path, "offset": where.offset, "length": where.length}


def _file_json(entry: FileEntry) -> dict[str, Any]:
    found: dict[str, Any] = {"path": entry.path, "nbytes": entry.nbytes}
    if entry.codec is not None:
        found["codec"] = entry.codec
    if entry.part is not None:
        found["part"] = _range_json(entry.part)
    return found


def _blob_json(blob: Blob) -> dict[str, Any]:
    found: dict[str, Any] = {"fqn": blob.fqn, "kind": blob.kind, "path": list(blob.path)}
    if blob.rank is not None:
        found["rank"] = blob.rank
    if blob.where is not None:
        found["where"] = _range_json(blob.where)
    if blob.within:
        found["within"] = list(blob.within)
    if blob.is_loaded:
        with suppress(Unsupported):  # an inert record of a foreign class: its bytes can still be read where they lie
            found["value"] = to_plain(blob.value, blob.fqn)
    return found


def _chunks_json(manifest: Manifest) -> list[dict[str, Any]]:
    chunks, tensors = manifest.chunks, manifest.tensors
    ndims = tensors.ndim[chunks.tensor].tolist()
    fqns, paths = tensors.fqns, manifest.files.paths
    strides = [None] * len(chunks) if chunks.strides is None else chunks.strides.tolist()
    rows = zip(
        chunks.tensor.tolist(), ndims, chunks.offsets.tolist(), chunks.sizes.tolist(), chunks.file.tolist(),
        chunks.offset.tolist(), chunks.length.tolist(), chunks.rank.tolist(), chunks.flags.tolist(), strides,
        strict=True,
    )  # fmt: skip
    found = []
    for tensor, ndim, offsets, sizes, file, offset, length, rank, flags, steps in rows:
        row = {
            "fqn": fqns[tensor], "offsets": offsets[:ndim], "sizes": sizes[:ndim], "file": paths[file],
            "offset": offset, "length": length, "rank": None if rank < 0 else rank,
        }  # fmt: skip
        if flags:
            row["flags"] = flags
        if steps is not None:
            row["strides"] = steps[:ndim]
        found.append(row)
    return found


def from_json(found: Any) -> Manifest:
    """The manifest that `to_json` made ``found`` of, with ``shards=True``.

    Raises:
        FormatError: ``found`` is not of the schema.
        UsageError: it was written without its chunks.
    """
    manifest = without_chunks(found)
    if "chunks" not in found:
        raise UsageError("the manifest was written without its chunks", hint='write it with "--shards"')
    try:
        return manifest.replace(chunks=_chunks(found["chunks"], manifest.tensors, manifest.files))
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise FormatError(f"the chunks are not of {SCHEMA}: {type(error).__name__}: {error}") from error


def without_chunks(found: Any) -> Manifest:
    """As `from_json`, with no chunk rows: what the caller has elsewhere, or does not need.

    Raises:
        FormatError: ``found`` is not of the schema.
    """
    try:
        if found["schema"] != SCHEMA:
            raise FormatError(f"expected schema {SCHEMA!r}, got {found['schema']!r}")
        tensors = TensorTable.from_records(_tensor(fields) for fields in found["tensors"])
        mesh = found["mesh"]
        return Manifest(
            format=found["format"],
            root=found["root"],
            tensors=tensors,
            chunks=_chunks([], tensors, FileTable()),
            files=FileTable(tuple(_file(fields) for fields in found["files"])),
            blobs=tuple(_blob(fields) for fields in found["blobs"]),
            mesh=None if mesh is None else MeshInfo(tuple(mesh["axes"]), tuple(mesh["sizes"]), mesh["evidence"]),
            info=dict(found["info"]),
            notes=tuple(found["notes"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"not of {SCHEMA}: {type(error).__name__}: {error}") from error


def _tensor(fields: Mapping[str, Any]) -> TensorMeta:
    name, detail = fields["dtype"], fields.get("type")
    dtype = DTYPES[name] if detail is None else _dtype(name, detail)
    if fields["section"] not in SECTIONS:
        raise ValueError(f"{fields['section']!r} is no section")
    return TensorMeta(fields["fqn"], dtype, tuple(fields["shape"]), fields["section"], _key_path(fields, fields["fqn"]))


def _dtype(name: str, detail: Mapping[str, Any]) -> DType:
    return DType(name, detail["bits"], detail["kind"], *(detail.get(field) for field in _DTYPE_FIELDS))


def _key_path(fields: Mapping[str, Any], fqn: str) -> KeyPath:
    return tuple(fields["path"]) if "path" in fields else (fqn,)


def _range(fields: Mapping[str, Any]) -> FileRange:
    return FileRange(fields["file"], fields["offset"], fields["length"])


def _file(fields: Mapping[str, Any]) -> FileEntry:
    part = _range(fields["part"]) if "part" in fields else None
    return FileEntry(fields["path"], fields["nbytes"], fields.get("codec"), part)


def _blob(fields: Mapping[str, Any]) -> Blob:
    return Blob(
        fqn=fields["fqn"],
        kind=fields["kind"],
        where=_range(fields["where"]) if "where" in fields else None,
        value=from_plain(fields["value"]) if "value" in fields else None,
        path=tuple(fields["path"]),
        rank=fields.get("rank"),
        is_loaded="value" in fields,
        within=tuple(fields.get("within", ())),
    )


def _chunks(rows: Sequence[Mapping[str, Any]], tensors: TensorTable, files: FileTable) -> ChunkTable:
    width = tensors.shape.shape[1]
    strides = None
    if any("strides" in row for row in rows):
        strides = pad_shapes([row["strides"] for row in rows], width, 1)
    return ChunkTable.from_columns(
        tensor=[tensors.index[row["fqn"]] for row in rows],
        offsets=pad_shapes([row["offsets"] for row in rows], width, 0),
        sizes=pad_shapes([row["sizes"] for row in rows], width, 1),
        file=[files.index[row["file"]] for row in rows],
        offset=[row["offset"] for row in rows],
        length=[row["length"] for row in rows],
        rank=[-1 if row["rank"] is None else row["rank"] for row in rows],
        flags=[row.get("flags", 0) for row in rows],
        strides=strides,
    )
