"""torchrun --nproc_per_node=N reshard_with_torch.py SOURCE TARGET: how torch reshards, a job that loads and saves."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, empty


def main(source: str, target: str) -> None:
    """Load every tensor cut along its last dimension, and save it."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    metadata = FileSystemReader(source).read_metadata()
    state = {
        name: empty(
            entry.size,
            dtype=entry.properties.dtype,
            device_mesh=mesh,
            placements=[Shard(1 if len(entry.size) > 1 else 0)],
        )
        for name, entry in metadata.state_dict_metadata.items()
        if hasattr(entry, "size")
    }
    dcp.load(state, checkpoint_id=source)
    dcp.save(state, checkpoint_id=target)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
