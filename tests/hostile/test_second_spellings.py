"""A number in a file's name has one spelling: a copy under another one is never read in place of the file it is of."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckpt_tool.api.runs.ls import ls
from ckpt_tool.api.trust.verify import verify
from ckpt_tool.errors import CkptError
from ckpt_tool.manifest.finding import Severity
from tests.hostile.fuzz import checkpoint_in, contents, placed

CASES = (
    ("torch_checkpointing/fsdp2_tp_2x2", "train_state_3.pt", "train_state_00.pt"),
    ("torch_checkpointing/fsdp2_4r_safetensors", "model_3.safetensors", "model_000.safetensors"),
    ("torch/fsdp1_per_rank_pt_2r", "model_world_size_2_rank_1.pt", "model_world_size_2_rank_00.pt"),
    ("torch/dcp_no_collectives", "__3.metadata", "__00.metadata"),
    ("deepspeed/ds_z2_bf16", "zero_pp_rank_1_mp_rank_00", "zero_pp_rank_00_mp_rank_00"),
    ("deepspeed/ds_moe_ep2_z1", "expert_3_mp_rank_00_model", "expert_00_mp_rank_00_model"),
    ("megatron/legacy_nodist_t2", "mp_rank_01/model_optim_rng.pt", "mp_rank_000/model_optim_rng.pt"),
    ("megatron/legacy_t2p2", "mp_rank_01_001/distrib_optim.pt", "mp_rank_01_0000/distrib_optim.pt"),
    ("megatron/old012_zarr_t2p1d1", "mlp.linear_fc2.weight/1.0.1", "mlp.linear_fc2.weight/1.0.00"),
    ("megatron/old012_zarr_t2p1d1", "rng_state/shard_0.1_1.2.pt", "rng_state/shard_0.00_1.2.pt"),
    ("nanotron/tp2_pp2_dp3", "o_proj/model_weight_pp-rank-0-of-2_tp-rank-1-of-2",
     "o_proj/model_weight_pp-rank-0-of-2_tp-rank-00-of-2"),
    ("zoo/consolidated_llama2", "consolidated.01.pth", "consolidated.000.pth"),
    ("zoo/orbax_files", "params.emb.embedding/1.1", "params.emb.embedding/1.00"),
)  # fmt: skip


def _placed(name: str, old: str, new: str, base: Path) -> tuple[Path, Path, Path]:
    """The checkpoint, a file in it, and the name that it is to have or to be copied to."""
    target = checkpoint_in(placed(name, base))
    file = next(path for path in sorted(target.rglob("*")) if path.is_file() and old in str(path))
    other = Path(str(file).replace(old, new))
    other.parent.mkdir(exist_ok=True)
    return target, file, other


@pytest.mark.parametrize(("name", "old", "new"), CASES)
def test_a_copy_under_a_second_spelling_changes_nothing(name: str, old: str, new: str, tmp_path: Path) -> None:
    """The same tensors hold the same as before."""
    target, file, other = _placed(name, old, new, tmp_path)
    before = contents(target)
    shutil.copy(file, other)
    assert before
    assert contents(target) == before


@pytest.mark.parametrize(("name", "old", "new"), CASES)
def test_a_file_under_a_second_spelling_is_missed(name: str, old: str, new: str, tmp_path: Path) -> None:
    """What the file held is told as lacking, not taken for another rank's."""
    target, file, other = _placed(name, old, new, tmp_path)
    before = contents(target)
    file.rename(other)
    try:
        report = verify(target, level="full")
    except CkptError:
        return  # refused
    assert any(finding.severity is not Severity.INFO for finding in report.findings)
    if report.is_ok:
        assert all(before[fqn] == digest for fqn, digest in contents(target).items())


def test_ls_counts_one_spelling(tmp_path: Path) -> None:
    """Two ranks, one under a name that no writer gives: a rank is missing."""
    target, file, other = _placed("deepspeed/ds_z2_bf16", "zero_pp_rank_1_mp_rank_00", "zero_pp_rank_01_mp_rank_00",
                                  tmp_path)  # fmt: skip
    file.rename(other)
    (step,) = (step for step in ls(target).steps if step.path == "global_step3")
    assert not step.is_complete
