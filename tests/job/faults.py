"""Jobs in which one rank is killed, or is slow, at a named stage of a load; the others say what they raised, and when.

Processes are started one by one and not by ``torch.multiprocessing``, which ends all when one is killed.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

import ckpt_tool
from ckpt_tool.api.job import load as load_module
from ckpt_tool.api.job import load_manifest as manifest_module
from ckpt_tool.errors import CkptError
from ckpt_tool.frameworks import state as state_module
from tests.job import workers
from tests.ranks import ranks_context

STAGES = ("state", "metadata", "boxes", "plan", "reading", "values")
"""When a rank is struck: as it looks at its state, reads metadata, tells its boxes, plans, reads, sets values."""


def run(stage: str, way: str, folder: Path, *, size: int, struck: int, seconds: float, timeout_s: float) -> list[Any]:
    """What each rank raised, None for one that was killed.

    Args:
        stage: one of ``STAGES``.
        way: of exchange.
        folder: for files.
        size: ranks.
        struck: the rank that is struck.
        seconds: how long it then stands still; 0 for being killed.
        timeout_s: given to every load.
    """
    context = ranks_context()
    blow = _Blow(stage, struck, seconds)
    jobs = [context.Process(target=_rank, args=(rank, size, str(folder), way, blow, timeout_s)) for rank in range(size)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(120)
        if job.is_alive():
            job.kill()
    paths = [folder / f"{rank}.json" for rank in range(size)]
    return [json.loads(path.read_text(encoding="utf-8")) if path.exists() else None for path in paths]


@dataclass(frozen=True, slots=True)
class _Blow:
    """What befalls one rank."""

    stage: str
    rank: int
    seconds: float

    def strike(self) -> None:
        if self.seconds:
            time.sleep(self.seconds)
        else:
            os.kill(os.getpid(), signal.SIGKILL)

    def arm(self) -> None:
        """Have this process struck when it comes to the stage."""
        match self.stage:
            case "state":
                _before(state_module, "walk_state", self.strike)
            case "metadata":
                _before(manifest_module.SharedManifest, "read", self.strike)
            case "boxes":
                _before(load_module, "target_of", self.strike)
            case "plan":
                _before(load_module, "plan_moves", self.strike)
            case "reading":
                _before(load_module, "run_moves", self.strike)
            case "values":
                _before(load_module._Loading, "_set_values", self.strike)


def _rank(rank: int, size: int, folder: str, way: Any, blow: _Blow, timeout_s: float) -> None:
    with workers.joined(rank, size, f"{folder}/rendezvous", is_lost=True):
        state = {**workers.plain("hf_sharded"), "step": 1}
        dist.barrier()
        if rank == blow.rank:
            time.sleep(0.2)  # until the others are out of the barrier
            blow.arm()
        begun = time.perf_counter()
        told: dict[str, Any] = {"kind": None, "text": ""}
        try:
            ckpt_tool.load(state, workers.url("hf_sharded"), exchange=way, timeout_s=timeout_s)
        except CkptError as error:
            told = {"kind": type(error).__name__, "text": str(error)}
        told["seconds"] = time.perf_counter() - begun
        Path(f"{folder}/{rank}.json").write_text(json.dumps(told), encoding="utf-8")
        os._exit(0)


def _before(owner: Any, name: str, strike: Callable[[], None]) -> None:
    real = getattr(owner, name)

    def struck(*args: Any, **kwargs: Any) -> Any:
        strike()
        return real(*args, **kwargs)

    setattr(owner, name, struck)
