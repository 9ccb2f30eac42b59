"""A published model with experts goes into sharded models that have all experts of a layer in one tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt_tool
from tests.api.published import model
from tests.job import workers

pytestmark = pytest.mark.dist


def load_all(rank: int, world_size: int, rendezvous: str, out: str) -> None:
    """Load by all ways: experts cut, rows of experts cut, and on the last rank alone, as on a stage of its own."""
    memory, _ = model("qwen3_moe")
    found = []
    with workers.joined(rank, world_size, rendezvous):
        mesh = init_device_mesh("cpu", (world_size,))
        for dim in (0, 1):
            for way in workers.EXCHANGES:
                state = {
                    name: distribute_tensor(torch.zeros_like(tensor), mesh, [Shard(dim if tensor.ndim > 1 else 0)])
                    for name, tensor in memory.items()
                }
                ckpt_tool.load({"model": state}, f"{out}/published", exchange=way)
                found.append(all(state[name].full_tensor().equal(tensor) for name, tensor in memory.items()))
        for typed in ("published", "untyped"):
            names = [name for name in memory if (".experts." in name) == (rank == world_size - 1)]
            own = {name: torch.zeros_like(memory[name]) for name in names}
            ckpt_tool.load(own, f"{out}/{typed}", strict=False)
            found.append(bool(own) and all(tensor.equal(memory[name]) for name, tensor in own.items()))
    Path(f"{out}/{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def test_every_way(tmp_path: Path) -> None:
    """Bit for bit, whoever of the ranks holds experts, whether a config tells the model or its names do."""
    _, published = model("qwen3_moe")
    for folder in ("published", "untyped"):
        (tmp_path / folder).mkdir()
        save_file(published, tmp_path / folder / "model.safetensors")
    (tmp_path / "published/config.json").write_text('{"model_type": "qwen3_moe"}', encoding="utf-8")
    workers.start(load_all, 2, tmp_path)
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) == [True] * 8
