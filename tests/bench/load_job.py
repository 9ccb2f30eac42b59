"""torchrun --nproc_per_node=4 load_job.py FOLDER MEGABYTES ROUNDS LAYOUT...: loads beside ``dcp.load``, in turns.

The saved state is what FSDP2 and Adam have of a row of linear layers: weights and two moments, ``Shard(0)``. Rank 0
prints one JSON line for each layout and loader: seconds of all rounds, each from the first rank's start to the
last one's end. Where torch-checkpointing is installed, it saves the same state for itself, and takes its turn.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, zeros

import ckpt_tool
from ckpt_tool.api.job import load_manifest
from tests.bench.load_peer import has_peer, manager

WIDTH = 1024
LAYOUTS: dict[str, Placement] = {"rows": Shard(0), "columns": Shard(1), "replicas": Replicate()}
WAYS = ("none", "shared-memory", "all-to-all")


def build(mesh: DeviceMesh, megabytes: float, placement: Placement | None, *, is_random: bool) -> dict[str, Any]:
    """A nested state: layers of WIDTH x WIDTH, DTensors of one placement, or plain tensors for None."""
    n_layers = max(1, int(megabytes * 1e6 / (3 * 4 * WIDTH * WIDTH)))

    def tensor() -> torch.Tensor:
        if placement is None:
            return torch.zeros(WIDTH, WIDTH)
        made = zeros((WIDTH, WIDTH), device_mesh=mesh, placements=[placement])
        if is_random:
            made.to_local().normal_()
        return made

    names = [f"layers.{i}.weight" for i in range(n_layers)]
    return {
        "model": {name: tensor() for name in names},
        "optim": {"state": {name: {slot: tensor() for slot in ("exp_avg", "exp_avg_sq")} for name in names}},
    }


def locals_of(state: dict[str, Any]) -> list[torch.Tensor]:
    """Local tensors, in order."""
    found = []
    for value in state.values():
        if isinstance(value, dict):
            found += locals_of(value)
        else:
            found.append(value.to_local() if isinstance(value, DTensor) else value)
    return found


def slowest(seconds: float) -> float:
    """The longest time of any rank."""
    number = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return float(number)


def timed(work: Callable[[], Any]) -> float:
    """Seconds from when the first rank begins until the last one is done; ranks of one host have one clock.

    Where there are fewer cores than ranks some begin when others have ended, and each one's own time is only its own.
    """
    dist.barrier()
    begun = time.monotonic()
    work()
    return slowest(time.monotonic()) + slowest(-begun)


def read_bytes() -> int:
    """Bytes that this process has asked the system to read."""
    with open("/proc/self/io", encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


def check(name: str, expected: list[torch.Tensor], found: list[torch.Tensor]) -> None:
    """Stop where ``found`` differs from ``expected``, which is filled from the first that is not all zeros."""
    if not expected:
        expected += [tensor.clone() for tensor in found if any(each.any() for each in found)]
    elif not all(a.equal(b) for a, b in zip(expected, found, strict=True)):
        raise SystemExit(f"differs from dcp.load: {name}")


def compare(folder: str, mesh: DeviceMesh, megabytes: float, layout: str, placement: Placement | None, n: int) -> None:
    """All loaders in turns, and a check that they load the same bits."""
    state = build(mesh, megabytes, placement, is_random=False)
    spare = [tensor.clone() for tensor in locals_of(state)]

    def copy() -> None:
        for tensor, other in zip(locals_of(state), spare, strict=True):
            tensor.copy_(other)

    def anew() -> None:
        load_manifest.forget_all()
        ckpt_tool.load(state, folder, names=lambda name: name)  # of a function it cannot be known what it did before

    loaders: dict[str, Callable[[], Any]] = {
        "memcpy of the state": copy,
        "dcp.load": lambda: dcp.load(state, checkpoint_id=folder),
        **(peer_loader(state, folder) if has_peer() else {}),
        "ckpt_tool.load, planned anew": anew,
        **{f"ckpt_tool.load, {way}": loader_of(state, folder, way) for way in ("auto", *WAYS)},
    }
    seconds: dict[str, list[float]] = {name: [] for name in loaders}
    nbytes = dict.fromkeys(loaders, 0)
    expected: list[torch.Tensor] = []
    for number in range(n + 1):
        for name, load in loaders.items():
            before = read_bytes()
            took = timed(load)
            total = torch.tensor(read_bytes() - before)
            dist.all_reduce(total)
            nbytes[name] = int(total)
            if number:
                seconds[name].append(took)
                continue
            check(f"{name}, {layout}", expected, locals_of(state))
            for tensor in locals_of(state):
                tensor.zero_()
    if dist.get_rank() == 0:
        for name, times in seconds.items():
            row = {"layout": layout, "loader": name, "seconds": times, "read_mb": nbytes[name] / 1e6}
            print("ROW " + json.dumps(row), flush=True)


def loader_of(state: dict[str, Any], folder: str, way: Any) -> Callable[[], Any]:
    """A load that says at its first time what it has chosen."""
    said: list[str] = []

    def load() -> None:
        report = ckpt_tool.load(state, folder, exchange=way)
        if way == "auto" and not said and dist.get_rank() == 0:
            print("WHY " + json.dumps(f"{report.exchange}: {report.why}"), flush=True)
        said.append(report.exchange)

    return load


def peer_loader(state: dict[str, Any], folder: str) -> dict[str, Callable[[], Any]]:
    """torch-checkpointing with a manager that is made once, as in a job."""
    made = manager()
    return {"torch-checkpointing": lambda: made.load(f"{folder}-peer", into=state, strict=True)}


def main(folder: str, megabytes: float, n_rounds: int, layouts: list[str]) -> None:
    """Save once, then compare for each layout."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if not os.path.exists(os.path.join(folder, ".metadata")):
        state = build(mesh, megabytes, Shard(0), is_random=True)
        dcp.save(state, checkpoint_id=folder)
        if has_peer():
            manager().save(f"{folder}-peer", state)
    for layout in (layout for layout in layouts if layout in LAYOUTS):
        compare(folder, mesh, megabytes, f"rows to {layout}", LAYOUTS[layout], n_rounds)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4:] or list(LAYOUTS))
