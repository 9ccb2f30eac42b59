"""Snapshots written from layouts, read back here; torchsnapshot restores them in ``tests/consumers``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.convert.export import export
from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.api.trust.verify import verify
from ckpt_tool.dtypes import DTYPES, DType
from ckpt_tool.errors import LayoutError, Unsupported
from ckpt_tool.formats.torchsnapshot.entries import parse_metadata
from ckpt_tool.formats.torchsnapshot.reader import READER
from ckpt_tool.formats.torchsnapshot.writer import WRITER
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.model import Blob, KeyPath
from tests.formats.conformance import FIXTURES, all_rows, assemble, source_of
from tests.formats.torch_save.laid_out import request_of
from tests.formats.whole_writers import assert_every_dtype_comes_back, written
from tests.formats.zoo import CHECKPOINTS
from tests.reports.made import as_bytes

FP32 = DTYPES["float32"]
KINDS = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
METADATA = ".snapshot_metadata"
TRAINING = FIXTURES / "torch/dcp_fsdp2_4r_fp32/ckpt"


def singles(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Numbers, text and other objects, out of dicts and lists."""
    rows = value.items() if type(value) is dict and value else enumerate(value) if type(value) is list else None
    if rows is None:
        yield path, value
        return
    for key, inner in rows:
        yield from singles(inner, f"{path}.{key}" if path else str(key))


def test_every_dtype_comes_back() -> None:
    """Matrices, scalars and empty tensors of each type that is stored as plain bytes."""
    assert_every_dtype_comes_back(WRITER, READER, KINDS)


def test_objects_are_entries() -> None:
    """Numbers and text stand in the manifest; other objects are torch files; keys keep their kind."""
    values: dict[str, Any] = {
        "lr": 0.1, "step": 7, "done": True, "name": "a/b é", "raw": b"\x00x", "empty": {}, "betas": (0.9, 0.95),
        "nothing": None, "groups": [{"wd": 0.1}, {"wd": 0.2}], "by_id": {0: "a", 5: 1}, "odd": {(1, 2): 3},
    }  # fmt: skip
    blobs = [Blob(f"opt.{name}", "value", None, value, ("opt", name), is_loaded=True) for name, value in values.items()]
    store, _ = written(WRITER, request_of({("model", "a%/b"): (FP32, (2,))}, [(0, Box.whole((2,)), 0)], blobs=blobs))
    rows = json.loads(store.read(METADATA, 0, store.listing().nbytes(METADATA)))["manifest"]
    assert rows["0/model"] == {"type": "dict", "keys": ["a%/b"]}
    assert "0/model/a%25%2Fb" in rows
    assert rows["0/opt/lr"] == {
        "type": "float", "serialized_value": "mpmZmZmZuT8=", "replicated": True, "readable": "0.1",
    }  # fmt: skip
    assert rows["0/opt/done"]["serialized_value"] == "True"
    assert rows["0/opt/by_id"] == {"type": "dict", "keys": [0, 5]}
    assert rows["0/opt/nothing"]["type"] == rows["0/opt/betas"]["type"] == rows["0/opt/odd"]["type"] == "object"
    source = source_of(store)
    manifest = READER.read(source)
    found = {blob.path: blob.value for blob in READER.load_blobs(source, manifest, range(len(manifest.blobs)))}
    assert found == {
        ("opt", "lr"): 0.1, ("opt", "step"): 7, ("opt", "done"): True, ("opt", "name"): "a/b é",
        ("opt", "raw"): b"\x00x", ("opt", "empty"): {}, ("opt", "betas"): (0.9, 0.95), ("opt", "nothing"): None,
        ("opt", "groups", 0, "wd"): 0.1, ("opt", "groups", 1, "wd"): 0.2, ("opt", "by_id", 0): "a",
        ("opt", "by_id", 5): 1, ("opt", "odd"): {(1, 2): 3},
    }  # fmt: skip


