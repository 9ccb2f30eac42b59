"""torchrun --nproc_per_node=4 save_job.py FOLDER MEGABYTES ROUNDS: saves in turns: memory, raw files, torch's, ours.

The state is what FSDP2 and Adam have of a row of linear layers: weights and two moments, ``Shard(0)``. Rank 0 prints
one JSON line for each way of saving: seconds of all rounds until the call returns, until the state may be changed, and
until all is durable, each the longest of any rank. torch-checkpointing takes part where it is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, zeros

import ckpt_tool

WIDTH = 1024
PEER_MAKE = Path(__file__).parents[2] / "fixtures/torch_checkpointing/make"
Moments = tuple[float, float]
"""When the call returned, and when the state could be changed; seconds from the start."""


def build(mesh: DeviceMesh, megabytes: float) -> dict[str, Any]:
    """A nested state of layers of WIDTH x WIDTH."""
    n_layers = max(1, int(megabytes * 1e6 / (3 * 4 * WIDTH * WIDTH)))

    def tensor() -> DTensor:
        made: DTensor = zeros((WIDTH, WIDTH), device_mesh=mesh, placements=[Shard(0)])
        made.to_local().normal_()
        return made

    names = [f"layers.{i}.weight" for i in range(n_layers)]
    slots = ("exp_avg", "exp_avg_sq")
    return {
        "model": {name: tensor() for name in names},
        "optim": {"state": {name: {slot: tensor() for slot in slots} for name in names}},
    }


def locals_of(state: dict[str, Any]) -> list[torch.Tensor]:
    """Local tensors, in order."""
    found = []
    for value in state.values():
        found += locals_of(value) if isinstance(value, dict) else [value.to_local()]
    return found


def slowest(seconds: float) -> float:
    """The longest time of any rank."""
    number = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return float(number)


class Ways:
    """Ways to save one state; each tells its moments when the state may be changed, and ends when all is durable."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state
        self._spare = [tensor.clone() for tensor in locals_of(state)]
        self._group = dist.new_group(backend="gloo")
        self._manager: Any = None

    def memcpy(self, folder: str) -> Iterator[Moments]:
        """The floor of a stall."""
        del folder
        begun = time.perf_counter()
        for tensor, other in zip(locals_of(self.state), self._spare, strict=True):
            other.copy_(tensor)
        took = time.perf_counter() - begun
        yield took, took

    def raw(self, folder: str) -> Iterator[Moments]:
        """The floor of a durable save: a write for each tensor, and one fsync."""
        os.makedirs(folder, exist_ok=True)
        begun = time.perf_counter()
        with open(f"{folder}/{dist.get_rank()}.bin", "wb", buffering=0) as file:
            file.writelines(tensor.numpy().view("u1").reshape(-1).data for tensor in locals_of(self.state))
            os.fsync(file.fileno())
        took = time.perf_counter() - begun
        yield took, took

    def dcp_sync(self, folder: str) -> Iterator[Moments]:
        """``dcp.save``, which fsyncs."""
        begun = time.perf_counter()
        dcp.save(self.state, checkpoint_id=folder)
        took = time.perf_counter() - begun
        yield took, took

    def dcp_async(self, folder: str) -> Iterator[Moments]:
        """``dcp.async_save``, on a group of its own: its thread's collectives would meet those of the training."""
        begun = time.perf_counter()
        future: Any = dcp.async_save(self.state, checkpoint_id=folder, process_group=self._group)
        took = time.perf_counter() - begun
        yield took, took
        future.result()

    def peer(self, folder: str) -> Iterator[Moments]:
        """torch-checkpointing's asynchronous saver, which never fsyncs."""
        if self._manager is None:
            self._manager = peer_manager()
        begun = time.perf_counter()
        future = self._manager.save(folder, self.state)
        returned = time.perf_counter() - begun
        with self._manager.lock():
            staged = time.perf_counter() - begun
        yield returned, staged
        future.result()

    def ours(self, folder: str) -> Iterator[Moments]:
        """``ckpt_tool.save``."""
        begun = time.perf_counter()
        handle = ckpt_tool.save(self.state, folder)
        took = time.perf_counter() - begun
        yield took, took
        handle.wait()

    def ours_overlapped(self, folder: str) -> Iterator[Moments]:
        """The same with staging in the background."""
        begun = time.perf_counter()
        handle = ckpt_tool.save(self.state, folder, overlap_staging=True)
        returned = time.perf_counter() - begun
        handle.wait_staged()
        staged = time.perf_counter() - begun
        yield returned, staged
        handle.wait()

    def ours_sync(self, folder: str) -> Iterator[Moments]:
        """The same, waited for."""
        begun = time.perf_counter()
        ckpt_tool.save(self.state, folder, async_=False)
        took = time.perf_counter() - begun
        yield took, took

    def close(self) -> None:
        """End what was started."""
        if self._manager is not None:
            self._manager.close()


