"""FairScale 0.4.13 trains and saves; its own consolidation and ours give the same weights, and the same moments.

``CKPT_PEER_FAIRSCALE`` names the python of an environment with it and torch 2.13; run with ``-m peer``.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch

import ckpt_tool

pytestmark = pytest.mark.peer

# Two layers, wrapped by themselves, below a head; what fairseq saves of them, and the library's own view of the whole.
JOB = """
import sys
import torch, torch.distributed as dist, torch.multiprocessing as mp
from torch import nn

def job(rank, size, out):
    from fairscale.nn.data_parallel import FullyShardedDataParallel as FSDP
    dist.init_process_group("gloo", init_method=f"file://{out}/rendezvous", rank=rank, world_size=size)
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3)), nn.Sequential(nn.Linear(3, 7), nn.BatchNorm1d(7)),
        nn.Linear(7, 2),
    )
    cpu = torch.device("cpu")
    for number in (0, 1):
        model[number] = FSDP(model[number], compute_device=cpu)
    sharded = FSDP(model, compute_device=cpu)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.25)
    for parameter in sharded.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(rank))
    optimizer.step()
    weights, record = sharded.local_state_dict(), sharded.local_metadata_dict()
    state = {"model": weights, "shard_metadata": record, "last_optimizer_state": optimizer.state_dict()}
    torch.save(state, f"{out}/ckpt/checkpoint_last-shard{rank}.pt")
    # Moments in the place of weights: the library puts these together in the same way.
    moments = {key: optimizer.state[p]["exp_avg"] for key, p in zip(
        [key for key in weights if "flat_param" in key], sharded.parameters(), strict=True)}
    held = [None] * size
    dist.all_gather_object(held, (dict(weights), moments, record))
    if not rank:
        records = [one[2] for one in held]
        whole = [FSDP.consolidate_shard_weights([one[i] for one in held], records, with_module_buffers=not i)
                 for i in (0, 1)]
        torch.save(whole, f"{out}/whole.pt")

if __name__ == "__main__":
    mp.spawn(job, (int(sys.argv[2]), sys.argv[1]), int(sys.argv[2]))
"""


@pytest.mark.parametrize("size", [2, 3])
def test_fairscale(tmp_path: Path, size: int) -> None:
    """Weights, buffers and moments are bit for bit what FairScale makes of the same files."""
    (tmp_path / "ckpt").mkdir()
    script = tmp_path / "job.py"
    script.write_text(JOB, encoding="utf-8")
    subprocess.run([os.environ["CKPT_PEER_FAIRSCALE"], script, tmp_path, str(size)], check=True, timeout=300)
    weights, moments = torch.load(tmp_path / "whole.pt", weights_only=True)
    with ckpt_tool.open(tmp_path / "ckpt") as checkpoint:
        assert {fqn for fqn in checkpoint if fqn.startswith("model.")} == {f"model.{fqn}" for fqn in weights}
        for fqn, value in weights.items():
            assert checkpoint[f"model.{fqn}"].torch().equal(value)
        for fqn, value in moments.items():
            assert checkpoint[f"last_optimizer_state.state.{fqn}.exp_avg"].torch().equal(value)
