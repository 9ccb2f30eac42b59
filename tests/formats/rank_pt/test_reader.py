"""Rank files: the reader's contract on verl, accelerate and FSDP1 files, and what it says of incomplete sets."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_tool.api.trust.diff import diff
from ckpt_tool.api.trust.verify import verify
from ckpt_tool.errors import FormatError
from ckpt_tool.formats.rank_pt.reader import READER
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.optimizer import optimizer_views
from ckpt_tool.storage.local.store import LocalStore
from ckpt_tool.storage.memory import MemoryStore
from ckpt_tool.storage.store import Store
from tests.formats.conformance import (
    FIXTURES,
    Case,
    ReaderTests,
    Truth,
    all_rows,
    assemble,
    source_of,
    stored_bytes,
    truth_of,
)

VERL = FIXTURES / "torch/verl_4r_bf16"
FSDP1 = FIXTURES / "torch/fsdp1_per_rank_pt_2r"
OLD = FIXTURES / "torch/dcp_old_t2.1.2"
ACCELERATE = FIXTURES / "deepspeed/accelerate_ranks"


def verl_truth() -> dict[str, Truth]:
    """Model names as they are, the optimizer's below ``optim``."""
    optimizer = truth_of(VERL / "ckpt/optim_truth", lambda name: f"optim.{name}")()
    return {**truth_of(VERL)(), **optimizer}


def accelerate_name(name: str) -> str:
    """``exp_avg/w`` of the truth is ``optim.state.w.exp_avg``, ``param/w`` is ``w``."""
    kind, _, fqn = name.partition("/")
    return fqn if kind == "param" else f"optim.state.{fqn}.{kind}"


class TestRankFiles(ReaderTests):
    """DTensors of torch 2.13 and 2.1, on meshes of one and two axes, and ShardedTensors."""

    reader = READER
    reader_import = "ckpt_tool.formats.rank_pt.reader:READER"
    cases = (
        Case("verl_4r_bf16", VERL / "ckpt", verl_truth, without_truth=("extra_state.*",), max_read_requests=36),
        Case("verl_2d", FIXTURES / "torch/verl_2d/ckpt", truth_of(FIXTURES / "torch/verl_2d"), max_read_requests=12),
        Case(
            "fsdp1_per_rank_pt_2r",
            FSDP1 / "ckpt",
            truth_of(FSDP1, lambda name: name if name.startswith("model.") else None),
            max_read_requests=6,
        ),
        Case("torch_2.1", OLD, truth_of(OLD / "pt_truth.safetensors"), max_read_requests=12),
        Case(
            "accelerate",
            ACCELERATE / "ckpt",
            truth_of(ACCELERATE, accelerate_name),
            without_truth=("optim.state.*.step",),
            max_read_requests=24,
        ),
    )


