"""A manifest survives JSON, Arrow IPC and Parquet with every column."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tool.dtypes import DTYPES
from ckpt_tool.errors import CkptError, FormatError, UsageError
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.arrow import from_arrow, from_parquet, to_arrow, to_parquet
from ckpt_tool.manifest.codec import SCHEMA, from_json, to_json
from ckpt_tool.manifest.model import Blob, Chunk, FileEntry, FileRange, Manifest, TensorMeta
from ckpt_tool.manifest.tables import ChunkTable, FileTable, TensorTable
from tests.manifest.made import described, manifests


def small() -> Manifest:
    """Two tensors, three chunks."""
    table = TensorTable.from_records(
        [
            TensorMeta("w", DTYPES["bfloat16"], (4, 2), "model", ("model", "w")),
            TensorMeta("s", DTYPES["float32"], (), "other", ("s",)),
        ]
    )
    files = FileTable((FileEntry("a", 100), FileEntry("b", 50)))
    rows = [
        Chunk("w", Box((0, 0), (3, 2)), FileRange("a", 8, 12), None, 0, 0),
        Chunk("w", Box((3, 0), (1, 2)), FileRange("b", 0, 4), None, 0, 1),
        Chunk("s", Box((), ()), FileRange("b", 4, 4), None, 1, None),
    ]
    return Manifest("test", "memory:/x", table, ChunkTable.from_records(rows, table, files), files)


def test_json_is_as_documented() -> None:
    """The schema in words and in one example."""
    assert to_json(small(), shards=True) == {
        "schema": SCHEMA,
        "format": "test",
        "root": "memory:/x",
        "mesh": None,
        "info": {},
        "notes": [],
        "tensors": [
            {
                "fqn": "w", "dtype": "bfloat16", "shape": [4, 2], "nbytes": 16, "section": "model", "chunks": 2,
                "path": ["model", "w"],
            },
            {"fqn": "s", "dtype": "float32", "shape": [], "nbytes": 4, "section": "other", "chunks": 1},
        ],
        "files": [{"path": "a", "nbytes": 100}, {"path": "b", "nbytes": 50}],
        "blobs": [],
        "chunks": [
            {"fqn": "w", "offsets": [0, 0], "sizes": [3, 2], "file": "a", "offset": 8, "length": 12, "rank": 0},
            {"fqn": "w", "offsets": [3, 0], "sizes": [1, 2], "file": "b", "offset": 0, "length": 4, "rank": 1},
            {"fqn": "s", "offsets": [], "sizes": [], "file": "b", "offset": 4, "length": 4, "rank": None, "flags": 1},
        ],
    }  # fmt: skip


@given(manifests())
def test_json_round_trip(manifest: Manifest) -> None:
    """``from_json(to_json(m))`` is ``m``, through text."""
    text = json.dumps(to_json(manifest, shards=True), allow_nan=False)
    assert described(from_json(json.loads(text))) == described(manifest)


@settings(max_examples=40)
@given(manifests())
def test_arrow_and_parquet_round_trip(manifest: Manifest) -> None:
    """Tables, IPC files and Parquet files give back every column with its type."""
    expected = described(manifest)
    assert described(from_arrow(to_arrow(manifest))) == expected
    assert described(from_parquet(to_parquet(manifest))) == expected


def test_a_parquet_file_can_be_queried_without_us() -> None:
    """Columns have plain values: no padding, names in place of numbers, null for an unknown rank."""
    table = to_arrow(small())
    assert table.column_names == [
        "fqn", "dtype", "section", "shape", "offsets", "sizes", "file", "offset", "length", "rank", "flags",
    ]  # fmt: skip
    assert table.to_pylist()[2] == {
        "fqn": "s", "dtype": "float32", "section": "other", "shape": [], "offsets": [], "sizes": [], "file": "b",
        "offset": 4, "length": 4, "rank": None, "flags": 1,
    }  # fmt: skip


def test_rows_may_be_filtered() -> None:
    """A table that lost rows, as a query leaves it, still reads: the chunks are those that are left."""
    table = to_arrow(small())
    kept = from_arrow(table.filter(pa.array([False, True, True])))
    assert kept.chunks.tensor.tolist() == [0, 1]
    assert len(kept.tensors) == 2


def test_without_shards_it_cannot_be_read_back() -> None:
    """The chunks are missing, so nothing could be found."""
    with pytest.raises(UsageError, match="written without its chunks"):
        from_json(to_json(small(), shards=False))


def test_objects_without_a_plain_form_come_back_unloaded() -> None:
    """Their bytes can still be read where they lie."""
    blob = Blob("x", "pickle", FileRange("a", 0, 3), object(), ("x",), is_loaded=True)
    again = from_json(to_json(small().replace(blobs=(blob,)), shards=True))
    assert again.blobs == (Blob("x", "pickle", FileRange("a", 0, 3), None, ("x",)),)


def test_wide_manifests_take_no_loop() -> None:
    """200,000 chunks go to Parquet and back in a moment."""
    base = small()
    n = 200_000
    chunks = base.chunks.take(np.zeros(n, dtype=np.int64)).replace(offset=np.arange(n) * 12)
    again = from_parquet(to_parquet(base.replace(chunks=chunks)))
    assert np.array_equal(again.chunks.offset, chunks.offset)


def test_other_files_are_refused() -> None:
    """Neither noise nor a table of somebody else."""
    with pytest.raises(FormatError, match="not a"):
        from_parquet(b"noise" * 20)
    with pytest.raises(FormatError, match=r"expected a table with ckpt.manifest in its metadata"):
        from_arrow(pa.table({"a": [1]}))


@given(st.data())
def test_damaged_json_is_an_error_of_ours(data: st.DataObject) -> None:
    """Any key removed or replaced gives a manifest or a `CkptError`."""
    found: Any = to_json(small(), shards=True)
    place = found
    while isinstance(place, (dict, list)) and place:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if data.draw(st.booleans()):
            if isinstance(place, dict) and data.draw(st.booleans()):
                del place[key]
            else:
                place[key] = data.draw(st.sampled_from([None, -1, 1 << 70, "x", [], {}, 1.5, [1, 2, 3]]))
            break
        place = place[key]
    try:
        from_json(found)
    except CkptError as error:
        assert error.message  # noqa: PT017 - whether it raises depends on the key


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.replace_schema_metadata({b"ckpt.manifest": b"{"}), "not a manifest: JSONDecodeError"),
        (
            lambda t: t.replace_schema_metadata({b"ckpt.manifest": b"{}"}),
            "not of ckpt-tool/manifest/1: KeyError: 'schema'",
        ),
        (lambda t: t.drop_columns(["offset"]), "not a manifest: KeyError"),
        (
            lambda t: t.set_column(0, "fqn", pa.array(["w", "w", "x"])),
            "names a tensor or file that the metadata does not",
        ),
        (
            lambda t: t.set_column(4, "offsets", pa.array([[0], [0, 0], []])),
            "not as many numbers as its tensor has dim",
        ),
    ],
)
def test_tables_that_were_altered(change: Any, said: str) -> None:
    """Metadata and rows that do not fit each other are an error."""
    with pytest.raises(FormatError, match=said):
        from_arrow(change(to_arrow(small())))


def test_an_unknown_section_is_refused() -> None:
    """Sections are three."""
    found = to_json(small(), shards=True)
    found["tensors"][0]["section"] = "weights"
    with pytest.raises(FormatError, match="'weights' is no section"):
        from_json(found)