def peer_manager() -> Any:
    """A manager of torch-checkpointing 0.1.1 for two items."""
    sys.path.insert(0, str(PEER_MAKE))
    importlib.import_module("_cpu").patch()  # it asks for a GPU
    peer = importlib.import_module("torch_checkpointing")
    config = importlib.import_module("torch_checkpointing.config")
    resharder = importlib.import_module("torch_checkpointing.default_resharder").DefaultResharder
    storage = importlib.import_module("torch_checkpointing.storage.filesystem").LocalFileSystemStorageConfig
    items = {name: peer.ItemSpec(resharder=resharder()) for name in ("model", "optim")}
    saving = config.AsyncCheckpointSaverConfig()
    return peer.CheckpointManager(
        peer.CheckpointManager.Config(items=items, save=saving, storage_config=storage(use_direct_io=False))
    )


def measured(way: Callable[[str], Iterator[Moments]], folder: str) -> tuple[float, float, float]:
    """Seconds until return, until the state may be changed, and until the last rank is done."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()
    dist.barrier()
    begun = time.perf_counter()
    running = way(folder)
    returned, staged = next(running)
    dist.barrier()  # as in training, nobody waits for a save before all ranks go on
    for _ in running:
        pass
    dist.barrier()
    return slowest(returned), slowest(staged), slowest(time.perf_counter() - begun)


def main(folder: str, megabytes: float, n_rounds: int) -> None:
    """Save in turns, and check in the end that torch reads what we wrote."""
    if importlib.util.find_spec("isal") is None:
        raise SystemExit(
            "isal is missing, which this package is installed with: checksums would take five times as long"
        )
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    ways = Ways(build(mesh, megabytes))
    names = ["memcpy", "raw", "dcp_sync", "dcp_async", "ours", "ours_overlapped", "ours_sync"]
    if importlib.util.find_spec("torch_checkpointing") is not None:
        names.insert(4, "peer")
    seconds: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    for number in range(n_rounds + 2):  # ours needs two to have both arenas
        for name in names:
            took = measured(getattr(ways, name), f"{folder}/{name}")
            if number > 1:
                seconds[name].append(took)
    loaded = build(mesh, megabytes)
    for name in names:
        if name.startswith("ours"):
            for tensor in locals_of(loaded):
                tensor.zero_()
            dcp.load(loaded, checkpoint_id=f"{folder}/{name}")
            if not all(a.equal(b) for a, b in zip(locals_of(loaded), locals_of(ways.state), strict=True)):
                raise SystemExit(f"dcp.load gives other bits: {name}")
    if dist.get_rank() == 0:
        for name, rows in seconds.items():
            columns = {
                key: [f(row[i] for row in rows) for f in (min, statistics.median)]
                for i, key in enumerate(("returns", "staged", "durable"))
            }
            print("ROW " + json.dumps({"way": name, **columns}), flush=True)
    ways.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
