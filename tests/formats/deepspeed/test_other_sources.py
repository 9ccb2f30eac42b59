"""States of other programs become DeepSpeed's: weights, masters, moments, steps and groups under its names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.convert.reshard import reshard
from tests.formats.megatron.hf_training import save_dcp, torch_state
from tests.formats.megatron.places import CHECKPOINTS, dense_shapes, truth_from_seed

RATE = 0.00012580800065610593
"""Where the schedule of the Megatron run was."""
MEGATRON: dict[str, Any] = {"names": "hf", "family": "llama", "true_vocab": 100}


def assert_is_the_state(folder: Path, *, rate: float, has_weights: bool) -> None:
    """Every master, moment and step is the truth, and weights are masters rounded where the form stores them."""
    truth = torch_state(truth_from_seed(dense_shapes(4, 128))(), weights=torch.float32)
    with open_checkpoint(folder) as found:
        objects = found.objects()
        for name, weight in truth["model"].items():
            stem = f"optimizer.state.{name}"
            assert torch.equal(found[f"{stem}.fp32"].torch(), weight), name
            for state in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(found[f"{stem}.{state}"].torch(), truth["optim"]["state"][name][state]), name
            step = objects.get(f"{stem}.step")
            assert float(found[f"{stem}.step"].torch() if step is None else step) == 10
            expected = weight.bfloat16() if has_weights else weight
            assert torch.equal(found[f"module.{name}"].torch(), expected), name
        groups = truth["optim"]["param_groups"]
        for number, group in enumerate(sorted(groups, key=lambda own: -own["weight_decay"])):
            own = f"optimizer.param_groups.{number}"
            assert set(objects[f"{own}.params"]) == set(group["params"])
            assert (objects[f"{own}.lr"], objects[f"{own}.weight_decay"]) == (rate, group["weight_decay"])
            assert objects[f"{own}.betas"] == (0.9, 0.95)
        assert objects["global_steps"] == 10


@pytest.mark.parametrize("name", ["td_full_t2p2d2", "td_dpr_t2p2d2", "legacy_t2p2", "td_nodist_t2"])
@pytest.mark.parametrize(("to", "stage"), [("deepspeed", 2), ("deepspeed", 3), ("deepspeed-universal", None)])
def test_a_run_of_megatron(name: str, to: str, stage: int | None, tmp_path: Path) -> None:
    """Whatever form Megatron has its optimizer in: fused weights are taken apart, and so are their states."""
    grid = {"dp": 3, "zero_stage": stage} if stage else {}
    options: dict[str, Any] = {**MEGATRON, **grid, "dtype": "bfloat16", "durable": False}
    reshard(CHECKPOINTS / name / "ckpt", tmp_path / "out", to=to, **options)
    assert_is_the_state(tmp_path / "out", rate=RATE, has_weights=to == "deepspeed" and stage == 2)


@pytest.mark.parametrize(("to", "stage"), [("deepspeed", 1), ("deepspeed-universal", None)])
def test_a_run_of_fsdp(to: str, stage: int | None, tmp_path: Path) -> None:
    """A DCP folder that torch saved: its weights in float32 are the masters."""
    source = save_dcp(torch_state(truth_from_seed(dense_shapes(4, 128))(), weights=torch.float32), tmp_path / "fsdp")
    grid: dict[str, Any] = {"dp": 3, "zero_stage": stage} if stage else {}
    reshard(source, tmp_path / "out", to=to, dtype="bfloat16", durable=False, **grid)
    assert_is_the_state(tmp_path / "out", rate=5e-4, has_weights=to == "deepspeed")