def test_entries_of_ranks() -> None:
    """What is cut is listed for each rank if it is an item's own key, else as chunks; state of one rank is its own."""
    halves = [(row, Box((first, 0), (2, 3)), first // 2) for row in (0, 1) for first in (0, 2)]
    tensors: dict[KeyPath, tuple[DType, tuple[int, ...]]] = {
        ("model", "w"): (FP32, (4, 3)), ("optim", "state", 0, "m"): (FP32, (4, 3)), ("rng", "s@rank1"): (FP32, (2,)),
    }  # fmt: skip
    blobs = [Blob("data@rank1", "value", None, 5, ("data@rank1",), is_loaded=True)]
    request = request_of(tensors, [*halves, (2, Box.whole((2,)), 0)], world_size=3, blobs=blobs)
    store, _ = written(WRITER, request)
    rows = json.loads(store.read(METADATA, 0, store.listing().nbytes(METADATA)))["manifest"]
    shards = [[one["offsets"] for one in rows[f"{rank}/model/w"]["shards"]] for rank in range(3)]
    assert shards == [[[0, 0]], [[2, 0]], []]
    assert [path for path in rows if path.endswith("/m")] == ["0/optim/state/0/m"]
    assert rows["0/optim/state/0/m"]["type"] == "ChunkedTensor"
    assert rows["0/optim/state/0/m"]["replicated"]
    assert {path for path in rows if "rng" in path or "data" in path} == {"1/rng", "1/rng/s", "1/data"}
    assert not rows["1/rng/s"]["replicated"]
    assert not rows["1/data"]["replicated"]
    manifest = READER.read(source_of(store))
    chunks = READER.resolve(source_of(store), manifest, all_rows(manifest))
    assert {fqn: assemble(store, manifest, chunks, fqn).shape for fqn in manifest.tensors.fqns} == {
        "model.w": (4, 3), "optim.state.0.m": (4, 3), "rng.s@rank1": (2,),
    }  # fmt: skip


def test_ranks_that_hold_no_shard() -> None:
    """The library lists a sharded tensor on each rank that has it, also with no shard of it."""
    text = json.dumps(
        {"version": "0.1.0", "world_size": 1, "manifest": {"0/m/w": {"type": "ShardedTensor", "shards": []}}}
    )
    assert parse_metadata(text.encode(), METADATA).entries == ()


def test_a_training_state_and_back(tmp_path: Path) -> None:
    """Every tensor and every object, from DCP and to it again, cut over three ranks and over two."""
    reshard(TRAINING, tmp_path / "there", to="torchsnapshot", mesh="dp=3", rank_state="drop", durable=False)
    assert verify(tmp_path / "there", level="full").is_ok
    reshard(tmp_path / "there", tmp_path / "back", to="dcp", mesh="dp=2", durable=False)
    moved = {"extra_fp64": "model.extra_fp64"}  # a weight beside the model: each item of a snapshot has keys
    truth = {moved.get(fqn, fqn): value for fqn, value in as_bytes(TRAINING).items() if "dp_rank" not in fqn}
    assert as_bytes(tmp_path / "back") == as_bytes(tmp_path / "there") == truth
    with open_checkpoint(TRAINING) as one, open_checkpoint(tmp_path / "back") as other:
        assert other.objects() == dict(singles({k: v for k, v in one.objects().items() if "dp_rank" not in k}))


@pytest.mark.parametrize("name", ["torchsnapshot_slabs", "torchsnapshot_files"])
def test_the_librarys_own_and_back(name: str, tmp_path: Path) -> None:
    """A snapshot of two ranks for two ranks: each keeps its own tensors and objects."""
    source = CHECKPOINTS / name / "ckpt"
    reshard(
        source, tmp_path / "there", to="torchsnapshot", mesh="dp=2", default="shard0", exclude=["mine.z"], durable=False
    )
    truth = as_bytes(source)
    del truth["mine.z"]
    assert as_bytes(tmp_path / "there") == truth
    with open_checkpoint(source) as one, open_checkpoint(tmp_path / "there") as other:
        assert other.objects() == one.objects()
        own = [blob for blob in other.manifest.blobs if blob.fqn == "mine.rank"]
        assert [(blob.rank, blob.value) for blob in own] == [(0, 0), (1, 1)]


def test_an_export_is_an_item(tmp_path: Path) -> None:
    """Weights alone are the item ``model``, under the names of its module."""
    export(TRAINING, tmp_path / "there", to="torchsnapshot", include=["model.model.layers.0.*"], durable=False)
    rows = json.loads((tmp_path / "there" / METADATA).read_text("utf-8"))["manifest"]
    assert set(rows["0/model"]["keys"]) == {path.removeprefix("0/model/") for path in rows} - {"0/model"}
    assert "layers.0.mlp.up_proj.weight" in str(rows["0/model"]["keys"])


def test_what_it_has_not() -> None:
    """Types without plain bytes, tensors without a box, boxes of other worlds, objects with tensors inside."""
    one = [(0, Box.whole((2,)), 0)]
    with pytest.raises(Unsupported, match=r"no plain bytes of complex64 \('m\.w'\)"):
        WRITER.lay_out(request_of({("m", "w"): (DTYPES["complex64"], (2,))}, one))
    with pytest.raises(LayoutError, match=r"m\.w: 1 tensor has no box on any rank"):
        WRITER.lay_out(request_of({("m", "w"): (FP32, (2,))}, []))
    with pytest.raises(LayoutError, match="a box is of rank 1, the target has 1"):
        WRITER.lay_out(request_of({("m", "w"): (FP32, (2,))}, [(0, Box.whole((2,)), 1)]))
