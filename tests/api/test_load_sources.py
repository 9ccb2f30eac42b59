"""Whatever reads can be loaded: a state of the checkpoint's own names holds what the checkpoint reads as."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
import torch

import ckpt_tool

FIXTURES = Path(__file__).parents[2] / "fixtures"
SOURCES = (
    "torch/dcp_fsdp1_flat_2r", "torch/dcp_no_flatten", "torch/dcp_safetensors", "torch/dcp_zstd",
    "torch/hf_dcp_sharded", "torch/hf_pytorch_bin", "torch/fsdp1_per_rank_pt_2r", "torch/verl_2d",
    "deepspeed/ds_z1_bf16opt", "deepspeed/ds_z3_bf16", "deepspeed/ds_pp2_dp2_z1", "deepspeed/peft_lora",
    "bytecheckpoint/fsdp_dec_4r", "torch_checkpointing/fsdp2_tp_2x2",
)  # fmt: skip
MEGATRON = ("legacy_vpp_p2v2", "td_dpr_t2p2d2", "td_full_t4p1", "moe_dpr_e2")


def check(url: Path) -> None:
    """Load every tensor, and compare with what opening the checkpoint gives."""
    with ckpt_tool.open(url) as checkpoint:
        truth = {name: checkpoint[name].torch() for name in checkpoint}
    state = {name: torch.zeros_like(tensor) for name, tensor in truth.items()}
    report = ckpt_tool.load(state, url)
    assert report.n_tensors == len(truth) > 0
    assert [name for name, tensor in truth.items() if not same(state[name], tensor)] == []


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bits."""
    bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
    return bool(one.dtype == other.dtype and one.shape == other.shape and bits[0].equal(bits[1]))


@pytest.mark.parametrize("source", SOURCES)
def test_any_format(source: str) -> None:
    """Checkpoints of torch, DeepSpeed, ByteCheckpoint and torch-checkpointing."""
    folder = FIXTURES / source
    check(folder / "ckpt" if (folder / "ckpt").is_dir() else folder)


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Megatron's checkpoints, unpacked."""
    folder = tmp_path_factory.mktemp("megatron")
    with tarfile.open(FIXTURES / "megatron/checkpoints.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize("source", MEGATRON)
def test_megatron(megatron: Path, source: str) -> None:
    """Megatron's checkpoints, distributed and of ranks; what buckets hold is boxes of parameters."""
    check(megatron / source / "ckpt")
