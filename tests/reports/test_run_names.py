"""Runs as trainers name them: numbers that no word says to be steps, and ranks of several steps in one folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.reports.conftest import Ckpt
from tests.reports.made import put, saved, values

_NANOCHAT = ("meta_000500.json", "model_000500.pt", "optim_000500_rank0.pt", "model_001000.pt", "optim_001000_rank0.pt")


@pytest.mark.parametrize(
    ("names", "tracker", "steps"),
    [
        (_NANOCHAT, {}, {500: "model_000500.pt", 1000: "model_001000.pt"}),
        (("model_0004999.pth", "model_0009999.pth"), {}, {4999: "model_0004999.pth", 9999: "model_0009999.pth"}),
        (("net-7.pth", "net-12.pth"), {"last_checkpoint": b"net-12.pth"}, {7: "net-7.pth", 12: "net-12.pth"}),
        (("iter_7.pth", "iter_12.pth"), {"last_checkpoint": b"/w/iter_12.pth"}, {7: "iter_7.pth", 12: "iter_12.pth"}),
        (("checkpoint_1_500.pt", "checkpoint_2_90.pt"), {}, {90: "checkpoint_2_90.pt", 500: "checkpoint_1_500.pt"}),
        (("ep0-ba100/model.pt", "ep1-ba20/model.pt"), {}, {20: "ep1-ba20", 100: "ep0-ba100"}),
        (("checkpoint_ep3/model.pt", "checkpoint_ep12/model.pt"), {}, {3: "checkpoint_ep3", 12: "checkpoint_ep12"}),
    ],
)
def test_names_of_more_trainers(
    tmp_path: Path, ckpt: Ckpt, names: tuple[str, ...], tracker: dict[str, bytes], steps: dict[int, str]
) -> None:
    """R100: nanochat, Detectron2, mmengine, fairseq, Composer: numbers that no word says to be steps, or others."""
    data = saved({"w": torch.ones(3)})
    put(tmp_path, {name: b"{}" if name.endswith("json") else data for name in names} | tracker)
    found = ckpt("ls", tmp_path, "--json").json
    assert {step["step"]: step["path"] for step in found["steps"]} == steps
    assert [each["says"] for each in found["trackers"]] == [None] * len(tracker)
    assert found["latest"] == f"{tmp_path}/{steps[max(steps)]}"


def test_numbers_that_count_shards_are_no_steps(tmp_path: Path, ckpt: Ckpt) -> None:
    """Files that are counted from 0 or 1 may be shards of one model."""
    put(tmp_path, {f"model_{n:05d}.pt": saved({f"w{n}": torch.ones(3)}) for n in (1, 2, 3)})
    assert ckpt("ls", tmp_path).status == 3


def test_a_cut_file_beside_the_step_of_its_number(tmp_path: Path, ckpt: Ckpt) -> None:
    """R100, R47: the optimizer of the same number is a part of the step."""
    put(tmp_path, {name: b"{}" if name.endswith("json") else saved({"w": torch.ones(3)}) for name in _NANOCHAT})
    path = tmp_path / "optim_001000_rank0.pt"
    path.write_bytes(path.read_bytes()[:-30])
    assert ckpt("ls", tmp_path, "--latest").out == f"{tmp_path}/model_000500.pt\n"
    assert "optim_001000_rank0.pt is cut" in ckpt("ls", tmp_path).text


@pytest.mark.parametrize(
    "name", ["model_step{}_rank{}.pt", "ckpt-{}-rank{}.pth", "model_{:06}_rank{}.pt", "ba{}-rank{}.pt"]
)
def test_ranks_of_several_steps(tmp_path: Path, ckpt: Ckpt, name: str) -> None:
    """R10, R100: files of ranks of several steps in one folder are no replicas of each other: the newest are read."""
    for step in (500, 1000):
        tensors = {"w": torch.full((3,), float(step))}
        put(tmp_path, {name.format(step, rank): saved(tensors) for rank in (0, 1)})
    ran = ckpt("inspect", tmp_path)
    assert f"left out: 2 files of 2 ranks ({name.format(500, 0)})" in ran.text
    assert values(tmp_path, "w") == [1000.0] * 3
    assert ckpt("verify", tmp_path, "--full").status == 0
