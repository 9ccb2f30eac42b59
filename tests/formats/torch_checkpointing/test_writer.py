"""torch-checkpointing written: placements, safetensors files that the reference library opens, and every bit back."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.dtypes import dtype
from ckpt_tool.errors import LayoutError, Unsupported
from ckpt_tool.formats._torch_file.written import fresh_tensor
from ckpt_tool.formats.base import WriteRequest
from ckpt_tool.formats.torch_checkpointing.grids import Grid, grid_of
from ckpt_tool.formats.torch_checkpointing.metadata import load_metadata
from ckpt_tool.formats.torch_checkpointing.reader import READER
from ckpt_tool.formats.torch_checkpointing.sharding import TensorPlacements
from ckpt_tool.formats.torch_checkpointing.writer import WRITER
from ckpt_tool.geometry.box import Box
from ckpt_tool.geometry.grid import chunk_bounds
from ckpt_tool.manifest.model import Blob, TensorMeta
from ckpt_tool.manifest.tables import TensorTable
from ckpt_tool.storage.open import open_store
from tests.formats.conformance import Truth, all_rows, assemble, source_of
from tests.formats.dcp.written import boxes_of
from tests.formats.torch_checkpointing.real import FAMILY, case

GRID = "fsdp2_tp_2x2"
OPTIONS: dict[str, Any] = {"to": "torch-checkpointing", "default": "replicate", "rank_state": "drop", "durable": False}


def read_all(folder: Path) -> dict[str, Truth]:
    """Every tensor, joined."""
    store, _ = open_store(folder)
    source = source_of(store)
    manifest = READER.read(source)
    assert [finding.message for finding in READER.check(source, manifest)] == []
    chunks = READER.resolve(source, manifest, all_rows(manifest))
    return {fqn: assemble(store, manifest, chunks, fqn) for fqn in manifest.tensors.fqns}


def shared_truth(name: str) -> dict[str, Truth]:
    """The truth without state of single ranks."""
    return {fqn: tensor for fqn, tensor in case(FAMILY / name).truth().items() if "@" not in fqn}


@pytest.mark.parametrize("mesh", [{}, {"dp": 3}, {"tp": 2, "dp": 2}], ids=["one", "dp3", "tp2dp2"])
@pytest.mark.parametrize("name", [GRID, "fsdp2_4r_safetensors", "own_written"])
def test_other_layouts_keep_every_bit(name: str, mesh: dict[str, Any], tmp_path: Path) -> None:
    """Written for other ranks, every tensor reads the same; as many ranks as before keep their own state."""
    reshard(FAMILY / name / "ckpt", tmp_path / "there", **OPTIONS, **mesh)
    expected = case(FAMILY / name).truth() if mesh == {"tp": 2, "dp": 2} else shared_truth(name)
    assert read_all(tmp_path / "there") == expected


def test_odd_tensors_and_objects(tmp_path: Path) -> None:
    """Eight-bit floats, booleans, complex and empty tensors; objects of every kind come back where they were."""
    reshard(FAMILY / "plain_odd/ckpt", tmp_path / "there", **OPTIONS)
    truth = {name.replace("lone_", "model.lone_"): tensor for name, tensor in shared_truth("plain_odd").items()}
    assert read_all(tmp_path / "there") == truth
    source = source_of(open_store(tmp_path / "there")[0])
    manifest = READER.read(source)
    values = {blob.fqn: blob.value for blob in READER.load_blobs(source, manifest, range(len(manifest.blobs)))}
    assert (values["step"], values["conf.a"], values["blob"]) == (12, "ü", b"RAW\x00BYTES")
    assert values["objs.set"] == {1, 2}
    assert values["odd.nested.list.3"] == "s"


def test_files_and_metadata(tmp_path: Path) -> None:
    """Boxes are in safetensors files under their paths; objects are in torch files of every rank; metadata is plain."""
    reshard(FAMILY / GRID / "ckpt", tmp_path / "there", **OPTIONS, dp=3)
    names = sorted(path.name for path in (tmp_path / "there").iterdir())
    expected = [f"{item}_{rank}" for item in ("model", "optimizer") for rank in range(3)]
    assert [name.removesuffix(".safetensors") for name in names if name.endswith(".safetensors")] == expected
    assert [name for name in names if name.startswith("step")] == ["step_0.pt", "step_1.pt", "step_2.pt"]
    with safe_open(tmp_path / "there/model_2.safetensors", framework="np") as file:
        assert file.get_slice("emb.weight").get_shape() == [11, 20]
    metadata = pickle.loads((tmp_path / "there/metadata.pkl").read_bytes())
    assert (metadata["version"], metadata["world_size"]) == ("2.0", 3)
    (group,) = metadata["metadata"]["model"]["nested_path_to_metadata"]['["emb.weight"]']
    assert group == {
        "ranks": (0, 1, 2),
        "sharding_metadata": {
            "type": "DTensorShardingMetadata",
            "data": {
                "global_shape": [37, 20],
                "dtype": "torch.float32",
                "stride": [20, 1],
                "mesh_spec": {
                    "device_type": "cpu", "mesh_shape": (3,), "mesh_data": (0, 1, 2), "mesh_dim_names": None,
                },
                "placements": [{"type": "Shard", "dim": 0}],
            },
        },
    }  # fmt: skip
    groups = torch.load(tmp_path / "there/optimizer_values_1.pt", weights_only=True)
    assert groups["param_groups.emb.weight.lr"] == 0.01


def test_state_of_ranks(tmp_path: Path) -> None:
    """Random states of as many ranks as before are in each one's own file."""
    reshard(FAMILY / GRID / "ckpt", tmp_path / "there", **{**OPTIONS, "rank_state": "keep"}, dp=4)
    for rank in range(4):
        state = torch.load(tmp_path / f"there/train_state_{rank}.pt", weights_only=True)
        assert state["rng"].tolist() == [number + rank for number in range(8)]
        assert (state["rank"], state["tokens"], state["lr"]) == (rank, 48, [0.01, 0.02])