def saved(value: Any) -> bytes:
    """The bytes that torch.save writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def read(files: dict[str, bytes]) -> tuple[Store, Manifest, list[Finding]]:
    """A resolved manifest of files in memory, and what there is to say about it."""
    store = MemoryStore(files)
    manifest = READER.read(source_of(store))
    manifest = manifest.replace(chunks=READER.resolve(source_of(store), manifest, all_rows(manifest)))
    return store, manifest, list(READER.check(source_of(store), manifest))


def ranks(make: Callable[[int], Any], world_size: int = 2, kind: str = "model") -> dict[str, bytes]:
    """One verl-style file per rank."""
    return {f"{kind}_world_size_{world_size}_rank_{rank}.pt": saved(make(rank)) for rank in range(world_size)}


def test_mesh_and_world_size_are_told() -> None:
    """The mesh comes from the pickled device mesh, with the names of its axes where these were given."""
    for folder, axes, sizes in (
        ("torch/verl_2d/ckpt", ("dp", "tp"), (2, 2)),
        ("torch/verl_4r_bf16/ckpt", ("fsdp",), (4,)),
        ("torch/dcp_old_t2.1.2", ("axis0", "axis1"), (2, 2)),
    ):
        store = MemoryStore(stored_bytes(FIXTURES / folder))
        manifest = READER.read(source_of(store))
        assert manifest.mesh is not None
        assert (manifest.mesh.axes, manifest.mesh.sizes) == (axes, sizes)
        assert manifest.info["world_size"] == 4


def test_numbers_of_the_optimizer_get_names() -> None:
    """An optimizer of verl numbers parameters; the model files tell their names by order and shape."""
    store = MemoryStore(stored_bytes(VERL / "ckpt"))
    manifest = READER.read(source_of(store))
    names = manifest.info["optimizer_parameters"]
    assert (len(names), names["0"], names["13"]) == (14, "odd53", "lm_head.weight")
    assert any("in exactly one way" in note for note in manifest.notes)
    (view,) = optimizer_views(manifest)
    assert view.named()["lm_head.weight"]["exp_avg"] == "optim.state.13.exp_avg"
    assert view.groups[0].hyperparameters["lr"] == 0.01


def test_names_of_an_accelerate_optimizer_stay() -> None:
    """An accelerate optimizer is keyed by fqn."""
    store = MemoryStore(stored_bytes(ACCELERATE / "ckpt"))
    (view,) = optimizer_views(READER.read(source_of(store)))
    assert (view.spelling, len(view.parameters)) == ("names", 12)
    assert view.parameters["lm_head.weight"]["exp_avg_sq"] == "optim.state.lm_head.weight.exp_avg_sq"


def test_sections_follow_the_kind_of_file() -> None:
    """Model, optimizer and the ranks' own state are told apart."""
    store = MemoryStore(stored_bytes(VERL / "ckpt"))
    manifest = READER.read(source_of(store))
    sections = {meta.fqn: meta.section for meta in manifest.tensors}
    assert sections["odd53"] == "model"
    assert sections["optim.state.0.step"] == "optimizer"
    assert sections["extra_state.rng.cpu@rank3"] == "other"


def test_random_states_are_each_ranks_own() -> None:
    """What an extra_state file holds is kept apart by rank, tensors by name and values by rank."""
    store = MemoryStore(stored_bytes(VERL / "ckpt"))
    manifest = READER.read(source_of(store))
    assert [fqn for fqn in manifest.tensors.fqns if fqn.startswith("extra")] == [
        f"extra_state.rng.cpu@rank{rank}" for rank in range(4)
    ]
    assert [b.rank for b in manifest.blobs if b.fqn == "extra_state.rng.numpy"] == [0, 1, 2, 3]
    assert [b.rank for b in manifest.blobs if b.fqn == "optim.param_groups.0.lr"] == [None]


def test_replicas_carry_their_ranks() -> None:
    """Equal coordinates on sharded dimensions are replicas, as rows of their own with their ranks."""
    store = MemoryStore(stored_bytes(FIXTURES / "torch/verl_2d/ckpt"))
    manifest = READER.read(source_of(store))
    rows = manifest.chunks.rows_of(manifest.tensor_id("r_s1"))
    boxes = [(int(manifest.chunks.rank[row]), str(manifest.chunks.box(int(row), 2))) for row in rows]
    assert boxes == [(0, "[0:3, 0:3]"), (1, "[0:3, 3:5]"), (2, "[0:3, 0:3]"), (3, "[0:3, 3:5]")]
    assert manifest.info["replicated_by_assumption"] == ["plain"]


def test_strided_shards_of_one_dimension_come_out_in_order() -> None:
    """FSDP over TP on one dimension: rank (dp, tp) of w = 97 rows holds rows of tp's half, in dp's part of it."""
    store = MemoryStore(stored_bytes(FIXTURES / "torch/verl_2d/ckpt"))
    manifest = READER.read(source_of(store))
    rows = manifest.chunks.rows_of(manifest.tensor_id("0.weight"))
    assert [str(manifest.chunks.box(int(row), 2)) for row in rows] == [
        "[0:25, 0:24]",
        "[49:73, 0:24]",
        "[25:49, 0:24]",
        "[73:97, 0:24]",
    ]


def test_buffers_are_stored_once_in_the_manifest() -> None:
    """A (1,) buffer of every rank is one tensor of shape (1,), a 0-d one stays 0-d; their copies are replicas."""
    _, manifest, findings = read(ranks(lambda rank: {"count": torch.tensor([7]), "scale": torch.tensor(2.5)}, 4))
    assert [(meta.fqn, meta.shape) for meta in manifest.tensors] == [("count", (1,)), ("scale", ())]
    assert manifest.info["replicated_by_assumption"] == ["count", "scale"]
    assert len(manifest.chunks) == 8
    assert findings == []


