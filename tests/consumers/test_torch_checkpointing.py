"""torch-checkpointing 0.1.1 loads what was written here, into FSDP2 models of 1, 2 and 4 ranks.

``CKPT_PEER_TORCH_CHECKPOINTING`` names the python of an environment with it and torch 2.13; run with ``-m peer``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ckpt_tool.api.convert.reshard import reshard

pytestmark = pytest.mark.peer

FAMILY = Path(__file__).parents[2] / "fixtures/torch_checkpointing"
SOURCE = FAMILY / "fsdp2_tp_2x2"
TARGETS: dict[str, dict[str, Any]] = {"one": {}, "dp3": {"dp": 3}, "tp2dp2": {"tp": 2, "dp": 2}}
# The model is that of fixtures/torch_checkpointing/make/gen.py; every tensor is zero before it is loaded.
JOB = """
import logging, os, sys
make, folder = sys.argv[1:]
sys.path.insert(0, make)
logging.disable(logging.WARNING)
import torch, torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.config import SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
import gen
from _cpu import patch
dist.init_process_group("gloo")
patch()
model, mesh = gen.Net(), init_device_mesh("cpu", (dist.get_world_size(),))
for layer in model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model(torch.zeros(4, 6, dtype=torch.long)).square().mean().backward()
optimizer.step()
states = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
state = {"model": states[0], "optimizer": {k: v for k, v in states[1].items() if isinstance(v, torch.Tensor)}}
for item in state.values():
    for tensor in item.values():
        tensor.detach().zero_()
def manager(**items):
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    save = SyncCheckpointSaverConfig()
    return CheckpointManager(CheckpointManager.Config(items=items, save=save, storage_config=storage))
resharder = DefaultResharder()
resharded = manager(model=ItemSpec(resharder=resharder), optimizer=ItemSpec(resharder=resharder))
resharded.load(folder + "/ckpt", into=state, strict=True)
truth = load_file(folder + "/truth.safetensors")
loaded = {f"{name}.{k}": gen.full(v) for name, item in state.items() for k, v in item.items()}
wrong = [fqn for fqn, tensor in loaded.items() if not torch.equal(tensor, truth[fqn])]
n_tensors = len(loaded)
if dist.get_rank() == 0:
    lone = manager()
    step = lone.load(folder + "/ckpt", into={"step": 0})["step"]
    groups = lone.load(folder + "/ckpt", into={"optimizer_values": None})["optimizer_values"]
    print("LOAD", dist.get_world_size(), n_tensors, len(wrong), wrong[:3], step, groups["param_groups.emb.weight.lr"])
dist.barrier()
os._exit(0)
"""


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("target", TARGETS)
def test_the_library_loads_it(target: str, world_size: int, tmp_path: Path) -> None:
    """Every parameter, buffer and moment, strictly; objects under their own items."""
    options: dict[str, Any] = {"default": "replicate", "rank_state": "drop", "durable": False, **TARGETS[target]}
    reshard(SOURCE / "ckpt", tmp_path / "there/ckpt", to="torch-checkpointing", **options)
    shutil.copy(SOURCE / "truth.safetensors", tmp_path / "there")
    (tmp_path / "job.py").write_text(JOB, "utf-8")
    command = [os.environ["CKPT_PEER_TORCH_CHECKPOINTING"], "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={world_size}", str(tmp_path / "job.py"), str(FAMILY / "make")]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(
        [*command, str(tmp_path / "there")], capture_output=True, text=True, check=False, env=environment
    )
    said = re.search(r"LOAD .*", run.stdout)
    assert said, run.stderr[-4000:]
    assert said[0] == f"LOAD {world_size} 54 0 [] 2 0.01"
