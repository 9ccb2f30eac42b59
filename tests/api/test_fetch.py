"""What to fetch again of checkpoints that lack a file, or of which one was cut."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ckpt_tool.api.trust.fetch import plan_fetch
from ckpt_tool.errors import NotFound
from tests.formats.conformance import FIXTURES
from tests.formats.zoo import CHECKPOINTS

PART = "model/model/decoder/0/pp_block/attn/o_proj/model_weight_pp-rank-0-of-1_tp-rank-0-of-2.safetensors"
NORM = "model/model/decoder/0/pp_block/input_layernorm/model_weight"
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
)
CUT = (
    ("bytecheckpoint/hsdp_4r", "global_step_2/model/.metadata", (0, 0)),
    ("deepspeed/ds_z2_bf16", STATES, (0, 0)),
    ("zoo/torchsnapshot_files", ".snapshot_metadata", (0, 0)),
    ("zoo/nanotron_tp2_dp2", f"{NORM}.safetensors", (0, 0)),
)


def copied(name: str, folder: Path) -> Path:
    """The files of a fixture, linked."""
    place = CHECKPOINTS / name[4:] if name.startswith("zoo/") else FIXTURES / name
    top = place / "ckpt"
    for mark in (".snapshot_metadata", "checkpoint_metadata.json"):
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
        (folder / name).write_bytes(b"1")
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
