"""Processes of a training job that save their states, and of another one that load them; each says what it saw."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ckpt_tool
from tests.job.workers import joined

LAYOUTS: dict[str, tuple[Placement, ...] | None] = {
    "rows": (Shard(0),),
    "columns": (Shard(1),),
    "fsdp x tp": (Shard(0), Shard(1)),
    "hsdp": (Replicate(), Shard(0)),
    "replicas": (Replicate(),),
    "plain": None,
}
"""Placements over the ranks; with two of them the mesh is 2-D."""
MODELS = ("fsdp2", "fsdp2 x tp", "fsdp1", "ddp")


def truth() -> dict[str, torch.Tensor]:
    """Tensors of many types, sizes that divide evenly and not, and orders of memory; the same in every process."""
    made = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made)

    return {
        "even": normal(24, 16),
        "odd": normal(13, 7),
        "few": normal(2, 5),
        "vector": normal(37),
        "cube": normal(6, 4, 10),
        "bf16": normal(12, 9).bfloat16(),
        "fp8": normal(8, 8).to(torch.float8_e4m3fn),
        "complex": torch.complex(normal(6, 5), normal(6, 5)),
        "bool": normal(11, 3) > 0,
        "int64": torch.arange(60).reshape(10, 6),
        "scalar": torch.tensor(3.5),
        "nothing": torch.zeros(0, 4),
        "transposed": normal(18, 10).t(),
        "sliced": normal(20, 20)[::2, 3:11],
    }


def mesh_of(placements: tuple[Placement, ...]) -> DeviceMesh:
    """All ranks, in as many dimensions as there are placements."""
    size = dist.get_world_size()
    inner = next(n for n in (2, 3, 1) if size % n == 0) if len(placements) == 2 else 1
    return _mesh((size // inner, inner) if len(placements) == 2 else (size,))


@cache
def _mesh(sizes: tuple[int, ...]) -> DeviceMesh:
    """One mesh for all tensors: each has groups of its own, and gloo threads for each of them that never rest."""
    return init_device_mesh("cpu", sizes)


def cut(tensor: torch.Tensor, placements: tuple[Placement, ...] | None) -> torch.Tensor:
    """What torch gives this rank; a dimension that a tensor does not have is not cut."""
    if placements is None:
        return tensor.clone() if tensor.is_contiguous() else tensor
    fitting = [Replicate() if isinstance(p, Shard) and p.dim >= tensor.ndim else p for p in placements]
    return distribute_tensor(tensor, mesh_of(placements), fitting, src_data_rank=None)


def state_of(layout: str, *, is_empty: bool = False) -> dict[str, Any]:
    """The truth in a layout, with values that are no tensors; ``is_empty`` for one to be filled."""
    tensors = {name: torch.zeros_like(tensor) if is_empty else tensor for name, tensor in truth().items()}
    return {
        "model": {name: cut(tensor, LAYOUTS[layout]) for name, tensor in tensors.items()},
        "groups": [{"lr": 0.0 if is_empty else 0.5, "decay": [0.1, 0.2]}],
        "step": 0 if is_empty else 12,
        "note": None if is_empty else "a text",
    }


def few() -> dict[str, torch.Tensor]:
    """Few large tensors that all ranks hold: rows to be cut, in two orders of memory, and one to be cut behind them."""
    made = torch.Generator().manual_seed(9)
    shapes = ((240, 256), (256, 240), (3, 80_000))
    rows, columns, long = (torch.randn(*shape, generator=made) for shape in shapes)
    return {"rows": rows, "columns": columns.t(), "long": long.bfloat16()}


def bits(tensor: torch.Tensor) -> bytes:
    """Elements of a local tensor, in order."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    found: bytes = local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return found


def differences(layout: str, state: dict[str, Any]) -> list[str]:
    """Names of what is not as in the truth."""
    expected = state_of(layout)
    wrong = [name for name, tensor in expected["model"].items() if bits(tensor) != bits(state["model"][name])]
    return wrong + [key for key in ("groups", "step", "note") if state[key] != expected[key]]


