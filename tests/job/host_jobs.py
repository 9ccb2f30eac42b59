"""A job whose ranks run on two hosts: real ones as far as the kernel is concerned, or ranks that say so.

``python -m tests.job.host_jobs FOLDER`` is one rank of a job, whose number and master are in the environment.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

import ckpt_tool
from ckpt_tool.api.job.saver import saver_of
from ckpt_tool.engine import shared_memory
from ckpt_tool.engine.distributed_group import Group
from ckpt_tool.engine.distributed_hosts import hosts_of
from ckpt_tool.engine.save import joining
from tests.job import workers
from tests.job.save_faults import told, writer_pid
from tests.job.save_jobs import mesh_of

SIZE, PER_HOST = 4, 2
LAYOUTS = {"rows": (Shard(0),), "columns": (Shard(1),), "hsdp": (Replicate(), Shard(0)), "replicas": (Replicate(),)}
EXCHANGES = ("auto", *workers.EXCHANGES)
FORMATS = ("dcp", "safetensors")
FIXTURE = "dcp_fsdp2_4r_fp32"


def pretending(rank: int, size: int, rendezvous: str, out: str) -> None:
    """One rank of a job on one host, which says that it is on one of two."""
    shared_memory.host_key = lambda: rank // PER_HOST
    joining._boot_id = lambda: f"boot {rank // PER_HOST}"
    joining._own_address = lambda: "127.0.0.1"
    with workers.joined(rank, size, rendezvous):
        _work(out)


def main(out: str) -> None:
    """One rank of a job on two hosts; the last one is killed in the end."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    _work(out)
    if dist.get_rank() == SIZE - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    found = {
        "load": told(lambda: ckpt_tool.load(workers.plain(FIXTURE), workers.url(FIXTURE), timeout_s=10.0)),
        "save": told(lambda: ckpt_tool.save(workers.plain(FIXTURE), f"{out}/lost", timeout_s=10.0).wait()),
    }
    Path(f"{out}/lost.{dist.get_rank()}.json").write_text(json.dumps(found), encoding="utf-8")
    ends = time.monotonic() + 30.0
    while dist.get_rank() == 0 and len(list(Path(out).glob("lost.*.json"))) < SIZE - 1 and time.monotonic() < ends:
        time.sleep(0.05)  # this rank serves the store that the others ask who is gone
    os._exit(0)


def _work(out: str) -> None:
    """Load in every layout and every way, save in two formats, and load what was saved; say what was seen."""
    rank = dist.get_rank()
    found: dict[str, Any] = {"name": socket.gethostname(), "loads": {}, "saves": {}}
    for layout in LAYOUTS:
        for way in EXCHANGES:
            found["loads"][f"{layout} {way}"] = _loaded(layout, way, workers.url(FIXTURE))
        with workers.slow_storage():
            found["loads"][f"{layout} slow"] = _loaded(layout, "auto", workers.url(FIXTURE), 2 << 20)
    for name in FORMATS:
        state = {"model": dict(_state("hsdp", is_empty=False)), "step": 7}
        first = ckpt_tool.save(state, f"{out}/{name}-1", format=name, extra_state={"rank": rank})
        second = ckpt_tool.save(state, f"{out}/{name}-2", format=name, overlap_staging=True)
        found["saves"][name] = [handle.wait().payload_nbytes for handle in (first, second)]
        found["loads"][f"saved {name}"] = _loaded("columns", "auto", f"{out}/{name}-2")
    place = saver_of(None)._place
    found["tree"] = None if place is None else [place.parent, place.children]
    found["groups"] = hosts_of(Group(timeout_s=10.0)).groups
    found["failure"] = told(lambda: _refused(f"{out}/refused"))
    Path(f"{out}/{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def _refused(url: str) -> None:
    """A save for which a process on the other host does nothing for too long."""
    is_still = dist.get_rank() == SIZE - 1
    if is_still:
        os.kill(writer_pid(), signal.SIGSTOP)
    handle = ckpt_tool.save({"w": torch.ones(3)}, url, timeout_s=1.0)
    if is_still:
        time.sleep(2.5)
        os.kill(writer_pid(), signal.SIGCONT)
    handle.wait()


def _state(layout: str, *, is_empty: bool) -> Iterator[tuple[str, torch.Tensor]]:
    placements = LAYOUTS[layout]
    mesh = mesh_of(placements)
    for name, tensor in workers.truth_of(FIXTURE).items():
        yield name, workers.cut_of(torch.zeros_like(tensor) if is_empty else tensor, mesh, placements)


def _loaded(layout: str, way: Any, url: str, budget: int = 1 << 20) -> dict[str, Any]:
    """What a load did, and what is not as in the truth. Plans of another budget are not used again."""
    state = dict(_state(layout, is_empty=True))
    expected = dict(_state(layout, is_empty=False))
    report = ckpt_tool.load(state, url, exchange=way, memory_budget_bytes=budget)
    different = [name for name in state if workers.bits_of(state[name]) != workers.bits_of(expected[name])]
    return {
        "different": different, "exchange": report.exchange, "why": report.why, "read": report.read_nbytes,
        "needed": report.filled_nbytes, "sent": report.sent_nbytes,
    }  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1])
