"""Blocks of a file that read as zeros in the midst of weights are found; zeros that models have are left alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckpt_tool

ROWS, WIDTH = 500, 1000
BLOCK = 4096


def saved(path: Path, value: torch.Tensor) -> Path:
    """A file of two tensors, the second one at its end."""
    save_file({"a.weight": torch.randn(64, 64, generator=torch.Generator().manual_seed(1)), "b.weight": value}, path)
    return path


def weights() -> torch.Tensor:
    """Numbers without a zero."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(2)).abs() + 0.1


def zeroed(path: Path, begin: int, end: int) -> None:
    """Zeros in place of bytes of a file."""
    data = bytearray(path.read_bytes())
    data[begin:end] = bytes(end - begin)
    path.write_bytes(data)


def holes(path: Path) -> list[tuple[int, int]]:
    """First byte and length of each hole that a full check finds."""
    found = ckpt_tool.verify(path, level="full").findings
    return [(f.where.offset, f.where.length) for f in found if f.kind == "zero-blocks" and f.where is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_lost_tail(tmp_path: Path, dtype: torch.dtype) -> None:
    """The end of a file that was not written before the power went, from a block on."""
    path = saved(tmp_path / "m.safetensors", weights().to(dtype))
    assert holes(path) == []
    nbytes = path.stat().st_size
    begin = (nbytes - 5 * BLOCK) // BLOCK * BLOCK
    zeroed(path, begin, nbytes)
    assert holes(path) == [(begin, nbytes - begin)]


def test_a_hole(tmp_path: Path) -> None:
    """Blocks in the middle that a sparse copy left out."""
    path = saved(tmp_path / "m.safetensors", weights())
    zeroed(path, 100 * BLOCK, 108 * BLOCK)
    assert holes(path) == [(100 * BLOCK, 8 * BLOCK)]


def test_zeros_that_models_have(tmp_path: Path) -> None:
    """Rows of padding, a tensor that was never trained, masks, and pruned weights whose zeros begin anywhere."""
    padded = weights()
    padded[-40:] = 0
    assert holes(saved(tmp_path / "padded.safetensors", padded)) == []
    assert holes(saved(tmp_path / "zero.safetensors", torch.zeros(ROWS, WIDTH))) == []
    assert holes(saved(tmp_path / "mask.safetensors", (weights() > 1).to(torch.uint8))) == []
    pruned = weights().flatten()
    pruned[7777:27777] = 0
    assert holes(saved(tmp_path / "pruned.safetensors", pruned.reshape(ROWS, WIDTH))) == []