def model_of(name: str, seed: int) -> torch.nn.Module:
    """A model as a training script wraps it. Every rank has rows of each layer: dcp.load fails for FSDP1 otherwise."""
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(16, 24), torch.nn.Linear(24, 16), torch.nn.Linear(16, 11, bias=False)]
    model: torch.nn.Module = torch.nn.Sequential(*layers)
    size = dist.get_world_size()
    if name == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if name == "fsdp1":
        return FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    if name == "fsdp2 x tp" and size % 2 == 0:
        both = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
        mesh = both["dp"]
        parallelize_module(model, both["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def model_state(name: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Model and optimizer as its trainer would save them."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    if name == "fsdp1":
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            return {"model": model.state_dict(), "optim": FullyShardedDataParallel.optim_state_dict(model, optimizer)}
    held, moments = get_state_dict(model, optimizer)
    return {"model": held, "optim": moments}


def train(name: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Losses of some steps, the same on all ranks."""
    losses = []
    for step in steps:
        data = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def save_all(rank: int, size: int, rendezvous: str, out: str) -> None:
    """Save every layout and every model, some of them while the state is being changed."""
    with joined(rank, size, rendezvous):
        found: dict[str, Any] = {"collectives": [], "written": {}, "losses": {}, "resumed": {}}
        for layout in LAYOUTS:
            state = state_of(layout)
            before = n_collectives()
            handle = ckpt_tool.save(
                state, f"{out}/{size}/{layout}", extra_state={"rng": torch.full((3,), rank), "name": f"rank {rank}"}
            )
            found["collectives"].append(n_collectives() - before)
            for tensor in state["model"].values():
                (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
            found["written"][layout] = handle.wait().payload_nbytes
        for name in ("few", "few again"):  # what is to be written is not known at first, so that all is staged
            before = n_collectives()
            result = ckpt_tool.save({"model": few()}, f"{out}/{size}/{name}").wait()
            found["collectives"].append(n_collectives() - before)
            found["written"][name] = result.payload_nbytes
            found["planned"] = "plan" in [each.operation for each in result.operations]
        for name in MODELS:
            model = model_of(name, seed=1)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            train(name, model, optimizer, range(3))
            handle = ckpt_tool.save(model_state(name, model, optimizer), f"{out}/{size}/{name}", overlap_staging=True)
            handle.wait_staged()
            found["losses"][name] = train(name, model, optimizer, range(3, 6))
            handle.wait()
            dist.barrier()
            found["resumed"][name] = _resumed(name, f"{out}/{size}/{name}")
        Path(f"{out}/saved-{size}.{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def load_all(rank: int, size: int, rendezvous: str, out: str) -> None:
    """Load what jobs of other sizes saved, with both libraries, into other layouts."""
    with joined(rank, size, rendezvous):
        found: dict[str, Any] = {}
        names = list(LAYOUTS)
        for saved in sorted(int(each) for each in os.listdir(out) if each.isdecimal()):
            for number, layout in enumerate(names):
                url = f"{out}/{saved}/{layout}"
                for other in (layout, names[(number + 1 + saved) % len(names)]):
                    for loader in (_dcp_load, _own_load):
                        state = state_of(other, is_empty=True)
                        loader(state, url)
                        found[f"{saved} {layout} to {other} by {loader.__name__}"] = differences(other, state)
            for name in ("few", "few again"):
                for loader in (_dcp_load, _own_load):
                    wanted = few()
                    state = {
                        "model": {key: torch.zeros(tensor.shape, dtype=tensor.dtype) for key, tensor in wanted.items()}
                    }
                    loader(state, f"{out}/{saved}/{name}")
                    wrong = [key for key, tensor in wanted.items() if bits(tensor) != bits(state["model"][key])]
                    found[f"{saved} {name} by {loader.__name__}"] = wrong
            for name in MODELS:
                losses = _resumed(name, f"{out}/{saved}/{name}")
                expected = json.loads(Path(f"{out}/saved-{saved}.0.json").read_text(encoding="utf-8"))["losses"][name]
                found[f"{saved} {name}"] = [] if _close(losses, expected) else [losses, expected]
            for layout in ("rows", "plain"):
                extra = ckpt_tool.load_extra_state(f"{out}/{saved}/{layout}", rank, size)
                wanted = {"rng": torch.full((3,), rank), "name": f"rank {rank}"} if rank < saved else {}
                found[f"{saved} extra of {layout}"] = [] if str(extra) == str(wanted) else [str(extra)]
        Path(f"{out}/loaded-{size}.{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def _dcp_load(state: dict[str, Any], url: str) -> None:
    dcp.load(state, checkpoint_id=url)


def _own_load(state: dict[str, Any], url: str) -> None:
    ckpt_tool.load(state, url)


def _resumed(name: str, url: str) -> list[float]:
    """Losses after loading into a fresh model of the same kind."""
    from torch.distributed.checkpoint.state_dict import set_state_dict

    model = model_of(name, seed=99)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(name, model, optimizer, range(1))  # so that the optimizer has a state to be filled
    state = model_state(name, model, optimizer)
    dcp.load(state, checkpoint_id=url)
    if name == "fsdp1":
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(
                FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state["optim"])
            )
    else:
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return train(name, model, optimizer, range(3, 6))


def _close(losses: list[float], expected: list[float]) -> bool:
    """Sums over ranks are taken in another order in a job of another size, so losses agree to rounding only."""
    return all(abs(a - b) <= 2e-6 * abs(b) for a, b in zip(losses, expected, strict=True))


def n_collectives() -> int:
    """Collectives that all ranks have been through so far."""
    found: int = dist.group.WORLD._get_sequence_number_for_group()
    return found
