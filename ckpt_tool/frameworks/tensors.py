"""Arrays of bytes as torch tensors, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch

from ckpt_tool.dtypes import DType
from ckpt_tool.errors import Unsupported

__all__ = ["torch_tensor"]


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
