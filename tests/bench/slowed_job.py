"""torchrun --nproc_per_node=N slowed_job.py FOLDER MEGABYTES ROUNDS [LOOP ...]: how much a save slows a loop down.

Two loops of some seconds, one of Python alone and one of matrix products, each by itself, with one save of torch's
``async_save`` begun at its start, and with one of ours; in turns, forwards and backwards. Each loop is compared with
the one without a save in the same round, by the clock and by the processor's time of the thread that trains: the
latter knows nothing of other programs that want the processor, and so nothing of what a writer takes of it either,
only of what it does to caches and memory. Rank 0 prints a JSON line for each pair: medians over the rounds of

- ``called``: seconds that the call took;
- ``wall`` and ``cpu``: how much longer the loop took apart from the call, as a part of what it takes without a save,
  the mean of all ranks; ``spread`` is the distance between the quartiles of ``wall``;
- ``share``: the part of the loop in which the save was under way.

``CKPT_BENCH_LOOP_S`` sets how long a loop is to take without a save (2).
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

import ckpt_tool
from tests.bench.save_job import build, slowest

SECONDS = float(os.environ.get("CKPT_BENCH_LOOP_S", "2"))
Ends = Callable[[], float]
"""Waits for a save; the moment at which it ended, in seconds since 1970."""


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


@dataclass(frozen=True)
class Seen:
    """One loop of one rank, in seconds."""

    called: float
    wall: float
    """Of the loop, without the call."""
    cpu: float
    share: float


def measured(begin: Callable[[], Ends], step: Callable[[], None], n: int) -> Seen:
    """A loop; what was begun is awaited afterwards."""
    dist.barrier()
    begun = time.perf_counter()
    wait = begin()
    from_when, after, cpu = time.time(), time.perf_counter(), time.thread_time()
    for _ in range(n):
        step()
    wall, cpu = time.perf_counter() - after, time.thread_time() - cpu
    return Seen(after - begun, wall, cpu, min(1.0, max(0.0, wait() - from_when) / wall))


def compared(seen: Seen, alone: Seen) -> tuple[float, ...]:
    """``called``, ``wall``, ``cpu`` and ``share`` of all ranks."""
    means = (of_all(each) for each in (seen.wall / alone.wall - 1, seen.cpu / alone.cpu - 1, seen.share))
    return slowest(seen.called), *means


def of_all(number: float) -> float:
    """The mean over the ranks."""
    total = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(total)
    mean: float = float(total) / dist.get_world_size()
    return mean


def with_nothing() -> Ends:
    """No save."""
    now = time.time()
    return lambda: now


def with_dcp(state: dict[str, Any], folder: str, group: Any) -> Ends:
    """``dcp.async_save``."""
    ended = [0.0]

    def note(_: object) -> None:
        ended[0] = time.time()

    future: Any = dcp.async_save(state, checkpoint_id=folder, process_group=group)
    future.add_done_callback(note)

    def wait() -> float:
        future.result()
        return ended[0] or time.time()

    return wait


def with_ours(state: dict[str, Any], folder: str) -> Ends:
    """``ckpt_tool.save``; what it logs of this rank's writer process tells when that had done."""
    handle = ckpt_tool.save(state, folder)

    def wait() -> float:
        written = [each for each in handle.wait().operations if each.operation in {"write", "commit"}]
        ended: float = max(each.start + each.seconds for each in written)
        return ended

    return wait


def main(folder: str, megabytes: float, n_rounds: int, loops: list[str]) -> None:
    """Loops with all ways, in turns."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    state = build(init_device_mesh("cpu", (dist.get_world_size(),)), megabytes)
    group = dist.new_group(backend="gloo")
    ways: dict[str, Callable[[], Ends]] = {
        "nothing": with_nothing,
        "dcp_async": lambda: with_dcp(state, f"{folder}/dcp", group),
        "ours": lambda: with_ours(state, f"{folder}/ours"),
    }
    for begin in (ways["ours"], ways["ours"], ways["dcp_async"]):  # ours needs two to have both arenas
        begin()()
    for name in loops:
        step = LOOPS[name]
        n = n_steps(step)
        found: dict[str, list[tuple[float, ...]]] = {way: [] for way in ways}
        for number in range(n_rounds):
            seen = {way: measured(ways[way], step, n) for way in sorted(ways, reverse=number % 2 == 1)}
            again = measured(ways["nothing"], step, n)  # what two loops without a save differ by
            for way, each in seen.items():
                found[way].append(compared(again if way == "nothing" else each, seen["nothing"]))
        if dist.get_rank() == 0:
            for way, rows in found.items():
                called, wall, cpu, share = (statistics.median(column) for column in zip(*rows, strict=True))
                quarters = np.quantile([row[1] for row in rows], (0.25, 0.75))
                figures = {"called": called, "wall": wall, "spread": float(np.diff(quarters)[0]), "cpu": cpu}
                print("ROW " + json.dumps({"loop": name, "way": way, **figures, "share": share}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4:] or list(LOOPS))
