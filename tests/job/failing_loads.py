"""Loads that must fail, whichever rank it is that something befalls; each rank says on a file what it raised."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ckpt_tool
from ckpt_tool.engine import distributed_hosts as hosts_module
from ckpt_tool.engine.shared_memory import Segment
from ckpt_tool.errors import CkptError, StorageError
from tests.job.workers import joined, plain, store_of, url
from tests.storage.recording import RecordingStore


def failures(rank: int, world_size: int, rendezvous: str, out: str) -> None:
    """Provoke one failure after another; each must be raised here, whichever rank it befell."""
    with joined(rank, world_size, rendezvous):
        if rank == 0:
            shutil.copytree(url("hf_sharded"), f"{out}/copy")
        dist.barrier()
        found = {name: _failure(work, rank) for name, work in _faults(rank, f"{out}/copy").items()}
        report = ckpt_tool.load({**plain("hf_sharded"), "mine": torch.ones(2)}, url("hf_sharded"), strict=False)
        found["not strict"] = {"missing": report.missing, "unexpected": report.unexpected}
        Path(f"{out}/{rank}.json").write_text(json.dumps(found), encoding="utf-8")


@contextmanager
def _reads(fault: Callable[[], Any]) -> Any:
    """Every read of payload does ``fault``."""

    class Faulty(RecordingStore):
        def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
            fault()

    with store_of(Faulty):
        yield


@contextmanager
def _unshared(step: str) -> Any:
    """``step`` of sharing memory fails, once ranks come to share payload."""
    opened, taken = hosts_module.open_segments, getattr(Segment, step)

    def open_segments(*args: Any) -> Any:
        setattr(Segment, step, staticmethod(lambda *_: _raise(StorageError(f"cannot {step}"))))
        try:
            return opened(*args)
        finally:
            setattr(Segment, step, taken)

    hosts_module.open_segments = open_segments  # type: ignore[assignment]
    try:
        yield
    finally:
        hosts_module.open_segments = opened


def _raise(error: Exception) -> None:
    raise error


def _faults(rank: int, copy: str) -> dict[str, Callable[[], Any]]:
    """Name to a load that must fail on every rank; files of ``copy`` may change."""

    def unreadable(way: Any, error: Exception, only: int) -> None:
        fault: AbstractContextManager[Any] = _reads(lambda: _raise(error)) if rank == only else nullcontext()
        with fault:
            ckpt_tool.load(plain("hf_sharded"), url("hf_sharded"), exchange=way)

    def changing(way: Any, *, again: bool = False) -> None:
        file = next(Path(copy).glob("*.safetensors"))
        if again:  # what was planned then is carried out once more
            ckpt_tool.load(plain("hf_sharded"), copy, exchange=way)
        fault: AbstractContextManager[Any] = (
            _reads(lambda: os.utime(file, ns=(0, time.time_ns()))) if rank == 2 else nullcontext()
        )
        with fault:
            ckpt_tool.load(plain("hf_sharded"), copy, exchange=way)

    def misfit(**changes: torch.Tensor) -> None:
        ckpt_tool.load({**plain("hf_sharded"), **changes}, url("hf_sharded"))

    def unshared(step: str, only: int) -> None:
        """Only while memory is shared for payload: metadata has come through such memory as well."""
        fault: AbstractContextManager[Any] = _unshared(step) if rank == only else nullcontext()
        with fault:
            ckpt_tool.load(plain("hf_sharded"), url("hf_sharded"), exchange="shared-memory")

    broken = StorageError("the disk is gone", where="model-00001.safetensors")
    return {
        "read none": lambda: unreadable("none", broken, 2),
        "read shared-memory": lambda: unreadable("shared-memory", broken, 2),
        "read all-to-all": lambda: unreadable("all-to-all", broken, 2),
        "read by the first": lambda: unreadable("all-to-all", broken, 0),
        "changed none": lambda: changing("none"),
        "changed shared-memory": lambda: changing("shared-memory"),
        "changed all-to-all": lambda: changing("all-to-all"),
        "changed again": lambda: changing("none", again=True),
        "no segment": lambda: unshared("create", 1),
        "no mapping": lambda: unshared("of_process", 3),
        "bug": lambda: unreadable("all-to-all", ZeroDivisionError("oops"), 1),
        "shape": lambda: misfit(**({"buf_i64": torch.zeros(4, dtype=torch.int64)} if rank == 1 else {})),
        "dtype": lambda: misfit(buf_i64=torch.zeros(3)),
        "missing": lambda: misfit(mine=torch.zeros(3), also=torch.zeros(3)),
        "unexpected": lambda: ckpt_tool.load(
            {k: v for k, v in plain("hf_sharded").items() if k != "buf_i64"}, url("hf_sharded")
        ),
        "nowhere": lambda: ckpt_tool.load(plain("hf_sharded"), url("hf_sharded") + "-nowhere"),
        "no tensor": lambda: ckpt_tool.load(
            {"w": torch.zeros(2, device="meta") if rank == 3 else torch.zeros(2)}, url("hf_sharded")
        ),
    }


def _failure(work: Callable[[], Any], rank: int) -> dict[str, Any]:
    begun = time.perf_counter()
    try:
        work()
    except CkptError as error:
        return {"kind": type(error).__name__, "text": str(error), "seconds": time.perf_counter() - begun}
    return {"kind": None, "text": f"rank {rank} raised nothing", "seconds": time.perf_counter() - begun}
