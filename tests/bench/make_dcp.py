"""torchrun --nproc_per_node=N make_dcp.py FOLDER GIGABYTES [groups]: a DCP checkpoint of FSDP2, with names of Llama.

Weights in bfloat16, a float32 master copy and two moments, every tensor Shard(0) over all ranks; with ``groups`` steps
and the optimizer's one group of parameters too, without which no optimizer takes the rest.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

HIDDEN, FEED_FORWARD, VOCABULARY = 1024, 2816, 8192
LAYER = {
    "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
    "self_attn.k_proj.weight": (HIDDEN // 4, HIDDEN),
    "self_attn.v_proj.weight": (HIDDEN // 4, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
    "mlp.gate_proj.weight": (FEED_FORWARD, HIDDEN),
    "mlp.up_proj.weight": (FEED_FORWARD, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, FEED_FORWARD),
    "input_layernorm.weight": (HIDDEN,),
    "post_attention_layernorm.weight": (HIDDEN,),
}
BYTES_PER_PARAMETER = 2 + 4 + 4 + 4


def sharded(shape: tuple[int, ...], dtype: torch.dtype, mesh: DeviceMesh) -> DTensor:
    """A random tensor of which this rank holds its rows."""
    rows = -(-shape[0] // mesh.size())
    start = min(dist.get_rank() * rows, shape[0])
    stop = min(start + rows, shape[0])
    local = torch.randn((stop - start, *shape[1:])).to(dtype)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=stride)


def main(folder: str, gigabytes: float, *, with_groups: bool) -> None:
    """Save the checkpoint."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(dist.get_rank())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    per_layer = sum(torch.Size(shape).numel() for shape in LAYER.values())
    outer = 2 * VOCABULARY * HIDDEN
    n_layers = max(1, int((gigabytes * 1e9 / BYTES_PER_PARAMETER - outer) / per_layer))
    shapes = {
        "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "lm_head.weight": (VOCABULARY, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        **{f"model.layers.{i}.{name}": shape for i in range(n_layers) for name, shape in LAYER.items()},
    }
    state = {
        name: {slot: sharded(shape, torch.float32, mesh) for slot in ("master", "exp_avg", "exp_avg_sq")}
        for name, shape in shapes.items()
    }
    model = {name: sharded(shape, torch.bfloat16, mesh) for name, shape in shapes.items()}
    optimizer: dict[str, Any] = {"state": state}
    if with_groups:
        optimizer["state"] = {name: {**slots, "step": torch.tensor(1.0)} for name, slots in state.items()}
        optimizer["param_groups"] = [{"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "params": list(shapes)}]
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), with_groups="groups" in sys.argv[3:])