def test_same_key_with_different_bytes_is_found() -> None:
    """Plain tensors that differ between ranks are no replicas: an error with both ranks in it."""
    _, _, findings = read(ranks(lambda rank: {"w": torch.full((3,), float(rank)), "b": torch.ones(2)}))
    (finding,) = findings
    assert (finding.kind, finding.severity, finding.fqn) == ("different-replicas", Severity.ERROR, "w")
    assert "same key, different bytes, no placement: 2 distinct values" in finding.message
    assert "rank 0 and rank 1" in finding.message


def test_different_bytes_are_found_without_checksums() -> None:
    """Views of a larger storage have no CRC of their own: their bytes are compared."""
    _, _, findings = read(ranks(lambda rank: {"w": torch.tensor([1.0, 2.0, float(rank)])[:2]}))
    assert findings == []
    _, _, findings = read(ranks(lambda rank: {"w": torch.tensor([1.0, float(rank), 3.0])[:2]}))
    assert [finding.kind for finding in findings] == ["different-replicas"]


def test_same_key_with_different_shapes_is_kept_apart() -> None:
    """Plain tensors of different shapes cannot be replicas: each rank's has its own name, and nothing is lost."""
    store, manifest, findings = read(ranks(lambda rank: {"w": torch.full((rank + 1,), float(rank))}))
    assert [(meta.fqn, meta.shape) for meta in manifest.tensors] == [("w@rank0", (1,)), ("w@rank1", (2,))]
    assert assemble(store, manifest, manifest.chunks, "w@rank1").data == np.ones(2, dtype=np.float32).tobytes()
    assert [finding.kind for finding in findings] == ["different-shapes"]


def test_a_missing_rank_is_named_and_leaves_a_gap(tmp_path: Path) -> None:
    """Without one rank's file the rest is readable; the file is named, and its boxes are missing."""
    for path in (FIXTURES / "torch/verl_2d/ckpt").iterdir():
        if "rank_2" not in path.name:
            shutil.copy(path, tmp_path)
    store = MemoryStore(stored_bytes(tmp_path))
    manifest = READER.read(source_of(store))
    assert manifest.info["missing_files"] == ["model_world_size_4_rank_2.pt"]
    assert "1 rank file is missing: model_world_size_4_rank_2.pt" in manifest.notes
    rows = manifest.chunks.rows_of(manifest.tensor_id("0.weight"))
    assert int(manifest.chunks.sizes[rows, 0].sum()) == 97 - 24
    findings = list(READER.check(source_of(store), manifest))
    assert [finding.severity for finding in findings if finding.kind == "missing-file"] == [Severity.ERROR]


def test_a_missing_last_rank_is_known_from_the_mesh(tmp_path: Path) -> None:
    """Names of accelerate state no world size; the pickled mesh and ShardedTensor's list of shards do."""
    for path in (ACCELERATE / "ckpt").glob("pytorch_model*rank[012].bin"):
        shutil.copy(path, tmp_path)
    store = MemoryStore(stored_bytes(tmp_path))
    assert READER.read(source_of(store)).info["missing_files"] == ["pytorch_model_fsdp_0_rank3.bin"]
    other = tmp_path / "fsdp1"
    other.mkdir()
    shutil.copy(FSDP1 / "ckpt/model_world_size_2_rank_0.pt", other / "weights_rank0.pt")
    store = MemoryStore(stored_bytes(other))
    assert READER.read(source_of(store)).info["missing_files"] == ["weights_rank1.pt"]


def test_exchanged_files_are_read_by_their_contents(tmp_path: Path) -> None:
    """Two files under each other's names still give every row its place, and a warning."""
    folder = FIXTURES / "torch/verl_2d/ckpt"
    for path in folder.iterdir():
        shutil.copy(path, tmp_path)
    shutil.copy(folder / "model_world_size_4_rank_1.pt", tmp_path / "model_world_size_4_rank_2.pt")
    shutil.copy(folder / "model_world_size_4_rank_2.pt", tmp_path / "model_world_size_4_rank_1.pt")
    store = MemoryStore(stored_bytes(tmp_path))
    manifest = READER.read(source_of(store))
    chunks = READER.resolve(source_of(store), manifest, all_rows(manifest))
    truth = truth_of(FIXTURES / "torch/verl_2d")()
    assert {fqn: assemble(store, manifest, chunks, fqn) for fqn in truth} == truth
    kinds = [finding.kind for finding in READER.check(source_of(store), manifest)]
    assert kinds.count("renamed-file") == 2


