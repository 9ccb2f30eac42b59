"""One process of jobs that load a DCP checkpoint into DTensors of their own layouts, and gather what they got."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

PLACEMENTS = {2: [Shard(1)], 4: [Shard(1), Shard(0)]}
MESHES = {2: (2,), 4: (2, 2)}


def run(rank: int, folder: str, checkpoint: str, shapes: dict[str, tuple[int, ...]]) -> None:
    """One job after another, of the lowest ranks: importing torch is most of what a process costs."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for world_size in MESHES:
        if rank < world_size:
            _load(rank, world_size, folder, checkpoint, shapes)


def _load(rank: int, world_size: int, folder: str, checkpoint: str, shapes: dict[str, tuple[int, ...]]) -> None:
    """Load every tensor of ``shapes`` as a DTensor, gather it, and let rank 0 save the whole to the folder."""
    store = dist.FileStore(os.path.join(folder, f"rendezvous-{world_size}"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", MESHES[world_size])
    state = {}
    for fqn, shape in shapes.items():
        placements = PLACEMENTS[world_size] if len(shape) > 1 else [Replicate()] * mesh.ndim
        state[fqn] = distribute_tensor(torch.zeros(shape), mesh, placements)
    dcp.load(state, checkpoint_id=checkpoint)
    whole = {fqn: value.full_tensor() for fqn, value in state.items()}
    if rank == 0:
        torch.save(whole, os.path.join(folder, f"whole-{world_size}.pt"))
    dist.barrier()
    dist.destroy_process_group()
