"""What ranks hold in common is stored once and evenly; large boxes are cut for it, where a format can list parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import load_file

import ckpt_tool
from ckpt_tool.api.convert.reshard import prepare_reshard, reshard
from ckpt_tool.manifest.tables import IntArray
from tests.storage.checkpoints import make_safetensors

CUTTING = {"dcp", "bytecheckpoint"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Three tensors of 100 KiB, which would leave one of four ranks without any."""
    return make_safetensors(tmp_path / "x.safetensors", n_tensors=3, rows=100, columns=256)


def by_rank(source: Path, to: str, **options: Any) -> tuple[IntArray, int]:
    """Bytes that each of four ranks stores, and the number of boxes."""
    conversion = prepare_reshard(source, source.with_name("out"), to=to, **options)
    conversion.checkpoint.close()
    chunks = conversion.plan.target.chunks
    load = np.zeros(4, dtype=np.int64)
    np.add.at(load, chunks.rank, chunks.length)
    return load, len(chunks)


@pytest.mark.parametrize("to", ["dcp", "bytecheckpoint", "orbax", "torch-checkpointing"])
def test_large_replicated_tensors(source: Path, to: str) -> None:
    """Within 5 % of even where boxes may have any size, whole elsewhere; every byte is stored once."""
    load, n_boxes = by_rank(source, to, dp=4, dp_mode="replicate")
    assert load.sum() == 3 * 100 * 256 * 4
    assert (load.max() <= 1.05 * load.mean(), n_boxes) == ((True, 6) if to in CUTTING else (False, 3))
    target = source.with_name("out")
    reshard(source, target, to=to, dp=4, dp_mode="replicate", durable=False)
    assert ckpt_tool.diff(source, target).is_same


def test_model_parallel_ranks(source: Path) -> None:
    """Shards of tensor-parallel ranks are cut between their own data-parallel ranks alone."""
    load, n_boxes = by_rank(source, "dcp", mesh="dp=2,tp=2", dp_mode="replicate", default="shard0")
    assert (load.max() <= 1.05 * load.mean(), n_boxes) == (True, 8)


def test_ranks_that_want_a_file_of_their_own(source: Path) -> None:
    """Where each rank reads its own file, boxes stay whole."""
    load, n_boxes = by_rank(source, "rank-files", dp=4, dp_mode="replicate", replicas="once")
    assert (sorted(load.tolist()), n_boxes) == ([0, 102_400, 102_400, 102_400], 3)


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_torch_loads_parts(source: Path) -> None:
    """The loader of torch puts the parts together."""
    target = source.with_name("out")
    reshard(source, target, dp=4, dp_mode="replicate", durable=False)
    state = {fqn: torch.zeros(array.shape) for fqn, array in load_file(source).items()}
    dcp.load(state, checkpoint_id=target, no_dist=True)
    assert all((state[fqn].numpy() == array).all() for fqn, array in load_file(source).items())
