"""A manifest as an Arrow table, and as the bytes of a Parquet file, and back.

One row per chunk: ``fqn dtype section shape offsets sizes file offset length rank flags strides``, so that a query
engine can answer what lies where without this package. Everything that is not a chunk (tensors without chunks, files,
blobs, mesh, notes) is in the table's metadata under ``ckpt.manifest``, as the JSON of ``codec``. pyarrow is imported
when it is needed.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt_tool.errors import FormatError
from ckpt_tool.manifest.codec import to_json, without_chunks
from ckpt_tool.manifest.tables import SECTIONS, ChunkTable, IntArray

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from ckpt_tool.manifest.model import Manifest

__all__ = ["from_arrow", "from_parquet", "to_arrow", "to_parquet"]

_KEY = b"ckpt.manifest"


def to_arrow(manifest: Manifest) -> pa.Table:
    """The table; ``rank`` is null where unknown, ``strides`` is absent when every chunk is packed."""
    import pyarrow as pa

    tensors, chunks = manifest.tensors, manifest.chunks
    ndim = tensors.ndim[chunks.tensor].astype(np.int64)
    dtype_names = list(dict.fromkeys(d.name for d in tensors.dtypes))
    dtype_ids = np.array([dtype_names.index(d.name) for d in tensors.dtypes], dtype=np.int32)
    columns: dict[str, Any] = {
        "fqn": _words(chunks.tensor, tensors.fqns),
        "dtype": _words(dtype_ids[chunks.tensor], dtype_names),
        "section": _words(tensors.section[chunks.tensor].astype(np.int32), SECTIONS),
        "shape": _lists(tensors.shape[chunks.tensor], ndim),
        "offsets": _lists(chunks.offsets, ndim),
        "sizes": _lists(chunks.sizes, ndim),
        "file": _words(chunks.file, manifest.files.paths),
        "offset": pa.array(chunks.offset),
        "length": pa.array(chunks.length),
        "rank": pa.array(chunks.rank, mask=chunks.rank < 0),
        "flags": pa.array(chunks.flags),
    }
    if chunks.strides is not None:
        columns["strides"] = _lists(chunks.strides, ndim)
    described = json.dumps(to_json(manifest, shards=False), separators=(",", ":"))
    return pa.table(columns).replace_schema_metadata({_KEY: described.encode()})


def from_arrow(table: pa.Table) -> Manifest:
    """The manifest that `to_arrow` made ``table`` of, with the same columns.

    Raises:
        FormatError: not such a table.
    """
    import pyarrow as pa

    described = (table.schema.metadata or {}).get(_KEY)
    if described is None:
        raise FormatError(f"expected a table with {_KEY.decode()} in its metadata, which ckpt writes")
    try:
        manifest = without_chunks(json.loads(described))
        return manifest.replace(chunks=_chunks(table, manifest))
    except (ValueError, KeyError, TypeError, IndexError, RecursionError, pa.ArrowException) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"not a manifest: {type(error).__name__}: {error}") from error


def _chunks(table: pa.Table, manifest: Manifest) -> ChunkTable:
    tensors = manifest.tensors
    tensor = _ids(table["fqn"], tensors.fqns)
    ndim = tensors.ndim[tensor].astype(np.int64)
    width = tensors.shape.shape[1]
    rank = table["rank"].combine_chunks().fill_null(-1)
    return ChunkTable.from_columns(
        tensor=tensor,
        offsets=_padded(table["offsets"], ndim, width, 0),
        sizes=_padded(table["sizes"], ndim, width, 1),
        file=_ids(table["file"], manifest.files.paths),
        offset=table["offset"].to_numpy(),
        length=table["length"].to_numpy(),
        rank=rank.to_numpy(zero_copy_only=False),
        flags=table["flags"].to_numpy(),
        strides=_padded(table["strides"], ndim, width, 1) if "strides" in table.column_names else None,
    )


def _words(ids: np.ndarray[Any, Any], words: Sequence[str]) -> Any:
    """A dictionary column: each row names one of ``words``."""
    import pyarrow as pa

    return pa.DictionaryArray.from_arrays(pa.array(ids.astype(np.int32)), pa.array(list(words), pa.string()))


def _ids(column: Any, words: Sequence[str]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """int64[n]: the position of each row's word; the column may have been re-encoded by a file format."""
    import pyarrow as pa
    import pyarrow.compute as pc

    plain = column.cast(pa.string())
    found = pc.index_in(plain, value_set=pa.array(list(words), pa.string())).combine_chunks()
    if found.null_count:
        raise ValueError("a row names a tensor or file that the metadata does not list")
    return np.asarray(found.to_numpy(zero_copy_only=False), dtype=np.int64)


def _lists(padded: IntArray, ndim: IntArray) -> Any:
    """Rows without their padding."""
    import pyarrow as pa

    starts = np.concatenate([[0], np.cumsum(ndim)])
    values = pa.array(padded[np.arange(padded.shape[1]) < ndim[:, None]])
    return pa.LargeListArray.from_arrays(pa.array(starts), values)  # ten million chunks may have 2**31 numbers


def _padded(column: Any, ndim: IntArray, width: int, fill: int) -> IntArray:
    """int64[n, width]: rows with their padding."""
    import pyarrow.compute as pc

    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
    if not np.array_equal(lengths, ndim):
        raise ValueError("a row has not as many numbers as its tensor has dimensions")
    padded = np.full((len(ndim), width), fill, dtype=np.int64)
    padded[np.arange(width) < ndim[:, None]] = pc.list_flatten(column).to_numpy()
    return padded


def to_parquet(manifest: Manifest) -> bytes:
    """The bytes of a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(to_arrow(manifest), sink, compression="zstd")
    return bytes(sink.getvalue().to_pybytes())


def from_parquet(data: bytes) -> Manifest:
    """The manifest in a Parquet file.

    Raises:
        FormatError: not such a file.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(pa.BufferReader(data))
    except (pa.ArrowException, OSError) as error:
        raise FormatError(f"not a Parquet file: {error}") from error
    return from_arrow(table)
