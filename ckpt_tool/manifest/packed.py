"""A manifest as raw columns behind a JSON head: what processes of one run hand to each other, no file format.

Reading back makes no copy of the columns: they stay where they are, in shared memory or in a received buffer.
"""

from __future__ import annotations

import json
from dataclasses import astuple, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt_tool.dtypes import DTYPES, DType
from ckpt_tool.errors import FormatError
from ckpt_tool.manifest.codec import to_json, without_chunks
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.tables import ChunkTable, TensorTable

__all__ = ["from_packed", "to_packed"]

_ALIGNMENT = 8
_CHUNK_COLUMNS = tuple(field.name for field in fields(ChunkTable))


def to_packed(manifest: Manifest) -> list[bytes | npt.NDArray[np.uint8]]:
    """Parts that make up the packed manifest, laid end to end; values of blobs are carried as `codec` carries them."""
    tensors, chunks = manifest.tensors, manifest.chunks
    rest = to_json(manifest.replace(tensors=tensors.take([]), chunks=chunks.take([])), shards=False)
    dtypes, of_tensor = tensors.kinds
    columns: dict[str, npt.NDArray[Any]] = {
        "tensors.dtype": of_tensor.astype(np.int32),
        "tensors.shape": tensors.shape,
        "tensors.ndim": tensors.ndim,
        "tensors.section": tensors.section,
    }
    columns |= {f"chunks.{name}": column for name in _CHUNK_COLUMNS if (column := getattr(chunks, name)) is not None}
    head = {
        "rest": rest,
        "fqns": tensors.fqns,
        "paths": tensors.paths,
        "dtypes": [astuple(dtype) for dtype in dtypes],
        "columns": {name: [column.dtype.str, column.shape] for name, column in columns.items()},
    }
    text = json.dumps(head, separators=(",", ":")).encode()
    parts: list[bytes | npt.NDArray[np.uint8]] = [len(text).to_bytes(_ALIGNMENT, "little"), text, _padding(len(text))]
    for column in columns.values():
        data = np.ascontiguousarray(column).reshape(-1).view(np.uint8)
        parts += [data, _padding(len(data))]
    return parts


def from_packed(data: npt.NDArray[np.uint8]) -> Manifest:
    """The manifest that `to_packed` made ``data`` of; its columns are views of ``data``.

    Raises:
        FormatError: not such data.
    """
    try:
        n_text = int.from_bytes(data[:_ALIGNMENT].tobytes(), "little")
        head = json.loads(data[_ALIGNMENT : _ALIGNMENT + n_text].tobytes())
        at = _ALIGNMENT + n_text + len(_padding(n_text))
        columns: dict[str, npt.NDArray[Any]] = {}
        for name, (kind, shape) in head["columns"].items():
            dtype = np.dtype(kind)
            nbytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            columns[name] = data[at : at + nbytes].view(dtype).reshape(shape)
            at += nbytes + len(_padding(nbytes))
        dtypes = [DTYPES[row[0]] if DTYPES.get(row[0]) == DType(*row) else DType(*row) for row in head["dtypes"]]
        paths = head["paths"]
        tensors = TensorTable(
            fqns=tuple(head["fqns"]),
            dtypes=tuple(dtypes[number] for number in columns["tensors.dtype"].tolist()),
            shape=columns["tensors.shape"],
            ndim=columns["tensors.ndim"],
            section=columns["tensors.section"],
            paths=None if paths is None else tuple(tuple(path) for path in paths),
        )
        chunks = ChunkTable(**{name: columns.get(f"chunks.{name}") for name in _CHUNK_COLUMNS})  # type: ignore[arg-type]
        return without_chunks(head["rest"]).replace(tensors=tensors, chunks=chunks)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"not a packed manifest: {type(error).__name__}: {error}") from error


def _padding(nbytes: int) -> bytes:
    return bytes(-nbytes % _ALIGNMENT)
