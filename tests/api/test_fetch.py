"""What to fetch again of checkpoints that lack a file, or of which one was cut."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from ckpt_tool.api.trust.fetch import plan_fetch
from ckpt_tool.api.trust.verify import verify
from ckpt_tool.errors import NotFound
from tests.formats.conformance import FIXTURES
from tests.formats.megatron.places import CHECKPOINTS as MEGATRON
from tests.formats.zoo import CHECKPOINTS

PART = "model/model/decoder/0/pp_block/attn/o_proj/model_weight_pp-rank-0-of-1_tp-rank-0-of-2.safetensors"
NORM = "model/model/decoder/0/pp_block/input_layernorm/model_weight"
EXTRA = "iter_0000010/decoder.layers.mlp.linear_fc2._extra_state"
STATES = "global_step3/mp_rank_00_model_states.pt"
LOST = (
    ("torch/hf_sharded", "model.safetensors.index.json"),
    ("torch/hf_pytorch_bin", "pytorch_model.bin.index.json"),
    ("torch/dcp_fsdp2_tp_2x2", ".metadata"),
    ("torch/dcp_no_collectives", "__2.metadata"),
    ("bytecheckpoint/hsdp_4r", "global_step_2/extra_state/extra_state_rank_1.pt"),
    ("deepspeed/ds_z2_bf16", STATES),
    ("deepspeed/peft_lora", "adapter_config.json"),
    ("zoo/torchsnapshot_files", ".snapshot_metadata"),
    ("zoo/nanotron_tp2_dp2", "checkpoint_metadata.json"),
    ("zoo/nanotron_tp2_dp2", PART),
    ("zoo/nanotron_tp2_dp2", "optimizer/optimizer_config.json"),
    ("zoo/orbax_files", "params.emb.embedding/0.0"),
    ("zoo/orbax_files", "step/.zarray"),
    ("zoo/orbax_zarr2", "_strings.json"),
    ("zoo/orbax_default", "_CHECKPOINT_METADATA"),
    ("torch_checkpointing/fsdp2_4r_safetensors", "metadata.pkl"),
    ("megatron/old012_zarr_t2p1d1", f"{EXTRA}/shard_3_4.pt"),
    ("megatron/td_full_t2p2d2", "iter_0000010/metadata.json"),
)
CUT = (
    ("bytecheckpoint/hsdp_4r", "global_step_2/model/.metadata", (0, 0)),
    ("deepspeed/ds_z2_bf16", STATES, (0, 0)),
    ("zoo/torchsnapshot_files", ".snapshot_metadata", (0, 0)),
    ("zoo/nanotron_tp2_dp2", f"{NORM}.safetensors", (0, 0)),
    ("torch_checkpointing/fsdp2_4r_safetensors", "metadata.pkl", (0, 0)),
    ("megatron/td_full_t2p2d2", "iter_0000010/metadata.json", (0, 0)),
    ("megatron/td_full_t2p2d2", "iter_0000010/.metadata", (0, 0)),
)
EMPTIED = (
    ("zoo/orbax_files", "lst.0/2.0"),
    ("zoo/orbax_zarr2", "_METADATA"),
    ("torch_checkpointing/fsdp2_tp_2x2", "metadata.pkl"),
    ("deepspeed/accelerate_fsdp2", "pytorch_model_fsdp_0/.metadata"),
)


def copied(name: str, folder: Path) -> Path:
    """The files of a fixture, linked."""
    kind, _, own = name.partition("/")
    place = {"zoo": CHECKPOINTS, "megatron": MEGATRON}.get(kind, FIXTURES / kind) / own
    top = place / "ckpt"
    for mark in (".snapshot_metadata", "checkpoint_metadata.json", "_CHECKPOINT_METADATA"):
        top = next((path.parent for path in top.rglob(mark)), top)
    return shutil.copytree(top, folder / "c", copy_function=os.link)


def fetched(folder: Path) -> list[tuple[str, int, int]]:
    """File, offset and length of what is to be fetched."""
    return [(each.path, each.offset, each.length) for each in plan_fetch(folder).ranges]


@pytest.mark.parametrize(("name", "lost"), LOST)
def test_a_file_that_is_missing(name: str, lost: str, tmp_path: Path) -> None:
    """It alone is listed, also where nothing can be read without it."""
    folder = copied(name, tmp_path)
    (folder / lost).unlink()
    assert fetched(folder) == [(lost, 0, 0)]


@pytest.mark.parametrize(("name", "cut", "expected"), CUT)
def test_a_file_that_was_cut(name: str, cut: str, expected: tuple[int, int], tmp_path: Path) -> None:
    """It alone is listed, not what cannot be told without it."""
    folder = copied(name, tmp_path)
    data = (folder / cut).read_bytes()
    (folder / cut).unlink()
    (folder / cut).write_bytes(data[: len(data) * 2 // 3])
    assert fetched(folder) == [(cut, *expected)]


@pytest.mark.parametrize(("name", "emptied"), EMPTIED)
def test_a_file_without_a_byte(name: str, emptied: str, tmp_path: Path) -> None:
    """It is listed as one that was cut is, also one by which the whole is recognised."""
    folder = copied(name, tmp_path)
    (folder / emptied).unlink()
    (folder / emptied).touch()
    assert (emptied, 0, 0) in fetched(folder)
    assert not plan_fetch(folder).is_ok


def test_a_tracker_that_was_cut(tmp_path: Path) -> None:
    """It names a step that is not there: another copy of it may tell."""
    folder = copied("megatron/td_full_t2p2d2", tmp_path)
    tracker = folder / "latest_checkpointed_iteration.txt"
    tracker.unlink()
    tracker.write_text("1")
    assert fetched(folder) == [(tracker.name, 0, 0)]


def test_an_object_that_was_cut(tmp_path: Path) -> None:
    """A full check finds it, and the sums of all others are compared nevertheless."""
    folder = copied("megatron/old012_zarr_t2p1d1", tmp_path)
    whole = verify(folder, level="full")
    path = folder / EXTRA / "shard_3_4.pt"
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[: len(data) // 2])
    found = verify(folder, level="full")
    damaged = [each.where.path for each in found.findings if each.where and each.kind == "damaged-object"]
    assert damaged == [f"{EXTRA}/shard_3_4.pt"]
    assert 0 < whole.covered_nbytes - found.covered_nbytes < len(data)


def test_a_coded_piece_that_was_cut(tmp_path: Path) -> None:
    """It is decoded at the full level, and the file that it lies in is listed, not the piece."""
    folder = copied("zoo/orbax_files", tmp_path)
    path = folder / "lst.1/0"
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[: len(data) // 2])
    assert [(r.path, r.offset, r.length) for r in plan_fetch(folder, level="full").ranges] == [("lst.1/0", 0, 0)]


@pytest.fixture
def trainer(tmp_path: Path) -> Path:
    """A folder as transformers' Trainer saves it."""
    folder = copied("torch/hf_single", tmp_path)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 5}))
    state = {"state": {0: {"exp_avg": torch.ones(300)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    torch.save(state, folder / "optimizer.pt")
    torch.save({"last_epoch": 3}, folder / "scheduler.pt")
    torch.save({"cpu": torch.get_rng_state()}, folder / "rng_state.pth")
    assert fetched(folder) == []
    return folder


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_torch_files_beside_the_model(name: str, trainer: Path) -> None:
    """Each is looked at as a file by itself, at every level and to its last byte at the full one."""
    path = trainer / name
    data = path.read_bytes()
    for n_left in (0, 1, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:n_left])
        assert fetched(trainer) == [(name, 0, 0)], n_left
        assert not verify(trainer, level="full").is_ok
    path.write_bytes(b"")
    assert not verify(trainer, level="quick").is_ok
    path.write_bytes(data[:700] + bytes([data[700] ^ 4]) + data[701:])
    assert [each.path for each in plan_fetch(trainer, level="full").ranges] == [name]


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"])
def test_files_of_a_trainer_that_are_missing(name: str, trainer: Path) -> None:
    """What a Trainer needs to go on is missed by what else it saved."""
    (trainer / name).unlink()
    assert fetched(trainer) == [(name, 0, 0)]


def test_the_rest_of_a_raw_file(tmp_path: Path) -> None:
    """Of a file that holds nothing but a tensor's bytes, those that are missing are known."""
    folder = copied("zoo/torchsnapshot_files", tmp_path)
    path = max((folder / "replicated").rglob("*weight*"), key=lambda each: each.stat().st_size)
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[:8])
    assert fetched(folder) == [(path.relative_to(folder).as_posix(), 8, -1)]


def test_training_state_beside_the_tensors(tmp_path: Path) -> None:
    """Random states of ranks and the schedule of accelerate are missed; those of all ranks by a star."""
    folder = copied("deepspeed/accelerate_fsdp2", tmp_path)
    assert fetched(folder) == [("random_states_*.pkl", 0, 0), ("scheduler.bin", 0, 0)]
    for name in ("random_states_0.pkl", "random_states_3.pkl", "scheduler.bin"):
        torch.save({"step": 1}, folder / name)
    assert fetched(folder) == [("random_states_1.pkl", 0, 0), ("random_states_2.pkl", 0, 0)]


def test_what_no_fetching_mends(tmp_path: Path) -> None:
    """Where nothing tells what is missing, the error says what is there."""
    (tmp_path / "notes.txt").write_text("nothing")
    with pytest.raises(NotFound, match="no checkpoint"):
        plan_fetch(tmp_path)


def test_no_path_out_of_the_folder_is_listed(tmp_path: Path) -> None:
    """An index that names a file elsewhere is what is wrong, not that file."""
    folder = copied("torch/hf_sharded", tmp_path)
    index = folder / "model.safetensors.index.json"
    text = index.read_text("utf-8").replace("model-00002-of-00003", "../../model-00002-of-00003")
    index.unlink()
    index.write_text(text, "utf-8")
    assert fetched(folder) == [(index.name, 0, 0)]
