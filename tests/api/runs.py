"""Runs made for tests: steps copied from real checkpoints, and damaged."""

from __future__ import annotations

import shutil
from pathlib import Path

FIXTURES = Path(__file__).parents[2] / "fixtures"
TITAN = FIXTURES / "deepspeed/torchtitan_dp2tp2/ckpt/checkpoint/step-3"
DEEPSPEED = FIXTURES / "deepspeed/ds_z1_fp32/ckpt/global_step3"
HF = FIXTURES / "torch/hf_sharded/ckpt"
VERL = FIXTURES / "torch/verl_2d/ckpt"
ACCELERATE = FIXTURES / "deepspeed/accelerate_fsdp2/ckpt"


def copied(source: Path, *targets: Path) -> None:
    """``source`` at each of these places."""
    for target in targets:
        shutil.copytree(source, target)


def titan(run: Path, *names: str) -> Path:
    """A run of DCP steps of these names."""
    copied(TITAN, *(run / name for name in names))
    return run
