"""Processes of a training job that save to object storage and load from it; each says on a file what it saw."""

from __future__ import annotations

import json
import os
import signal
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

import ckpt_tool
from ckpt_tool.storage.s3.place import S3Place
from ckpt_tool.storage.shared_target import open_shared
from tests.job.save_faults import state_of, told, writer_pid
from tests.job.save_jobs import differences
from tests.job.save_jobs import state_of as truth_in
from tests.job.workers import joined

TIMEOUT_S = 60.0


def saves(rank: int, size: int, rendezvous: str, out: str, url: str) -> None:
    """Save and load; save again over it; two saves of which the storage refuses one; a good one."""
    with joined(rank, size, rendezvous):
        found: dict[str, object] = {"differences": _there_and_back(url)}
        dist.barrier()
        Path(out, "refuses").touch()
        found["refused"] = told(
            lambda: ckpt_tool.save(state_of("dcp", 3.0), f"{url}/step-3", timeout_s=TIMEOUT_S).wait()
        )
        dist.barrier()
        Path(out, "refuses").unlink(missing_ok=True)
        dist.barrier()
        while len(ckpt_tool.ls(url).steps) > 2:  # each rank's process lets go of its parts in its own time
            time.sleep(0.05)
        dist.barrier()
        found["after"] = told(lambda: ckpt_tool.save(state_of("dcp", 4.0), f"{url}/step-3", timeout_s=TIMEOUT_S).wait())
        Path(out, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def saves_to_hdfs(rank: int, size: int, rendezvous: str, out: str, url: str) -> None:
    """Save and load; save again over it; begin a save that never ends."""
    with joined(rank, size, rendezvous):
        found = {"differences": _there_and_back(url)}
        dist.barrier()
        target = open_shared(f"{url}/step-3", "00000009", overwrite=True, durable=True)
        file = target.create(f"__{rank}_0.distcp", 5)
        file.write([memoryview(b"bytes")])
        file.finish()
        Path(out, f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def _there_and_back(url: str) -> list[str]:
    """What is not as in the truth, in another layout than it was saved in; and one step that is saved twice."""
    warnings.simplefilter("error", RuntimeWarning)
    ckpt_tool.save(truth_in("rows"), f"{url}/step-1", timeout_s=TIMEOUT_S).wait()
    state = truth_in("columns", is_empty=True)
    ckpt_tool.load(state, f"{url}/step-1")
    for value in (1.0, 2.0):
        ckpt_tool.save(state_of("dcp", value), f"{url}/step-2", timeout_s=TIMEOUT_S).wait()
    return differences("columns", state)


def saves_alone(url: str) -> None:
    """One save of a job of one process."""
    ckpt_tool.save(state_of_one(4.0), url, async_=False)


def state_of_one(value: float) -> dict[str, object]:
    """As `state_of`, whole."""
    return {"model": {"w": torch.full((300, 400), value)}, "value": value}


def lost_job(rank: int, size: int, rendezvous: str, url: str) -> None:
    """All ranks die when the bytes of the last one are sent, while the root sleeps."""
    with joined(rank, size, rendezvous, is_lost=True):
        ckpt_tool.save(state_of("dcp", 1.0), f"{url}/step-1").wait()
        if rank == 0:
            os.kill(writer_pid(), signal.SIGSTOP)
        dist.barrier()
        handle = ckpt_tool.save(state_of("dcp", 2.0), f"{url}/step-2")
        place = S3Place(f"{url}/step-2", single_file=False)
        while rank and not any(begun.parts for _, begun in place.under_way()):
            time.sleep(0.01)
        handle.done()
        os.kill(writer_pid(), signal.SIGSTOP)
        dist.barrier()  # a process that outlives another one by a moment would clean up behind it
        os.kill(writer_pid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
