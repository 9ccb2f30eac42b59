"""Chunks as numcodecs and zarr's own codecs code them: made here by those codings, and read as arrays.

Blosc's containers are c-blosc's own, see ``tests/storage/virtual/test_blosc.py``; TensorStore's are in
``tests/consumers/test_orbax.py``.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import zlib
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ckpt_tool.errors import Unsupported
from ckpt_tool.formats.orbax.reader import READER
from ckpt_tool.storage.memory import MemoryStore
from ckpt_tool.storage.virtual.decode import open_files
from tests.formats.conformance import source_of
from tests.storage.virtual.test_blosc import DATA, container, lz4

ARRAY = np.frombuffer(DATA, "<i4").reshape(20, 30)


def shuffled(data: bytes, width: int = 4) -> bytes:
    """Bytes of elements put together."""
    return np.frombuffer(data, np.uint8).reshape(-1, width).T.tobytes()


def read(files: dict[str, bytes], shape: tuple[int, ...] = ARRAY.shape) -> np.ndarray[Any, Any]:
    """The only array of a step, from its boxes, which may have strides."""
    store = MemoryStore({"_CHECKPOINT_METADATA": b"{}", "_METADATA": b'{"tree_metadata": {}}', **files})
    manifest = READER.read(source_of(store))
    opened = open_files(store, manifest.files, 1 << 20)
    found = np.zeros(shape, dtype="<i4")
    for row in range(len(manifest.chunks)):
        record = manifest.chunks.record(row, manifest.tensors, manifest.files)
        data = opened.read(record.where.path, record.where.offset, record.where.length)
        strides = None if record.strides is None else [4 * stride for stride in record.strides]
        found[record.box.slices] = np.ndarray(record.box.sizes, "<i4", data, strides=strides)
    return found


def version2(chunk: bytes, **fields: Any) -> dict[str, bytes]:
    """An array of one chunk in zarr 2."""
    document = {"zarr_format": 2, "shape": [20, 30], "chunks": [20, 30], "dtype": "<i4", "order": "C", **fields}
    return {"w/.zarray": json.dumps(document).encode(), "w/0.0": chunk}


def version3(chunk: bytes, *codecs: dict[str, Any]) -> dict[str, bytes]:
    """An array of one chunk in zarr 3."""
    document = {
        "zarr_format": 3, "node_type": "array", "shape": [20, 30], "data_type": "int32", "codecs": codecs,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [20, 30]}},
        "chunk_key_encoding": {"name": "default"},
    }  # fmt: skip
    return {"w/zarr.json": json.dumps(document).encode(), "w/c/0/0": chunk}


BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
CODED = {
    "blosc": bytes(container("lz4", 1)),
    "lz4": lz4(DATA),
    "bz2": bz2.compress(DATA),
    "lzma": lzma.compress(DATA),
    "gzip": gzip.compress(DATA),
    "zlib": zlib.compress(DATA),
    "zstd": bytes(pa.compress(DATA, "zstd", asbytes=True)),
}


@pytest.mark.parametrize("name", CODED)
def test_compressions(name: str) -> None:
    """In zarr 2 by their id, in zarr 3 by their name and by numcodecs'."""
    assert np.array_equal(read(version2(CODED[name], compressor={"id": name})), ARRAY)
    assert np.array_equal(read(version3(CODED[name], BYTES, {"name": f"numcodecs.{name}", "configuration": {}})), ARRAY)
    if name in ("blosc", "gzip", "zstd"):
        assert np.array_equal(read(version3(CODED[name], BYTES, {"name": name})), ARRAY)


def test_filters_in_front_of_a_compression() -> None:
    """They are undone last to first; one that only rounds has nothing to undo."""
    filters = [{"id": "bitround", "keepbits": 10}, {"id": "shuffle", "elementsize": 4}]
    found = read(version2(lz4(shuffled(DATA)), filters=filters, compressor={"id": "lz4"}))
    assert np.array_equal(found, ARRAY)
    shuffle = {"name": "numcodecs.shuffle", "configuration": {"elementsize": 4}}
    coded = zlib.compress(shuffled(DATA))
    assert np.array_equal(read(version3(coded, BYTES, shuffle, {"name": "numcodecs.zlib"})), ARRAY)


@pytest.mark.parametrize("is_packed", [False, True])
def test_columns_first(is_packed: bool) -> None:
    """Order F of zarr 2, and the transposition of zarr 3: strides, in a chunk that the array's end cuts too."""
    packed = zlib.compress if is_packed else bytes
    data = np.zeros((20, 40), "<i4")
    data[:, :30] = ARRAY
    columns = packed(data.tobytes(order="F"))
    compressor = {"id": "zlib"} if is_packed else None
    assert np.array_equal(read(version2(columns, order="F", chunks=[20, 40], compressor=compressor)), ARRAY)
    turned = {"name": "transpose", "configuration": {"order": [1, 0]}}
    after = [{"name": "numcodecs.zlib"}] if is_packed else []
    assert np.array_equal(read(version3(packed(ARRAY.tobytes(order="F")), turned, BYTES, *after)), ARRAY)


def test_a_transposition_of_three_dimensions() -> None:
    """Its order names, from slow to fast, the array's dimensions."""
    cube = ARRAY.reshape(4, 5, 30)
    files = version3(
        cube.transpose(2, 0, 1).tobytes(), {"name": "transpose", "configuration": {"order": [2, 0, 1]}}, BYTES
    )
    document = json.loads(files["w/zarr.json"])
    document["shape"] = document["chunk_grid"]["configuration"]["chunk_shape"] = [4, 5, 30]
    found = read({"w/zarr.json": json.dumps(document).encode(), "w/c/0/0/0": files["w/c/0/0"]}, (4, 5, 30))
    assert np.array_equal(found, cube)


@pytest.mark.parametrize(
    ("codecs", "message"),
    [
        ([{"name": "transpose", "configuration": {"order": [0, 0]}}, BYTES], r"in the order \[0, 0\]"),
        ([BYTES, {"name": "crc32c"}, {"name": "gzip"}], "at most a crc32c behind"),
        ([BYTES, {"name": "numcodecs.delta"}], "coded with 'delta'"),
        ([{"name": "gzip"}], "expected bytes"),
    ],
)
def test_chains_that_are_not_known(codecs: list[dict[str, Any]], message: str) -> None:
    """They are named."""
    with pytest.raises(Unsupported, match=message):
        read(version3(DATA, *codecs))
