"""What real Megatron makes of the same sources: where it reshards, it has what was written; where it cannot, this can.

``CKPT_PEER_MEGATRON`` names the python of an environment with megatron-core 0.19.2 and torch 2.13; run with
``-m peer``, or ``make test-megatron``.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.errors import FormatError
from tests.formats.megatron.loading import assert_loads, output_of_load, save
from tests.formats.megatron.places import CHECKPOINTS

pytestmark = pytest.mark.peer

Mesh = dict[str, int]
EXPERTS = "--moe seq --layers 2"


@pytest.mark.parametrize(
    ("name", "mesh", "run"),
    [
        ("td_full_t2p2d2", {}, ""),
        ("td_full_t2p2d2", {"pp": 2, "vpp": 2}, "--pp 2 --vpp 1"),
        ("td_nodist_t2", {"tp": 4}, "--nodistopt --tp 4 --zero-rows-from 112"),
        ("td_dpr_t2p2d2", {"tp": 2, "pp": 2}, "--tp 2 --pp 2 --bucket 4000"),
        ("moe_seq_e2", {"dp": 4, "ep": 4}, f"{EXPERTS} --ep 4"),
    ],
)
def test_what_megatron_reshards_itself(name: str, mesh: Mesh, run: str, launcher: Path, tmp_path: Path) -> None:
    """It loads the source into the other mesh, and what was written for that mesh: both are the truth, bit for bit."""
    source = shutil.copytree(CHECKPOINTS / name / "ckpt", tmp_path / "source")
    assert_loads(launcher, source, mesh, run)
    options: dict[str, Any] = {**mesh, "durable": False}
    reshard(source, tmp_path / "out", to="megatron-dist", **options)
    assert_loads(launcher, tmp_path / "out", mesh, run)


@pytest.mark.parametrize(
    ("name", "mesh", "run", "refusal"),
    [
        ("td_dpr_t2p2d2", {}, "", "not supported for DistributedOptimizer with sharding type dp_reshardable"),
        ("moe_seq_e2", {}, EXPERTS, "KeyError: 'optimizer'"),
        ("legacy_t2p2", {}, "", "mp_rank_00/model_optim_rng.pt"),
    ],
)
def test_what_megatron_refuses(name: str, mesh: Mesh, run: str, refusal: str, launcher: Path, tmp_path: Path) -> None:
    """Buckets, two optimizers for one, or files of two ranks for one rank: it says why; here it is written."""
    source = shutil.copytree(CHECKPOINTS / name / "ckpt", tmp_path / "source")
    is_legacy = name.startswith("legacy")
    said = output_of_load(launcher, source, mesh, f"{run} --fmt torch" if is_legacy else run)
    assert "LOAD OK" not in said
    assert refusal in said, said[-2000:]
    options: dict[str, Any] = {**mesh, "durable": False}
    reshard(source, tmp_path / "out", to="megatron-dist", **options)
    assert_loads(launcher, tmp_path / "out", mesh, run)


def test_what_newer_megatron_refuses(launcher: Path) -> None:
    """State that 0.12 flattened: `test_writer` has the truth of what is written (the source itself has no schedule)."""
    said = output_of_load(launcher, CHECKPOINTS / "old012_fsms_t2p1d2/ckpt", {"tp": 2}, "--tp 2")
    assert "Missing key in checkpoint state_dict: optimizer.distributed" in said, said[-2000:]


def test_what_megatron_loses(launcher: Path, tmp_path: Path) -> None:
    """Per-rank files of experts of two tensor-parallel ranks, the rest of one: it does not load its own save alike."""
    run = f"{EXPERTS} --etp 2 --fmt torch"
    save(launcher, tmp_path / "in", 2, run)
    assert "LOAD FAIL" in output_of_load(launcher, tmp_path / "in", {"dp": 2}, run)
    with pytest.raises(FormatError, match="the parts of the rank that wrote it last"), open_checkpoint(tmp_path / "in"):
        pass
