"""Processes of a training job that resume from a checkpoint in a layout of their own; rank 0 says what they got."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, zeros

__all__ = ["WORLD_SIZES", "Load", "run"]

WORLD_SIZES = (1, 2, 4)
MODEL_SCRIPT = Path(__file__).parents[2] / "fixtures/torch/make/common.py"


@dataclass(frozen=True)
class Load:
    """One checkpoint to load, and how the loading job cuts its tensors on each number of processes."""

    name: str
    checkpoint: str
    dims: Mapping[int, Sequence[int]]
    """World size to the tensor dimension that each mesh dimension cuts; tensors that lack it are replicated."""


def run(rank: int, rendezvous: str, loads: Sequence[Load], resumed: str, out: str) -> None:
    """Be rank ``rank`` of a job of each world size in turn, and load everything."""
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    for world_size in WORLD_SIZES:
        if rank >= world_size:
            continue
        store = dist.FileStore(f"{rendezvous}-{world_size}", world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=90))
        found = {load.name: _load(load, world_size) for load in loads}
        found["model"] = _resume(resumed, world_size)
        if rank == 0:
            torch.save(found, f"{out}/{world_size}.pt")
        dist.barrier()
        dist.destroy_process_group()


def _load(load: Load, world_size: int) -> Any:
    """The nested state that ``dcp.load`` fills, gathered."""
    metadata = FileSystemReader(load.checkpoint).read_metadata()
    dims = load.dims[world_size]
    mesh = init_device_mesh("cpu", (world_size,) if len(dims) == 1 else (2, 2))
    flat = {
        fqn: _empty(entry, mesh, dims, is_plain=world_size == 1) if isinstance(entry, TensorStorageMetadata) else None
        for fqn, entry in metadata.state_dict_metadata.items()
    }
    state = unflatten_state_dict(flat, metadata.planner_data)
    dcp.load(state, checkpoint_id=load.checkpoint)
    return _gathered(state)


def _empty(entry: TensorStorageMetadata, mesh: DeviceMesh, dims: Sequence[int], *, is_plain: bool) -> Any:
    dtype = entry.properties.dtype
    if is_plain:
        return torch.zeros(entry.size, dtype=dtype)
    placements = [Shard(dim) if dim < len(entry.size) else Replicate() for dim in dims]
    return zeros(entry.size, dtype=dtype, device_mesh=mesh, placements=placements)


def _gathered(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    if isinstance(value, dict):
        return {key: _gathered(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_gathered(part) for part in value]
    return value


def _resume(checkpoint: str, world_size: int) -> Any:
    """What a training script does: FSDP2 model and optimizer, their state dicts, ``dcp.load``, ``set_state_dict``."""
    common = _model_script()
    mesh = init_device_mesh("cpu", (world_size,))
    model = common.make_model(torch.float32, seed=999)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=123.0, foreach=False)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optimizer_state}
    dcp.load(state, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        "model": _gathered(dict(model.state_dict())),
        "state": {names[id(p)]: _gathered(dict(s)) for p, s in optimizer.state.items()},
        "hyperparameters": {k: v for k, v in optimizer.param_groups[0].items() if k != "params"},
    }


def _model_script() -> ModuleType:
    """The script that made the model of the fixtures."""
    spec = importlib.util.spec_from_file_location("fixture_model", MODEL_SCRIPT)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(MODEL_SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["fixture_model"] = module
    spec.loader.exec_module(module)
    return module
