"""torchsnapshot 0.1.0 restores what was written here, on one rank and on others than were written.

``CKPT_PEER_TORCHSNAPSHOT`` names the python of an environment with it, torch 2.13 and numpy; run with ``-m peer``.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.convert.export import export
from ckpt_tool.api.convert.reshard import reshard
from tests.reports.made import as_bytes

pytestmark = pytest.mark.peer

# A small model and its AdamW, in the words of DCP: names of a module, and an optimizer's state by number.
JOB = """
import os, sys
folder, out = sys.argv[1:]
import numpy as np, torch, torch.distributed as dist
from torchsnapshot import Snapshot, StateDict
rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if size > 1:
    dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.LayerNorm(9))
model.register_buffer("n", torch.tensor(0))
model.register_buffer("hollow", torch.zeros(0, 4))
optim = torch.optim.AdamW(model.parameters(), lr=0.5)
model(torch.ones(2, 6)).sum().backward()
optim.step()
for tensor in (*model.state_dict().values(), *(t for s in optim.state.values() for t in s.values())):
    tensor.detach().zero_()
progress = StateDict(step=0, note="", lr=0.0, flag=False, raw=b"", nothing=1, nested={})
Snapshot(folder).restore({"model": model, "optim": optim, "progress": progress})
found = {f"model.{k}": v for k, v in model.state_dict().items()}
found |= {f"optim.state.{i}.{k}": v for i, s in optim.state_dict()["state"].items() for k, v in s.items()}
group = optim.state_dict()["param_groups"][0]
assert (group["lr"], group["betas"], group["params"]) == (0.25, (0.9, 0.95), [0, 1, 2, 3]), group
assert dict(progress) == {"step": 7, "note": "a/b", "lr": 0.1, "flag": True, "raw": b"x", "nothing": None,
                          "nested": {"k": [1, 2]}}, dict(progress)
if rank == size - 1:
    np.savez(out, **{k: np.frombuffer(v.detach().numpy().tobytes(), np.uint8) for k, v in found.items()})
print("RESTORED", len(found))
"""
SHARDED = """
import os, sys
folder, out = sys.argv[1:]
import numpy as np, torch, torch.distributed as dist
import torch.distributed.distributed_c10d
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards
from torchsnapshot import Snapshot, StateDict
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
per = -(-9 // size)
low, high = min(rank * per, 9), min((rank + 1) * per, 9)
own = torch.zeros(high - low, 6)
shards = [Shard.from_tensor_and_offsets(own, [low, 0], rank)] if high > low else []
state = StateDict(**{"0.weight": init_from_local_shards(shards, 9, 6)})
Snapshot(folder).restore({"model": state})
parts = [None] * size
dist.all_gather_object(parts, own)
if rank == 0:
    np.savez(out, **{"model.0.weight": np.frombuffer(torch.cat(parts).numpy().tobytes(), np.uint8)})
print("RESTORED", rank)
"""


def run_there(script: str, folder: Path, out: Path, n_ranks: int) -> dict[str, bytes]:
    """What a job of the library restored, by name."""
    job = out.with_suffix(".py")
    job.write_text(script, "utf-8")
    command = [os.environ["CKPT_PEER_TORCHSNAPSHOT"], "-W", "ignore"]
    command += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n_ranks}"] if n_ranks > 1 else []
    run = subprocess.run([*command, str(job), str(folder), str(out)], capture_output=True, text=True, check=False)
    assert run.stdout.count("RESTORED") == n_ranks, run.stderr[-4000:]
    with np.load(out) as found:
        return {name: found[name].tobytes() for name in found.files}


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training state with random values, as ``torch.save`` has it."""
    draw = torch.Generator().manual_seed(0)
    shapes = {"0.weight": (9, 6), "0.bias": (9,), "1.weight": (9,), "1.bias": (9,)}
    moments = {
        number: {
            "step": torch.tensor(7.0), "exp_avg": torch.randn(shape, generator=draw),
            "exp_avg_sq": torch.rand(shape, generator=draw),
        }
        for number, shape in enumerate(shapes.values())
    }  # fmt: skip
    group: dict[str, Any] = dict(torch.optim.AdamW([torch.zeros(1)]).state_dict()["param_groups"][0])
    group |= {"lr": 0.25, "betas": (0.9, 0.95), "params": [0, 1, 2, 3]}
    progress = {
        "step": 7, "note": "a/b", "lr": 0.1, "flag": True, "raw": b"x", "nothing": None, "nested": {"k": [1, 2]},
    }  # fmt: skip
    whole = {
        "model": {
            **{name: torch.randn(shape, generator=draw) for name, shape in shapes.items()},
            "n": torch.tensor(3), "hollow": torch.zeros(0, 4),
        },
        "optim": {"state": moments, "param_groups": [group]},
        "progress": progress,
    }  # fmt: skip
    path = tmp_path_factory.mktemp("state") / "state.pt"
    torch.save(whole, path)
    return path


def expected(state: Path) -> dict[str, bytes]:
    """Each tensor of it."""
    return {fqn: data for fqn, (_, _, data) in as_bytes(state).items()}


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_it_restores_an_export(state: Path, n_ranks: int, tmp_path: Path) -> None:
    """Into a module, an optimizer and a dict: tensors bit for bit, numbers and other objects as they were."""
    export(state, tmp_path / "there", to="torchsnapshot", everything=True, names="source", durable=False)
    assert run_there(JOB, tmp_path / "there", tmp_path / "out.npz", n_ranks) == expected(state)


@pytest.mark.parametrize("n_ranks", [1, 3])
def test_it_restores_what_is_cut(state: Path, n_ranks: int, tmp_path: Path) -> None:
    """Of two ranks, whole into plain tensors of fewer or more of them."""
    reshard(state, tmp_path / "there", to="torchsnapshot", mesh="dp=2", durable=False)
    assert run_there(JOB, tmp_path / "there", tmp_path / "out.npz", n_ranks) == expected(state)


@pytest.mark.parametrize("n_ranks", [2, 4])
def test_it_restores_sharded_tensors(state: Path, n_ranks: int, tmp_path: Path) -> None:
    """Of three ranks, into parts of other ranks, one of which has none."""
    reshard(state, tmp_path / "there", to="torchsnapshot", mesh="dp=3", include=["model.0.weight"], durable=False)
    found = run_there(SHARDED, tmp_path / "there", tmp_path / "out.npz", n_ranks)
    assert found == {"model.0.weight": expected(state)["model.0.weight"]}
    with open_checkpoint(tmp_path / "there") as checkpoint:
        assert len(checkpoint.manifest.chunks) == 3
