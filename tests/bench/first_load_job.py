"""torchrun --nproc_per_node=4 first_load_job.py FOLDER MEGABYTES LAYOUT LOADER: a first load, as after a restart.

Rank 0 prints one JSON line: seconds of the load, from the first rank's start to the last one's end, and of importing
and setting up what it needs, the longest of any rank. The state lies in memory, as a model's once initialised.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, zeros

WIDTH = 1024
LAYOUTS = {"rows": Shard(0), "columns": Shard(1), "replicas": Replicate()}


def main(folder: str, megabytes: float, layout: str, loader: str) -> None:
    """Load once."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def tensor() -> DTensor:
        made = zeros((WIDTH, WIDTH), device_mesh=mesh, placements=[LAYOUTS[layout]])
        made.to_local().fill_(1.0)
        return made

    names = [f"layers.{i}.weight" for i in range(max(1, int(megabytes * 1e6 / (3 * 4 * WIDTH * WIDTH))))]
    state = {
        "model": {name: tensor() for name in names},
        "optim": {"state": {name: {slot: tensor() for slot in ("exp_avg", "exp_avg_sq")} for name in names}},
    }
    began = time.monotonic()
    at_end = ExitStack()
    load = LOADERS[loader](state, folder, at_end)
    import_seconds = time.monotonic() - began
    dist.barrier()
    began = time.monotonic()
    load()
    times = torch.tensor([-began, time.monotonic(), import_seconds], dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        minus_began, ended, import_seconds = times.tolist()
        row = {"layout": layout, "loader": loader, "seconds": ended + minus_began, "import": import_seconds}
        print("ROW " + json.dumps(row), flush=True)
    at_end.close()
    dist.destroy_process_group()


def _ours(state: dict[str, Any], folder: str, _: ExitStack) -> Callable[[], Any]:
    import ckpt_tool

    load = ckpt_tool.load  # imported when it is asked for
    return lambda: load(state, folder)


def _dcp(state: dict[str, Any], folder: str, _: ExitStack) -> Callable[[], Any]:
    import torch.distributed.checkpoint as dcp

    return lambda: dcp.load(state, checkpoint_id=folder)


def _peer(state: dict[str, Any], folder: str, at_end: ExitStack) -> Callable[[], Any]:
    from tests.bench.load_peer import manager

    made = manager()
    at_end.callback(made.close)  # threads of its own that still run would abort the process at its end
    return lambda: made.load(f"{folder}-peer", into=state, strict=True)


LOADERS = {"dcp.load": _dcp, "torch-checkpointing": _peer, "ckpt_tool.load": _ours}

if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3], sys.argv[4])
