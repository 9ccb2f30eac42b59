"""Arrays of bytes as torch tensors, bit for bit, and whole tensors into what a rank holds of them."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch

from ckpt_tool.dtypes import DType
from ckpt_tool.errors import Unsupported
from ckpt_tool.frameworks.boxes import Leaf

__all__ = ["fill_whole", "torch_tensor"]


def torch_tensor(array: npt.NDArray[Any], dtype: DType, shape: tuple[int, ...]) -> torch.Tensor:
    """A torch tensor over the memory of ``array``, which holds packed elements of ``dtype``.

    Raises:
        Unsupported: torch has no such type.
    """
    kind = getattr(torch, dtype.name, None)
    if not isinstance(kind, torch.dtype):
        raise Unsupported(f"this torch has no {dtype.name}")
    flat = array.reshape(-1).view("u1")
    if not flat.size:
        return torch.empty(shape, dtype=kind, device="cpu")
    return torch.from_numpy(flat).view(kind).reshape(shape)


def fill_whole(leaf: Leaf, value: object, *, cast: bool) -> tuple[str, str] | None:
    """Fill what a rank holds of a tensor from the whole of it; ``(kind, text)`` where that does not fit.

    The kind is ``missing`` where ``value`` is no tensor, else ``shape``, or ``dtype`` unless types may be ``cast``.
    """
    if not isinstance(value, torch.Tensor):
        return "missing", "not in the object that the checkpoint has there"
    if tuple(value.shape) != leaf.shape:
        return "shape", f"expected {list(leaf.shape)}, got {list(value.shape)}"
    if str(value.dtype) != f"torch.{leaf.dtype.name}" and not cast:
        return "dtype", f"expected {leaf.dtype.name}, got {str(value.dtype).removeprefix('torch.')}"
    with torch.no_grad():
        for part in leaf.parts:
            part.view.copy_(value[part.box.slices])
    return None
