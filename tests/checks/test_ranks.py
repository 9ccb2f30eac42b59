"""Settings and counters of which each rank keeps a copy must be the same on all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tool.api.trust.verify import verify
from ckpt_tool.cli.app import main

FIXTURES = Path(__file__).parents[2] / "fixtures"


def ranks(folder: Path, *, steps: tuple[int, ...] = (7, 7, 7), rates: tuple[float, ...] = (0.1, 0.1, 0.1)) -> Path:
    """A file of each rank, as verl names them: model, optimizer and what else the rank keeps."""
    folder.mkdir()
    n = len(steps)
    for rank, (step, rate) in enumerate(zip(steps, rates, strict=True)):
        groups = [{"lr": rate, "betas": (0.9, 0.99), "params": [0]}]
        state: dict[str, Any] = {"state": {0: {"exp_avg": torch.ones(4)}}, "param_groups": groups}
        torch.save({"w": torch.ones(4)}, folder / f"model_world_size_{n}_rank_{rank}.pt")
        torch.save(state, folder / f"optim_world_size_{n}_rank_{rank}.pt")
        torch.save({"step": step, "rng": rank}, folder / f"extra_state_world_size_{n}_rank_{rank}.pt")
    return folder


def told(folder: Path) -> dict[str, str]:
    """Findings about ranks."""
    found = verify(folder).findings
    return {f.kind: f.message for f in found if f.kind in {"mixed-steps", "ranks-disagree"}}


def test_ranks_that_agree(tmp_path: Path) -> None:
    """Random states differ by nature; the rest is equal, so nothing is said."""
    assert told(ranks(tmp_path / "a")) == {}


def test_a_step_of_another_save(tmp_path: Path) -> None:
    """One rank's counter is another one: an asynchronous save was torn."""
    said = told(ranks(tmp_path / "a", steps=(7, 7, 6)))
    assert set(said) == {"mixed-steps"}
    assert "7 on ranks 0, 1; 6 on ranks 2: files of several saves are mixed" in said["mixed-steps"]


def test_hyperparameters(tmp_path: Path) -> None:
    """One rank goes on at another learning rate."""
    said = told(ranks(tmp_path / "a", rates=(0.1, 0.2, 0.1)))
    assert set(said) == {"ranks-disagree"}
    assert "lr is 0.1 on ranks 0, 2; 0.2 on ranks 1" in said["ranks-disagree"]
    assert main(["verify", str(tmp_path / "a"), "--strict", "--quiet"]) == 1


@pytest.mark.parametrize("name", ["torch/dcp_no_collectives", "torch/verl_4r_bf16", "deepspeed/ds_z2_bf16"])
def test_real_ranks_agree(name: str) -> None:
    """Checkpoints that frameworks saved say nothing of the kind."""
    assert told(FIXTURES / name / "ckpt") == {}
