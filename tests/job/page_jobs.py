"""Runs the code of docs/in-a-job.md as it stands, on every rank of a job, with what each block takes for granted."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ckpt_tool
from tests.job import workers
from tests.storage.s3_server import BUCKET

PAGE = Path(__file__).parents[2] / "docs/in-a-job.md"
ENVIRONMENT = "environment.json"
"""In the folder of a run: variables for its ranks, which are forks of a process that may be older than the test."""


def blocks() -> dict[str, str]:
    """Heading to the code below it."""
    sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = {section.partition("\n")[0]: re.findall(r"```python\n(.*?)```", section, re.DOTALL) for section in sections}
    return {heading: texts[0] for heading, texts in found.items() if texts}


class TrainState:
    """As torchtitan's: hands out numbers, and takes them back."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        """Its state."""
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self.step = int(state["step"])


def run_page(rank: int, world_size: int, rendezvous: str, out: str) -> None:
    """Run every block; each entry of what is told says whether what was saved is there."""
    os.environ.update(json.loads(Path(out, ENVIRONMENT).read_text(encoding="utf-8")))
    with workers.joined(rank, world_size, rendezvous):
        code = blocks()
        told = {
            "A plain FSDP2 loop": _plain(code["A plain FSDP2 loop"], f"{out}/plain"),
            "torchtitan's way: objects that hand out their state": _objects(
                code["torchtitan's way: objects that hand out their state"], f"{out}/objects"
            ),
            "Megatron's way: sharded state dicts": _megatron(code["Megatron's way: sharded state dicts"], out),
            "A published model into a sharded one": _published(code["A published model into a sharded one"], out),
            "Saving beside the training": _saved(code["Saving beside the training"], f"{out}/run"),
            "To object storage and back": _remote(code["To object storage and back"]),
            "Saving in another format, and proving it": _proven(
                code["Saving in another format, and proving it"], f"{out}/proven"
            ),
        }
        everything: dict[str, Any] = {**told, "blocks": sorted(code)}
        Path(f"{out}/{rank}.json").write_text(json.dumps(everything), encoding="utf-8")


def _net(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 6))


def _trained(seed: int) -> tuple[Any, Any, Any]:
    """A sharded model after one step, its optimizer and its scheduler."""
    model = _net(seed)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 / (seed + 1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model(torch.ones(2, 6)).square().sum().backward()
    optimizer.step()
    scheduler.step()
    return model, optimizer, scheduler


def _full(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _full(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_full(inner) for inner in value]
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.tolist() if isinstance(whole, torch.Tensor) else whole


def _plain(code: str, folder: str) -> bool:
    model, optimizer, _ = _trained(0)
    saved = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.save({**saved, "step": 5}, checkpoint_id=folder)
    other, fresh, _ = _trained(1)
    space: dict[str, Any] = {"model": other, "optimizer": fresh, "url": folder}
    exec(code, space)
    found = dict(zip(("model", "optim"), get_state_dict(other, fresh), strict=True))
    return bool(_full(found) == _full(saved) and space["step"] == 5)


def _saved(code: str, run: str) -> bool:
    model, optimizer, _ = _trained(0)
    states = []

    def train_step() -> None:
        model(torch.ones(2, 6)).square().sum().backward()
        optimizer.step()
        states.append(_full(dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))))

    exec(code, {"model": model, "optimizer": optimizer, "run": run, "train_step": train_step})
    loaded = []
    for step in range(1, 4):
        other, fresh, _ = _trained(1)
        found = dict(zip(("model", "optim"), get_state_dict(other, fresh), strict=True))
        dcp.load(found, checkpoint_id=f"{run}/step-{step}")
        loaded.append(_full(found))
    return loaded == states


def _proven(code: str, run: str) -> bool:
    model, optimizer, _ = _trained(0)
    space: dict[str, Any] = {"model": model, "optimizer": optimizer, "run": run, "rank": dist.get_rank()}
    exec(code, space)
    other, fresh, _ = _trained(1)
    found = dict(zip(("model", "optim"), get_state_dict(other, fresh), strict=True))
    ckpt_tool.load(found, f"{run}/step-3")
    is_proven = "report" not in space or space["report"].is_ok
    return is_proven and bool(_full(found) == _full({name: space["state"][name] for name in found}))


def _remote(code: str) -> bool:
    """The bucket is the test's; the block saves and loads one state, which is changed in between."""
    model, _, _ = _trained(0)
    truth = _full(model.state_dict())
    save = ckpt_tool.save

    def changing(state: dict[str, Any], url: str, **options: Any) -> Any:
        handle = save(state, url, **options)
        for value in state["model"].values():
            value.zero_()
        return handle

    with patch.object(ckpt_tool, "save", changing):
        exec(code, {"state": {"model": model.state_dict()}, "bucket": f"s3://{BUCKET}/page"})
    return bool(_full(model.state_dict()) == truth)


def _objects(code: str, folder: str) -> bool:
    model, optimizer, scheduler = _trained(0)
    state = TrainState()
    state.step = 9
    parts = {"train_state": state.state_dict(), "lr_scheduler": scheduler.state_dict()}
    dcp.save(
        {"model": model.state_dict(), "optimizer": get_state_dict(model, optimizer)[1], **parts}, checkpoint_id=folder
    )
    other, _, later = _trained(1)
    later.step()
    space: dict[str, Any] = {"model": other, "train_state": TrainState(), "scheduler": later, "url": folder}
    exec(code, space)
    is_same = _full(other.state_dict()) == _full(model.state_dict())
    return bool(is_same and space["train_state"].step == 9 and later.state_dict() == scheduler.state_dict())


def _megatron(code: str, out: str) -> bool:
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(48.0).reshape(8, 6)
    if rank == 0:
        torch.save({"weight": whole, "iteration": 3}, f"{out}/megatron.pt")
    dist.barrier()
    weight = torch.zeros(8 // size, 6)
    sharded = SimpleNamespace(
        key="weight", data=weight, dtype=weight.dtype, local_shape=tuple(weight.shape), global_shape=(8, 6),
        global_offset=(rank * len(weight), 0), prepend_axis_num=0, replica_id=0, flattened_range=None,
    )  # fmt: skip
    model = SimpleNamespace(sharded_state_dict=lambda: {"decoder": sharded})
    space: dict[str, Any] = {"model": model, "url": f"{out}/megatron.pt"}
    exec(code, space)
    is_own = space["state"]["model"]["decoder"] is weight
    return bool(is_own and weight.equal(whole.chunk(size)[rank]) and space["iteration"] == 3)


def _published(code: str, out: str) -> bool:
    truth = _net(4).state_dict()
    folder = Path(out) / "published"
    if dist.get_rank() == 0:
        folder.mkdir()
        save_file(truth, folder / "model.safetensors", metadata={"format": "pt"})
    dist.barrier()
    model = _net(5)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    exec(code, {"model": model, "huggingface_folder": folder})
    return bool(_full(model.state_dict()) == _full(dict(truth)))
