"""Folders that accelerate, transformers and Lightning leave while they train: what lies beside the model is known."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.reports.conftest import Ckpt
from tests.reports.made import as_bytes, put, safetensors_bytes, saved

_WEIGHTS = {"w": torch.ones(2)}


@pytest.mark.parametrize(
    ("model", "beside"),
    [
        ("pytorch_model.bin", ("optimizer.bin", "scheduler.bin", "random_states_0.pkl")),
        ("model.safetensors", ("optimizer.bin", "scheduler.bin", "random_states_0.pkl")),
        ("pytorch_model_fsdp.bin", ("optimizer.bin", "scheduler.bin", "random_states_0.pkl")),
        ("pytorch_model.bin", ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin")),
    ],
)
def test_state_beside_the_model(ckpt: Ckpt, tmp_path: Path, model: str, beside: tuple[str, ...]) -> None:
    """A conversion takes the model alone: each file that it leaves is named, and none of them is a stray."""
    files = {name: saved({"state": {0: {"exp_avg": torch.ones(2)}}, "lr": 1.0}) for name in beside}
    weights = saved(_WEIGHTS) if model.endswith(".bin") else safetensors_bytes({"w": ("F32", [2], bytes(8))})
    put(tmp_path / "step", {model: weights, "trainer_state.json": b"{}", **files})
    ran = ckpt("verify", tmp_path / "step", "--full")
    assert (ran.status, "stray-file" in ran.text, "other-files" in ran.text) == (0, False, False)
    said = ckpt("export", tmp_path / "step", tmp_path / "out").text
    assert "of which this is the model; beside it, each to be named by itself: " in said
    assert all(f"{name} (" in said for name in beside)
    (tmp_path / "step" / beside[0]).write_bytes(files[beside[0]][:-100])
    assert ckpt("verify", tmp_path / "step").status == 1


def test_the_best_score_so_far(ckpt: Ckpt, tmp_path: Path) -> None:
    """Lightning's callbacks begin at infinity, which is no fault; an infinite weight is worth a look."""
    state = {"state_dict": _WEIGHTS, "callbacks": {"ModelCheckpoint": {"kth_value": torch.tensor(float("inf"))}}}
    put(tmp_path, {"a.ckpt": saved(state), "b.ckpt": saved({"w": torch.tensor([1.0, float("inf")])})})
    assert ckpt("verify", tmp_path / "a.ckpt", "--full", "--strict").status == 0
    assert ckpt("verify", tmp_path / "b.ckpt", "--full", "--strict").status == 1


@pytest.mark.parametrize("name", ["pytorch_model_fsdp_rank{}.bin", "model_hsdp_rank_{}.pt", "ddp-rank{}.pth"])
def test_files_of_ranks_whose_name_ends_like_an_axis(ckpt: Ckpt, tmp_path: Path, name: str) -> None:
    """Accelerate's names with LOCAL_STATE_DICT: ``fsdp`` is no ``dp``, and the model goes along with its optimizer."""
    optimizer = {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": [0]}]}
    for rank in range(2):
        files = {name.format(rank): saved(_WEIGHTS), f"optimizer_rank{rank}.bin": saved(optimizer)}
        put(tmp_path / "step", files)
    assert sorted(as_bytes(tmp_path / "step")) == ["optim.state.0.exp_avg", "w"]
    assert "stray-file" not in ckpt("verify", tmp_path / "step", "--full").text
    (tmp_path / "step" / name.format(0)).unlink()
    assert f"{name.format(0)} is missing" in ckpt("verify", tmp_path / "step").text


def test_a_model_beside_files_of_ranks(ckpt: Ckpt, tmp_path: Path) -> None:
    """What ranks save beside it never passes for all there is: it is said to be left out, or is what is read."""
    optimizer = saved({"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": [{"params": [0]}]})
    put(tmp_path / "a", {"model.pt": saved(_WEIGHTS)} | {f"optim_rank{rank}.pt": optimizer for rank in range(2)})
    said = "left out, no rank is in the name, to be given by itself: model.pt"
    assert said in ckpt("reshard", tmp_path / "a", tmp_path / "out", "--dp", "1").text
    states = {f"rng_state_rank{rank}.pt": saved({"rng": torch.get_rng_state()}) for rank in range(2)}
    put(tmp_path / "b", {"model.pt": saved(_WEIGHTS), **states})
    assert sorted(as_bytes(tmp_path / "b")) == ["w"]
    put(tmp_path / "b", {"optim.pt": optimizer})
    assert (
        "files that are one each: optim.pt (torch-save), model.pt (torch-save)" in ckpt("inspect", tmp_path / "b").err
    )


def test_a_run_with_a_state_above_its_steps(ckpt: Ckpt, tmp_path: Path) -> None:
    """As torchtune does: the file at the top is not all there is, and without weights the message says what it has."""
    optimizer = saved({"optimizer": {"state": {0: {"exp_avg": torch.ones(2)}}}, "epoch": 1})
    run = put(
        tmp_path / "run",
        {"recipe_state.pt": optimizer, "epoch_0/a.pt": saved(_WEIGHTS), "epoch_0/b.pt": saved(_WEIGHTS)},
    )
    assert "to be given by themselves: files in the folders epoch_0" in ckpt("inspect", run).text
    ran = ckpt("export", run, tmp_path / "out")
    assert (ran.status, "hint: by section there are 1 optimizer: " in ran.err) == (3, True)


def test_several_files_below(ckpt: Ckpt, tmp_path: Path) -> None:
    """OLMo's layout: the files of a step are one each, and the model is the one to type."""
    step = "step1000-unsharded"
    put(tmp_path, {f"{step}/{name}.pt": saved(_WEIGHTS) for name in ("model", "optim", "train")})
    ran = ckpt("inspect", tmp_path)
    assert (ran.status, f"{step}/optim.pt (torch-save)" in ran.err) == (3, True)
    assert f'hint: give one of them, such as "{tmp_path}/{step}/model.pt"' in ran.err
