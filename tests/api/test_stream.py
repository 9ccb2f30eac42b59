"""Streams: one rank's tensors of a layout, in bounded memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import ckpt_tool
from ckpt_tool.errors import LayoutError, UsageError

DEEPSPEED = Path(__file__).parents[2] / "fixtures/deepspeed"
TIED, DCP = DEEPSPEED / "hf_st_tied", Path(__file__).parents[2] / "fixtures/torch/dcp_fsdp2_4r_fp32"
CUT_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
CUT_COLUMNS = ("o_proj", "down_proj")


def test_tensor_parallel_ranks() -> None:
    """Joined along the dimension that each is cut in, the streams of two ranks are the whole tensors."""
    truth = load_file(TIED / "truth.safetensors")
    ranks = [dict(ckpt_tool.stream(TIED / "ckpt", tp=2, rank=rank, as_torch=True)) for rank in range(2)]
    assert list(ranks[0]) == list(ranks[1])
    assert len(ranks[0]) > 10
    for fqn in ranks[0]:
        module = fqn.split(".")[-2]
        parts = [rank[fqn] for rank in ranks]
        if module in CUT_ROWS or module in CUT_COLUMNS:
            assert torch.cat(parts, 0 if module in CUT_ROWS else 1).equal(truth[fqn])
        else:
            assert all(part.equal(truth[fqn]) for part in parts)


@pytest.mark.parametrize("budget", [1 << 10, 1 << 30])
def test_whole_model_in_any_memory(budget: int) -> None:
    """The stream of one rank is the model of a training checkpoint, without its optimizer, whatever the batches."""
    truth = {k: v for k, v in load_file(DCP / "truth.safetensors").items() if k.startswith("model.")}
    found = dict(ckpt_tool.stream(DCP / "ckpt", include=["model.*"], memory_budget_bytes=budget))
    assert found.keys() == truth.keys()
    for fqn, tensor in truth.items():
        assert np.array_equal(found[fqn], tensor.numpy())


def test_left_early() -> None:
    """A stream that is left in the middle closes what it opened."""
    stream = ckpt_tool.stream(TIED / "ckpt")
    fqn, array = next(stream)
    stream.close()
    assert array.size
    assert fqn


def test_refusals() -> None:
    """A rank outside the mesh and sizes given twice are refused."""
    with pytest.raises(LayoutError, match="there is no rank 2"):
        next(ckpt_tool.stream(TIED / "ckpt", tp=2, rank=2))
    with pytest.raises(UsageError, match="mesh already names"):
        next(ckpt_tool.stream(TIED / "ckpt", mesh="tp=2", tp=2))