@st.composite
def cut(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[Box, int]]]:
    """A tensor cut as ``torch.chunk`` cuts each of its dimensions, its boxes on ranks in any order."""
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
    pieces = []
    for length in shape:
        bounds = chunk_bounds(length, draw(st.integers(1, 4))).tolist()
        pieces.append([(a, b - a) for a, b in pairwise(bounds) if b > a])
    cells: list[list[tuple[int, int]]] = [[]]
    for one in pieces:
        cells = [[*cell, piece] for cell in cells for piece in one]
    boxes = [Box(tuple(a for a, _ in cell), tuple(n for _, n in cell)) for cell in cells]
    ranks = draw(st.permutations(range(len(boxes))))
    return shape, list(zip(boxes, ranks, strict=True))


@given(cut())
def test_a_grid_says_where_its_boxes_are(made: tuple[tuple[int, ...], list[tuple[Box, int]]]) -> None:
    """What is recorded of a cut gives each rank, read back, the box that it had."""
    shape, boxes = made
    grid = grid_of(shape, boxes)
    assert grid is not None
    meta = TensorMeta("m.w", dtype("int8"), shape, "model", ("m", "w"))
    table = TensorTable.from_records([meta])
    rows = [(0, box.offsets, box.sizes, rank) for box, rank in boxes]
    layout = WRITER.lay_out(WriteRequest(table, boxes_of(table, rows), len(boxes)))
    saved = load_metadata(next(segment.data for segment in layout.segments if segment.path == "metadata.pkl"))
    groups = saved.items["m"].groups["w",]
    for box, rank in boxes:
        placed = TensorPlacements(groups).place(fresh_tensor(0, dtype("int8"), box.sizes), rank)
        assert [piece.box for piece in placed.pieces] == [box]


W = TensorMeta("model.w", dtype("int32"), (5, 2), "model", ("model", "w"))


