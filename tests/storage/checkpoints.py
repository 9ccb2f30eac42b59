"""Small checkpoints for tests of storage."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from ckpt_tool.api.convert.reshard import reshard

__all__ = ["make_dcp", "make_safetensors", "objects_of"]


def make_safetensors(path: Path, *, n_tensors: int = 20, rows: int = 96, columns: int = 257) -> Path:
    """One file of random float32 matrices, about 100 kB each."""
    dice = np.random.default_rng(0)
    shape = (rows, columns)
    save_file({f"layer.{i}.w": dice.standard_normal(shape, dtype=np.float32) for i in range(n_tensors)}, path)
    return path


def make_dcp(folder: Path, *, n_ranks: int, n_tensors: int = 20, rows: int = 96, columns: int = 257) -> Path:
    """The same as DCP of ``n_ranks``, each tensor cut by rows."""
    source = make_safetensors(folder / "source.safetensors", n_tensors=n_tensors, rows=rows, columns=columns)
    reshard(source, folder / "dcp", dp=n_ranks, default="shard0", durable=False)
    return folder / "dcp"


def objects_of(folder: Path, prefix: str) -> dict[str, bytes]:
    """Files of a folder as objects under ``prefix``."""
    found = {}
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root) / name
            found[f"{prefix}/{path.relative_to(folder)}"] = path.read_bytes()
    return found
