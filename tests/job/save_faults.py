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
from ckpt_tool.api.job.saver import Saver, saver_of
from ckpt_tool.engine.save.staging import Stager
from ckpt_tool.engine.shared_memory import has_ended
from tests.frameworks.wrappers import Sharded
from tests.job.save_jobs import mesh_of
from tests.job.workers import joined

SIZE = 3
TIMEOUT_S = 30.0
FORMATS = ("dcp", "safetensors", "bytecheckpoint", "megatron")
STAGES = ("walk", "stage", "told", "written")
"""When a rank dies: as it looks at its state, as it copies it, once its process is told, with bytes written."""
_CALLS: dict[str, tuple[Any, str]] = {"walk": (Saver, "_held"), "stage": (Stager, "start")}
_LONG_S = 20.0
_LIMITS = {resource.RLIMIT_FSIZE: "disk full", resource.RLIMIT_NOFILE: "storage error"}


def state_of(name: str, value: float) -> dict[str, Any]:
    """Some 150 KB for each rank to write, all of one value, as a trainer that saves in format ``name`` has it."""
    whole = torch.full((300, 400), value)
    if name == "megatron":
        rows = whole.chunk(dist.get_world_size())[dist.get_rank()].clone()
        return {"w": Sharded("w", rows, (300, 400), (dist.get_rank() * len(rows), 0)), "value": value}
    cut = distribute_tensor(whole, mesh_of((Shard(0),)), [Shard(0)], src_data_rank=None)
    return {"model": {"w": cut}, "value": value}


