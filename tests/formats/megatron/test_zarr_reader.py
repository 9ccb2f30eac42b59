"""The zarr reader on a checkpoint of real mcore 0.12, and on arrays that it must refuse."""

from __future__ import annotations

import json

import pytest

from ckpt_tool.errors import FormatError, Unsupported
from ckpt_tool.formats.megatron.zarr_reader import READER
from ckpt_tool.storage.memory import MemoryStore
from tests.formats.conformance import Case, ReaderTests, Truth, all_rows, assemble, source_of, stored_bytes
from tests.formats.megatron.places import CHECKPOINTS, dense_shapes, truth_from_seed

CHECKPOINT = CHECKPOINTS / "old012_zarr_t2p1d1/ckpt"


class TestMegatronZarr(ReaderTests):
    """The contract of readers."""

    reader = READER
    reader_import = "ckpt_tool.formats.megatron.zarr_reader:READER"
    cases = (
        Case(
            "old012_zarr_t2p1d1",
            CHECKPOINT,
            truth_from_seed(dense_shapes(4, 112)),
            ("optimizer.param_state.*.step",),
            max_read_requests=41,
            max_resolve_requests=0,
        ),
    )


def array_files(data_of: dict[str, bytes], **changes: object) -> dict[str, bytes]:
    """A checkpoint of one array, 3 by 5 bytes in chunks of 2 by 2, its description changed."""
    description = {
        "zarr_format": 2, "shape": [3, 5], "chunks": [2, 2], "dtype": "|u1", "order": "C", "compressor": None,
        "filters": None, "fill_value": None, **changes,
    }  # fmt: skip
    return {
        "metadata.json": b'{"sharded_backend": "zarr", "sharded_backend_version": 1}',
        "w/.zarray": json.dumps(description).encode(),
        **{f"w/{name}": data for name, data in data_of.items()},
    }


WHOLE = {f"{i}.{j}": bytes(range(10 * i + j, 10 * i + j + 4)) for i in range(2) for j in range(3)}


def test_locks_are_no_tensors() -> None:
    """``<key>.sync`` folders, which hold lock files called like chunks, are left out."""
    manifest = READER.read(source_of(MemoryStore(stored_bytes(CHECKPOINT))))
    assert not any("sync" in name for name in (*manifest.tensors.fqns, *manifest.files.paths))


def test_chunks_are_whole_where_the_array_ends() -> None:
    """A chunk at the edge is stored whole; only the part inside the array is the tensor's."""
    store = MemoryStore(array_files(WHOLE))
    manifest = READER.read(source_of(store))
    expected = bytes([0, 1, 1, 2, 2, 2, 3, 3, 4, 4, 10, 11, 11, 12, 12])
    assert assemble(store, manifest, manifest.chunks, "model.w") == Truth("uint8", (3, 5), expected)
    assert len(READER.resolve(source_of(store), manifest, all_rows(manifest))) == 6


def test_missing_chunk_is_found() -> None:
    """A chunk file that is missing is an error of the checkpoint: there is no fill value."""
    source = source_of(MemoryStore(array_files({name: data for name, data in WHOLE.items() if name != "1.1"})))
    findings = list(READER.check(source, READER.read(source)))
    assert [f.message for f in findings if "common.pt" not in f.message] == ["w/1.1 is missing, a chunk of 'model.w'"]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"compressor": {"id": "zlib", "level": 1}}, Unsupported),
        ({"order": "F"}, Unsupported),
        ({"dtype": "<c8"}, Unsupported),
        ({"zarr_format": 3}, Unsupported),
        ({"chunks": [2, 0]}, FormatError),
        ({"chunks": [2]}, FormatError),
        ({"shape": [-3, 5]}, FormatError),
        ({"dtype": "<f4"}, FormatError),
    ],
)
def test_other_arrays_are_refused(changes: dict[str, object], error: type[Exception]) -> None:
    """What mcore did not write, or what contradicts itself, is an error."""
    with pytest.raises(error):
        READER.read(source_of(MemoryStore(array_files(WHOLE, **changes))))