def test_ranks_that_disagree_about_a_shape_are_refused() -> None:
    """A DTensor says one global shape in one file and another in the next: the error names file and tensor."""
    files = {
        path.name: path.read_bytes()
        for path in (FIXTURES / "torch/dcp_old_t2.1.2").glob("model_world_size_4_rank_*.pt")
    }
    name = "model_world_size_4_rank_1.pt"
    value = {"s0_9x3": torch.zeros(9, 3)}
    files[name] = saved(value)
    with pytest.raises(FormatError, match="with a placement in other files") as caught:
        READER.read(source_of(MemoryStore(files)))
    assert caught.value.where == f"{name}: s0_9x3"


@pytest.mark.parametrize(
    ("names", "confidence"),
    [
        (["model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"], 0.95),
        (["w_rank0.bin", "w_rank1.bin"], 0.8),
        (["zero_pp_rank_0_mp_rank_00_optim_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"], 0.0),
        (["mp_rank_00_model_states.pt"], 0.0),
        (["model.pt"], 0.0),
    ],
)
def test_rank_files_are_known_by_name(names: list[str], confidence: float) -> None:
    """Files of all ranks are taken, those of one axis of a larger mesh are not."""
    files = dict.fromkeys(names, saved({"w": torch.zeros(1)}))
    assert READER.probe(source_of(MemoryStore(files))).confidence == confidence


def test_sets_of_other_world_sizes_are_left_out() -> None:
    """Two sets in one folder: the larger is read, the other one is mentioned."""
    files = ranks(lambda rank: {"w": torch.zeros(2)}, 3) | ranks(lambda rank: {"v": torch.zeros(2)}, 2)
    _, manifest, _ = read(files)
    assert manifest.tensors.fqns == ("w",)
    assert any("left out: 2 files of 2 ranks" in note for note in manifest.notes)


def test_flat_parameters_are_listed_but_not_unflattened() -> None:
    """FSDP1's flat parameters read as what they are, with what is needed to cut them."""
    _, manifest, findings = read(ranks(lambda rank: {"block._flat_param": torch.full((8,), float(rank))}))
    assert manifest.tensors.fqns == ("block._flat_param",)
    assert any("cannot unflatten: need" in note for note in manifest.notes)
    assert "flat-parameter" in [finding.kind for finding in findings]


@pytest.mark.parametrize("folder", ["rank_{}", "rank{}", "ckpt-rank-{:05d}"])
def test_folders_of_ranks(folder: str, tmp_path: Path) -> None:
    """Files that have a rank in the names of their folders are the same as with it in their own."""
    for path in (VERL / "ckpt").glob("*_rank_*.pt"):
        stem, _, rank = path.stem.rpartition("_world_size_4_rank_")
        own = tmp_path / "a" / folder.format(int(rank))
        own.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, own / f"{stem}.pt")
    assert diff(tmp_path / "a", VERL / "ckpt", everything=True).is_same
    lost = tmp_path / "a" / folder.format(2) / "model.pt"
    lost.unlink()
    found = verify(tmp_path / "a")
    assert f"{folder.format(2)}/model.pt" in {each.where.path for each in found.findings if each.where is not None}
    assert not found.is_ok


@pytest.mark.parametrize("folder", ["mp_rank_0{}", "tp-rank{}", "{}", "ranks_{}"])
def test_folders_that_are_none(folder: str, tmp_path: Path) -> None:
    """Ranks of one axis are those of other formats, and a number alone is anything."""
    for rank in range(2):
        (tmp_path / folder.format(rank)).mkdir()
        torch.save({"w": torch.ones(2)}, tmp_path / folder.format(rank) / "model.pt")
    assert READER.probe(source_of(LocalStore(str(tmp_path)))).confidence == 0
