"""torchrun --nproc_per_node=2 slowed_job.py FOLDER MEGABYTES ROUNDS [LOOP ...]: how much a save slows a loop down.

Two loops of some seconds, one of Python alone and one of matrix products, each by itself, with one save of torch's
``async_save`` begun at its start, and with one of ours; in turns. Rank 0 prints a JSON line for each pair: seconds of
the loop, the longest of any rank, and how much of that the call took.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

import ckpt_tool
from tests.bench.save_job import build, slowest

SECONDS = 3.0
"""How long a loop is to take without a save."""


def python() -> None:
    """Some milliseconds of the interpreter's work, as of a training loop that is bound by it."""
    found: dict[int, int] = {}
    for number in range(20_000):
        found[number % 97] = found.get(number % 89, 0) + number


def products() -> None:
    """Some milliseconds of matrix products, which hold no lock of the interpreter."""
    torch.mm(_LEFT, _RIGHT)


_LEFT, _RIGHT = torch.randn(512, 512), torch.randn(512, 512)
LOOPS: dict[str, Callable[[], None]] = {"python": python, "products": products}


def n_steps(step: Callable[[], None]) -> int:
    """How many steps take `SECONDS` on the slowest rank."""
    for _ in range(20):
        step()
    begun = time.perf_counter()
    for _ in range(100):
        step()
    return max(1, int(SECONDS / slowest((time.perf_counter() - begun) / 100)))


def measured(begin: Callable[[], Any], step: Callable[[], None], n: int) -> tuple[float, float]:
    """Seconds of the loop and of the call in it; what was begun is awaited afterwards."""
    dist.barrier()
    begun = time.perf_counter()
    wait = begin()
    called = time.perf_counter() - begun
    for _ in range(n):
        step()
    took = time.perf_counter() - begun
    if wait is not None:
        wait()
    return slowest(took), slowest(called)


def main(folder: str, megabytes: float, n_rounds: int, loops: list[str]) -> None:
    """Loops with all ways, in turns."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    state = build(init_device_mesh("cpu", (dist.get_world_size(),)), megabytes)
    group = dist.new_group(backend="gloo")
    ways: dict[str, Callable[[], Any]] = {
        "nothing": lambda: None,
        "dcp_async": lambda: dcp.async_save(state, checkpoint_id=f"{folder}/dcp", process_group=group).result,
        "ours": lambda: ckpt_tool.save(state, f"{folder}/ours").wait,
    }
    for name in loops:
        step = LOOPS[name]
        n = n_steps(step)
        seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for number in range(n_rounds + 2):  # ours needs two to have both arenas
            for way, begin in ways.items():
                took = measured(begin, step, n)
                if number > 1:
                    seconds[way].append(took)
        if dist.get_rank() == 0:
            for way, rows in seconds.items():
                medians = [statistics.median(column) for column in zip(*rows, strict=True)]
                print("ROW " + json.dumps({"loop": name, "way": way, "seconds": medians[0], "called": medians[1]}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4:] or list(LOOPS))