def vector_of(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    """A state of one tensor that every rank holds whole."""
    return {"w": Sharded("w", tensor, tuple(tensor.shape), (0,))} if name == "megatron" else {"model": {"w": tensor}}


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
    """In every format, one failure after another, and a save that works after each."""
    with joined(rank, size, rendezvous):
        warnings.simplefilter("error", RuntimeWarning)
        found = {name: _faults(rank, name, f"{out}/{name}") for name in FORMATS}
        Path(f"{out}/{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def _faults(rank: int, name: str, out: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def begin(state: dict[str, Any], step: str, **options: Any) -> Any:
        return ckpt_tool.save(state, f"{out}/{step}", format=name, **{"timeout_s": TIMEOUT_S, **options})

    def save(step: str, value: float = 1.0, **options: Any) -> None:
        begin(state_of(name, value), step, **options).wait()

    def works(fault: str) -> None:
        dist.barrier()
        found[f"after {fault}"] = told(lambda: save("step-1", 1.0))
        dist.barrier()

    def limited(kind: int, limit: int) -> None:
        """A save while the process of rank 1 may have no more than that of something."""
        before = resource.prlimit(writer_pid(), kind)
        if rank == 1:
            resource.prlimit(writer_pid(), kind, (limit, before[1]))
        found[_LIMITS[kind]] = told(lambda: save("step-1", 2.0))
        if rank == 1:
            resource.prlimit(writer_pid(), kind, before)
        works(_LIMITS[kind])

    works("nothing")
    begin(state_of(name, 1.0), "step-1").wait()  # now both arenas are known: files that a limit would forbid
    limited(resource.RLIMIT_FSIZE, 64 << 10)
    limited(resource.RLIMIT_NOFILE, 3)
    bad = vector_of(name, torch.zeros(2, device="meta") if rank == 2 else torch.zeros(2))
    found["no memory"] = told(lambda: begin(bad, "step-3").wait())
    works("no memory")
    found["shapes"] = told(lambda: begin(vector_of(name, torch.zeros(2 + rank // 2)), "step-3").wait())
    works("shapes")
    found["places"] = told(lambda: save(f"step-{rank}0"))
    works("places")
    found["kept"] = told(lambda: save("step-1", 2.0, overwrite=False))
    works("kept")
    if rank == 1:
        os.kill(writer_pid(), signal.SIGSTOP)
    found["slow"] = told(lambda: _waited_for_a_while(begin(state_of(name, 3.0), "step-3", timeout_s=1.0), rank))
    works("slow")
    _order(found, lambda value, step, **options: begin(state_of(name, value), step, **options), rank)
    _wait_for_removal(out, "step-7.*")  # each process gives up in its own time, and one is killed now
    if rank == 2:
        os.kill(writer_pid(), signal.SIGSTOP)
    handle = begin(state_of(name, 3.0), "step-3")
    if rank == 2:
        os.kill(writer_pid(), signal.SIGKILL)
    found["writer killed"] = told(handle.wait)
    works("writer killed")
    found["steps"] = sorted(os.listdir(out))
    return found


def _wait_for_removal(out: str, pattern: str) -> None:
    """Return when nothing of that name is left, or when it should have gone long ago."""
    end = time.monotonic() + _LONG_S
    while any(Path(out).glob(pattern)) and time.monotonic() < end:
        time.sleep(0.01)
    dist.barrier()


def _waited_for_a_while(handle: Any, rank: int) -> None:
    """A save for which one rank's process does nothing for longer than it may take."""
    if rank == 1:
        time.sleep(2.5)
        os.kill(writer_pid(), signal.SIGCONT)
    handle.wait()


def _order(found: dict[str, Any], begin: Callable[..., Any], rank: int) -> None:
    """Two saves while the root sleeps; a third one has to wait, and is given up; the two are completed in order."""
    if rank == 0:
        os.kill(writer_pid(), signal.SIGSTOP)
    dist.barrier()
    handles = [begin(5.0 + n, f"step-{5 + n}") for n in range(2)]
    found["pending"] = [handle.done() for handle in handles]
    third: list[Any] = []
    found["third"] = told(lambda: third.append(begin(7.0, "step-7", timeout_s=1.0)))
    dist.barrier()
    if rank == 0:
        os.kill(writer_pid(), signal.SIGCONT)
    handles[1].wait()
    found["first is done"] = handles[0].done()
    handles[0].wait()
    if third:  # on this rank both were written, and only the root had nobody to end them
        found["third"] = told(third[0].wait)
    dist.barrier()


def lost_rank(rank: int, size: int, rendezvous: str, out: str, name: str, stage: str) -> None:
    """A good save; then the last rank dies at one of ``STAGES`` of another one.

    The process beside it outlives it by a moment, in which it may complete a small save: once it knows of the save, it
    dies with its rank.
    """
    with joined(rank, size, rendezvous, is_lost=True):
        ckpt_tool.save(state_of(name, 1.0), f"{out}/step-1", format=name).wait()
        pids = torch.zeros(size, dtype=torch.int64)
        pids[rank] = os.getpid()
        dist.all_reduce(pids)
        is_lost = rank == size - 1
        if is_lost and stage in _CALLS:
            _kill_before(*_CALLS[stage])
        if (is_lost and stage == "told") or (rank == 0 and stage == "written"):
            os.kill(writer_pid(), signal.SIGSTOP)
        dist.barrier()
        handle = ckpt_tool.save(state_of(name, 2.0), f"{out}/step-2", format=name, timeout_s=TIMEOUT_S)
        if is_lost:
            while stage == "written" and not _has_written(out, rank):
                time.sleep(0.01)
            os.kill(writer_pid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        while stage == "written" and not has_ended(int(pids[-1])):
            time.sleep(0.01)
        os.kill(writer_pid(), signal.SIGCONT)
        Path(f"{out}.{rank}.json").write_text(json.dumps(told(handle.wait)), encoding="utf-8")
        os._exit(0)


def _kill_before(owner: Any, name: str) -> None:
    """Have this process killed when it comes to a method."""
    setattr(owner, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))


def _has_written(out: str, rank: int) -> bool:
    """Whether a file of this rank is in the folder of the second save."""
    return any(path.is_file() for path in Path(out).glob(f"step-2.*/**/*{rank}*"))


def lost_job(rank: int, size: int, rendezvous: str, out: str, name: str) -> None:
    """A good save; then all ranks die while their bytes are written and the root sleeps."""
    with joined(rank, size, rendezvous, is_lost=True):
        ckpt_tool.save(state_of(name, 1.0), f"{out}/step-1", format=name).wait()
        if rank == 0:
            os.kill(writer_pid(), signal.SIGSTOP)
        dist.barrier()
        handle = ckpt_tool.save(state_of(name, 2.0), f"{out}/step-2", format=name)
        while rank and not _has_written(out, rank):
            time.sleep(0.01)
        handle.done()
        os.kill(writer_pid(), signal.SIGSTOP)
        dist.barrier()  # a process that outlives another one by a moment would clean up behind it
        os.kill(writer_pid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
