"""A tensor of a class of its own may only wrap the one that has the memory; this finds that one.

Wrappers are told by torch's own protocol for them (``__tensor_flatten__`` names the tensors inside). Knows no box.
"""

from __future__ import annotations

from typing import Any

import torch

from ckpt_tool.errors import Unsupported

__all__ = ["with_memory"]

_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})


def with_memory(tensor: torch.Tensor, where: str) -> torch.Tensor:
    """The tensor whose memory holds the elements of ``tensor``: mostly itself, else what it wraps.

    What a collective is still bringing (the local tensor of a DTensor that was redistributed with ``async_op``) is
    waited for. To be called without gradients.

    Raises:
        Unsupported: the elements of ``tensor`` are in no memory, as those of a quantized one, which are computed from
            several tensors, or those of a storage that was freed.
    """
    while type(tensor) not in _PLAIN_TYPES:
        inner = _inside(tensor, where)
        if inner is None:
            break
        tensor = inner
    if not _is_somewhere(tensor):
        hint = "what FSDP has gathered is freed behind its use: take model.state_dict()"
        raise Unsupported(
            f"a {type(tensor).__name__} whose memory was freed, or is not its own", where=where, hint=hint
        )
    return tensor


def _inside(tensor: Any, where: str) -> torch.Tensor | None:
    """What ``tensor`` wraps; None where it wraps nothing, or has another layout, by which it is refused."""
    if tensor.layout != torch.strided:
        return None
    wait = getattr(tensor, "trigger_wait", None)
    if wait is not None:  # torch's AsyncCollectiveTensor, whose inner one is not there yet
        arrived: torch.Tensor = wait()
        return arrived
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return None
    names, _ = flatten()
    inner: list[torch.Tensor] = [getattr(tensor, name) for name in names]
    if len(inner) != 1 or (inner[0].shape, inner[0].dtype) != (tensor.shape, tensor.dtype):
        raise Unsupported(
            f"a {type(tensor).__name__} computes its elements from others ({', '.join(names)})",
            where=where,
            hint="put those tensors into the state, or save what dequantize() gives",
        )
    return inner[0]


def _is_somewhere(tensor: torch.Tensor) -> bool:
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # a sparse one, or a wrapper that does not say what it wraps
        address = 0
    # What has nothing to read is somewhere too; sparse and meta tensors are refused by what they are.
    return bool(address) or not tensor.numel() or tensor.layout != torch.strided or tensor.device.type == "meta"
