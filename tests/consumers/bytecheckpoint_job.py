"""Processes of a job that save in ByteCheckpoint's format what its own script would hold after two steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.tensor import Shard, distribute_tensor

import ckpt_tool
from tests.job.save_jobs import mesh_of
from tests.job.workers import joined

FAMILY = Path(__file__).parents[2] / "fixtures/bytecheckpoint"
SOURCES = {"sharded": "hsdp_4r", "replicated": "ddp_2r"}
"""Fixtures whose truth is saved: with names as FSDP has them and cut by rows, or with DDP's, whole on each rank."""


def save(rank: int, size: int, rendezvous: str, out: str) -> None:
    """Save the truth of each fixture in a layout of this job's own."""
    with joined(rank, size, rendezvous):
        mesh = mesh_of((Shard(0),))
        for kind, name in SOURCES.items():
            state: dict[str, Any] = {"model": {}, "optimizer": {"state": {}, "param_groups": _groups(name)}}
            for key, whole in load_file(FAMILY / name / "truth.safetensors").items():
                is_cut = kind == "sharded" and whole.ndim > 0
                tensor = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None) if is_cut else whole
                section, path = key.split("/", 1)
                if section == "model":
                    state["model"][path] = tensor
                else:
                    parameter, slot = path.split("/")
                    state["optimizer"]["state"].setdefault(parameter, {})[slot] = tensor
            extra = {"rank": rank, "rng": torch.full((3,), rank)}
            url = f"{out}/{kind}/global_step_2"
            ckpt_tool.save(state, url, format="bytecheckpoint", extra_state=extra, durable=False).wait()


def _groups(name: str) -> Any:
    """Parameter groups as the fixture has them."""
    with ckpt_tool.open(FAMILY / name / "ckpt") as checkpoint:
        rows = [row for row, blob in enumerate(checkpoint.manifest.blobs) if blob.fqn == "optimizer.param_groups"]
        return checkpoint.load_blobs(rows)[rows[0]].value
