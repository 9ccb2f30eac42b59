"""Processes of a training job in which saves fail; each says on a file what it raised."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt_tool
from ckpt_tool.api.job.saver import saver_of
from tests.job.save_jobs import mesh_of
from tests.job.workers import joined

SIZE = 3
TIMEOUT_S = 30.0


def state_of(value: float) -> dict[str, Any]:
    """Some 150 KB for each rank to write, all of one value."""
    whole = torch.full((300, 400), value)
    return {"w": distribute_tensor(whole, mesh_of((Shard(0),)), [Shard(0)], src_data_rank=None), "value": value}


def writer_pid() -> int:
    """This rank's writer process."""
    return saver_of(None)._running().pid


def told(work: Callable[[], Any]) -> dict[str, Any]:
    """What ``work`` raised, and how long it took."""
    begun = time.perf_counter()
    try:
        work()
    except Exception as error:  # noqa: BLE001 - told
        return {"kind": type(error).__name__, "text": str(error), "seconds": time.perf_counter() - begun}
    return {"kind": None, "text": "", "seconds": time.perf_counter() - begun}


def faults(rank: int, size: int, rendezvous: str, out: str) -> None:
    """One failure after another, and a save that works after each."""
    with joined(rank, size, rendezvous):
        warnings.simplefilter("error", RuntimeWarning)
        found: dict[str, Any] = {}

        def save(name: str, value: float = 1.0, **options: Any) -> None:
            ckpt_tool.save(state_of(value), f"{out}/{name}", timeout_s=TIMEOUT_S, **options).wait()

        def works(name: str) -> None:
            dist.barrier()
            found[f"after {name}"] = told(lambda: save("step-1", 1.0))
            dist.barrier()

        works("nothing")
        limits = resource.prlimit(writer_pid(), resource.RLIMIT_FSIZE)
        if rank == 1:
            resource.prlimit(writer_pid(), resource.RLIMIT_FSIZE, (64 << 10, limits[1]))
        found["disk full"] = told(lambda: save("step-1", 2.0))
        if rank == 1:
            resource.prlimit(writer_pid(), resource.RLIMIT_FSIZE, limits)
        found["left"] = sorted(os.listdir(out))
        works("disk full")
        bad = {"w": torch.zeros(2, device="meta") if rank == 2 else torch.zeros(2)}
        found["no memory"] = told(lambda: ckpt_tool.save(bad, f"{out}/step-3", timeout_s=TIMEOUT_S).wait())
        works("no memory")
        shapes = {"w": torch.zeros(2 + rank // 2)}
        found["shapes"] = told(lambda: ckpt_tool.save(shapes, f"{out}/step-3", timeout_s=TIMEOUT_S).wait())
        works("shapes")
        found["places"] = told(lambda: save(f"step-{rank}0"))
        works("places")
        found["kept"] = told(lambda: save("step-1", 2.0, overwrite=False))
        works("kept")
        if rank == 1:
            os.kill(writer_pid(), signal.SIGSTOP)
        found["slow"] = told(lambda: _waited_for_a_while(f"{out}/step-3", rank))
        works("slow")
        _order(found, out, rank)
        if rank == 2:
            os.kill(writer_pid(), signal.SIGSTOP)
        handle = ckpt_tool.save(state_of(3.0), f"{out}/step-3", timeout_s=TIMEOUT_S)
        if rank == 2:
            os.kill(writer_pid(), signal.SIGKILL)
        found["writer killed"] = told(handle.wait)
        works("writer killed")
        found["steps"] = sorted(os.listdir(out))
        Path(f"{out}.{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def _waited_for_a_while(url: str, rank: int) -> None:
    """A save for which one rank's process does nothing for longer than it may take."""
    handle = ckpt_tool.save(state_of(3.0), url, timeout_s=2.0)
    if rank == 1:
        time.sleep(5.0)
        os.kill(writer_pid(), signal.SIGCONT)
    handle.wait()


def _order(found: dict[str, Any], out: str, rank: int) -> None:
    """Two saves while the root sleeps; a third one has to wait, and is given up; the two are completed in order."""
    if rank == 0:
        os.kill(writer_pid(), signal.SIGSTOP)
    dist.barrier()
    handles = [ckpt_tool.save(state_of(5.0 + n), f"{out}/step-{5 + n}", timeout_s=TIMEOUT_S) for n in range(2)]
    found["pending"] = [handle.done() for handle in handles]
    third: list[Any] = []
    found["third"] = told(lambda: third.append(ckpt_tool.save(state_of(7.0), f"{out}/step-7", timeout_s=1.0)))
    dist.barrier()
    if rank == 0:
        os.kill(writer_pid(), signal.SIGCONT)
    handles[1].wait()
    found["first is done"] = handles[0].done()
    handles[0].wait()
    if third:  # on this rank both were written, and only the root had nobody to end them
        found["third"] = told(third[0].wait)
    dist.barrier()


def lost_rank(rank: int, size: int, rendezvous: str, out: str) -> None:
    """A good save; then the last rank dies, and the process beside it before it has begun to write.

    That process outlives its rank by a moment, in which it may complete a small save: so it dies with it.
    """
    with joined(rank, size, rendezvous, is_lost=True):
        ckpt_tool.save(state_of(1.0), f"{out}/step-1").wait()
        if rank == size - 1:
            os.kill(writer_pid(), signal.SIGSTOP)
        dist.barrier()
        handle = ckpt_tool.save(state_of(2.0), f"{out}/step-2", timeout_s=TIMEOUT_S)
        if rank == size - 1:
            os.kill(writer_pid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        Path(f"{out}.{rank}.json").write_text(json.dumps(told(handle.wait)), encoding="utf-8")
        os._exit(0)


def lost_job(rank: int, size: int, rendezvous: str, out: str) -> None:
    """A good save; then all ranks die while their bytes are written and the root sleeps."""
    with joined(rank, size, rendezvous, is_lost=True):
        ckpt_tool.save(state_of(1.0), f"{out}/step-1").wait()
        if rank == 0:
            os.kill(writer_pid(), signal.SIGSTOP)
        dist.barrier()
        handle = ckpt_tool.save(state_of(2.0), f"{out}/step-2")
        while rank and not list(Path(out).glob(f"step-2.*/__{rank}_0.distcp")):
            time.sleep(0.01)
        handle.done()
        os.kill(writer_pid(), signal.SIGSTOP)
        dist.barrier()  # a process that outlives another one by a moment would clean up behind it
        os.kill(writer_pid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