@pytest.mark.parametrize(
    "boxes",
    [
        [((0, 0), (2, 2), 0), ((2, 0), (3, 2), 1)],
        [((0, 0), (3, 2), 0), ((3, 0), (2, 2), 0)],
        [((0, 0), (3, 2), 0), ((0, 0), (3, 2), 1)],
        [((0, 0), (3, 1), 0), ((0, 1), (5, 1), 1)],
    ],
    ids=["uneven", "one rank twice", "replicas", "no grid"],
)
def test_other_cuts_are_refused(boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...], int]]) -> None:
    """What no placement describes is an error that shows the boxes."""
    assert grid_of((5, 2), [(Box(offsets, sizes), rank) for offsets, sizes, rank in boxes]) is None
    table = TensorTable.from_records([W])
    rows = [(0, offsets, sizes, rank) for offsets, sizes, rank in boxes]
    with pytest.raises(LayoutError, match=r"no placement describes these 2 boxes of \[5, 2\]: \[0:"):
        WRITER.lay_out(WriteRequest(table, boxes_of(table, rows), 2))


def test_whole_and_empty_tensors() -> None:
    """A whole tensor is replicated on a mesh of its one rank; an empty one is an entry without bytes."""
    assert grid_of((5, 2), [(Box((0, 0), (5, 2)), 3)]) == Grid((1,), (3,), ())
    none = TensorMeta("model.none", dtype("int32"), (0, 2), "model", ("model", "none"))
    table = TensorTable.from_records([W, none])
    layout = WRITER.lay_out(WriteRequest(table, boxes_of(table, [(0, (0, 0), (5, 2), 1)]), 2))
    assert layout.manifest.files.paths == ("model_0.safetensors", "model_1.safetensors", "metadata.pkl")
    assert layout.commit_path == "metadata.pkl"
    assert np.array_equal(layout.manifest.chunks.file, [1])


@pytest.mark.parametrize(
    ("metas", "rows", "kind", "message"),
    [
        ([W], [(0, (0, 0), (5, 2), 2)], LayoutError, "a box is of rank 2, the target has 2"),
        ([W], [], LayoutError, "no box of the tensor is to be stored"),
        (
            [W, TensorMeta("x", dtype("int32"), (1,), "model", ("model", "a", "b")),
             TensorMeta("y", dtype("int32"), (1,), "model", ("model", "a.b"))],
            [(0, (0, 0), (5, 2), 0), (1, (0,), (1,), 0), (2, (0,), (1,), 0)],
            Unsupported,
            "two tensors called 'a.b'",
        ),
        (
            [TensorMeta("s.rng@rank4", dtype("uint8"), (1,), "other", ("s", "rng@rank4"))],
            [(0, (0,), (1,), 0)],
            LayoutError,
            "state of rank 4, the target has 2",
        ),
        (
            [TensorMeta("s.rng@rank1", dtype("uint8"), (2,), "other", ("s", "rng@rank1"))],
            [(0, (0,), (1,), 0), (0, (1,), (1,), 1)],
            LayoutError,
            "state of one rank is whole, but this has 2 boxes",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(
    metas: list[TensorMeta], rows: list[tuple[int, Any, Any, int]], kind: type[Exception], message: str
) -> None:
    """One error each, before anything is written."""
    table = TensorTable.from_records(metas)
    with pytest.raises(kind, match=message):
        WRITER.lay_out(WriteRequest(table, boxes_of(table, rows), 2))


def test_objects_alone_need_no_metadata() -> None:
    """Without tensors there is nothing to place: a torch file per rank."""
    table = TensorTable.from_records([])
    blobs = (Blob("step", "value", None, 7, ("step",), is_loaded=True),)
    layout = WRITER.lay_out(WriteRequest(table, boxes_of(table, []), 2, blobs=blobs))
    assert (layout.manifest.files.paths, layout.commit_path) == (("step_0.pt", "step_1.pt"), None)
