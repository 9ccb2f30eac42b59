"""Columns are aligned, immutable, and say the same as the records that they were made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given

from ckpt_tool.dtypes import DTYPES
from ckpt_tool.errors import FormatError, NotFound
from ckpt_tool.geometry.box import Box
from ckpt_tool.geometry.runs import contiguous_strides
from ckpt_tool.manifest.model import Chunk, FileEntry, FileRange, Manifest, TensorMeta
from ckpt_tool.manifest.tables import ChunkTable, FileTable, TensorTable, pad_shapes
from tests.manifest.made import manifests

W = TensorMeta("w", DTYPES["bfloat16"], (4, 2), "model", ("model", "w"))
S = TensorMeta("s", DTYPES["float32"], (), "other", ("s",))
F6 = TensorMeta("f", DTYPES["float6_e2m3fn"], (3, 1), "optimizer", ("f",))


def columns(**changes: Any) -> ChunkTable:
    """Two chunks of two tensors, some columns replaced."""
    given_columns: dict[str, Any] = {
        "tensor": [0, 1], "offsets": [[0, 0], [0, 0]], "sizes": [[4, 2], [1, 1]], "file": [0, 0], "offset": [0, 16],
        "length": [16, 4],
    }  # fmt: skip
    return ChunkTable.from_columns(**{**given_columns, **changes})


@given(manifests())
def test_tables_are_their_records(manifest: Manifest) -> None:
    """``from_records(records)`` gives the records back, tensors and chunks."""
    tensors, chunks, files = manifest.tensors, manifest.chunks, manifest.files
    assert TensorTable.from_records(tensors).fqns == tensors.fqns
    assert list(TensorTable.from_records(tensors)) == list(tensors)
    records = [chunks.record(row, tensors, files) for row in range(len(chunks))]
    again = ChunkTable.from_records(records, tensors, files)
    assert [again.record(row, tensors, files) for row in range(len(again))] == records


@given(manifests())
def test_rows_of_a_tensor_are_all_its_rows(manifest: Manifest) -> None:
    """``rows_of`` parts the table: every row once, in table order."""
    chunks = manifest.chunks
    found = [chunks.rows_of(tensor).tolist() for tensor in range(len(manifest.tensors))]
    assert sorted(row for rows in found for row in rows) == list(range(len(chunks)))
    for tensor, rows in enumerate(found):
        assert rows == np.flatnonzero(chunks.tensor == tensor).tolist()


def test_sizes_count_elements_and_bytes() -> None:
    """Padding behind changes no volume; sub-byte elements round up to a whole byte."""
    table = TensorTable.from_records([W, S, F6])
    assert table.shape.tolist() == [[4, 2], [1, 1], [3, 1]]
    assert table.numel.tolist() == [8, 1, 3]
    assert table.nbytes.tolist() == [W.nbytes, S.nbytes, F6.nbytes] == [16, 4, 3]
    assert table.bits.tolist() == [16, 32, 6]
    assert columns().volume.tolist() == [8, 1]


def test_take_narrows_to_the_rows_named() -> None:
    """Rows come in the order asked for, with no more padding than they need."""
    table = TensorTable.from_records([W, S, F6])
    taken = table.take([1])
    assert (taken.fqns, taken.shape.shape, list(taken)) == (("s",), (1, 0), [S])
    assert list(table.take([2, 0])) == [F6, W]
    assert columns().take([1, 0, 1]).tensor.tolist() == [1, 0, 1]


def test_columns_cannot_be_changed() -> None:
    """A table is a value: writing to a column is refused, ``replace`` makes another table."""
    table = columns()
    with pytest.raises(ValueError, match="read-only"):
        table.offset[0] = 7
    assert table.replace(offset=np.array([5, 6])).offset.tolist() == [5, 6]
    assert table.offset.tolist() == [0, 16]


def test_misaligned_columns_are_refused() -> None:
    """Every column has one entry per row."""
    with pytest.raises(FormatError, match="chunk columns differ in length"):
        columns(file=[0])
    with pytest.raises(FormatError, match="tensor columns differ in length"):
        TensorTable(("w",), (), pad_shapes([(1,)], 1, 1), np.array([1], np.int8), np.array([0], np.int8))


def test_a_name_listed_twice_is_refused() -> None:
    """And named."""
    with pytest.raises(FormatError, match="tensor 'w' is listed twice"):
        TensorTable.from_records([W, S, W])


def test_packed_strides_are_no_strides() -> None:
    """A record says None for a packed box, and the strides otherwise; an unknown rank is None too."""
    tensors, files = TensorTable.from_records([W, S]), FileTable((FileEntry("a", 99),))
    where = FileRange("a", 0, 16)
    rows = [
        Chunk("w", Box((0, 0), (4, 2)), where, (1, 4), 0, 3),
        Chunk("w", Box((0, 0), (4, 2)), where, contiguous_strides((4, 2)), 0, None),
    ]
    table = ChunkTable.from_records(rows, tensors, files)
    assert [table.record(row, tensors, files).strides for row in range(2)] == [(1, 4), None]
    assert [table.record(row, tensors, files).rank for row in range(2)] == [3, None]
    assert table.box(0, 2) == Box((0, 0), (4, 2))


def test_empty_tables() -> None:
    """Nothing is a table too."""
    none = ChunkTable.from_columns(tensor=[], offsets=[], sizes=[], file=[], offset=[], length=[])
    assert (len(none), none.rows_of(0).tolist(), none.volume.tolist()) == (0, [], [])
    assert (len(TensorTable.from_records([])), len(FileTable())) == (0, 0)


def test_a_name_that_is_not_there_brings_near_ones() -> None:
    """The hint of `Manifest.tensor` is a name that exists, or the command that lists them."""
    table = TensorTable.from_records([TensorMeta("layers.0.weight", DTYPES["uint8"], (1,), "model", ("x",))])
    none = ChunkTable.from_columns(tensor=[], offsets=[], sizes=[], file=[], offset=[], length=[])
    manifest = Manifest("test", "here", table, none, FileTable((FileEntry("a", 1),)))
    assert manifest.tensor("layers.0.weight").path == ("x",)
    with pytest.raises(NotFound, match=r"no tensor 'layers.0.wieght' among 1") as caught:
        manifest.tensor("layers.0.wieght")
    assert caught.value.hint == "did you mean layers.0.weight"
    with pytest.raises(NotFound) as caught:
        manifest.tensor("zzz")
    assert caught.value.hint == 'list the names with "ckpt inspect here"'


def test_files_are_found_by_path() -> None:
    """Rows, sizes and the unknown size."""
    table = FileTable((FileEntry("a", 3), FileEntry("b", -1)))
    assert (table.index, table.nbytes.tolist(), [e.path for e in table]) == ({"a": 0, "b": 1}, [3, -1], ["a", "b"])


def test_refuses_a_tensor_that_no_file_can_hold() -> None:
    """A size that numbers of bytes cannot count is an error where it is claimed, before anything is added up."""
    claimed = [TensorMeta("w", DTYPES["complex128"], (255, 2**31 - 1, 131_587), "model", ("w",))]
    with pytest.raises(FormatError, match=r"'w' of shape .* is claimed, which is larger than any file"):
        TensorTable.from_records(claimed)
