"""One process of a job that loads a DCP checkpoint into DTensors of its own layout, and gathers what it got."""

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


def run(
    rank: int, world_size: int, rendezvous: str, checkpoint: str, shapes: dict[str, tuple[int, ...]], out: str
) -> None:
    """Load every tensor of ``shapes`` as a DTensor, gather it, and let rank 0 save the whole to ``out``."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(rendezvous, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cpu", MESHES[world_size])
    state = {}
    for fqn, shape in shapes.items():
        placements = PLACEMENTS[world_size] if len(shape) > 1 else [Replicate()] * mesh.ndim
        state[fqn] = distribute_tensor(torch.zeros(shape), mesh, placements)
    dcp.load(state, checkpoint_id=checkpoint)
    whole = {fqn: value.full_tensor() for fqn, value in state.items()}
    if rank == 0:
        torch.save(whole, out)
    dist.barrier()
    dist.destroy_process_group()
