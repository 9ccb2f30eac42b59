"""Megatron's sharded state dicts wrap each tensor and object with its place in a global one.

Told by attributes, so that no Megatron need be installed: ``ShardedTensor``, ``ShardedObject``,
``ShardedTensorFactory`` and ``LocalNonpersistentObject`` of ``megatron.core.dist_checkpointing.mapping`` (0.5 to 0.19).
What they are called in a checkpoint is their ``key``, wherever in the state dict they lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ckpt_tool.errors import LayoutError, Unsupported
from ckpt_tool.geometry.box import Box
from ckpt_tool.geometry.flat import flat_boxes
from ckpt_tool.sizes import counted

__all__ = [
    "factory_result",
    "is_factory",
    "is_local_object",
    "is_object",
    "is_tensor",
    "is_wrapper",
    "parts_of",
    "unwrapped",
]


def is_tensor(value: object) -> bool:
    """Whether ``value`` wraps a tensor with its place in a global one."""
    return _has(value, "key", "data", "local_shape", "global_shape", "global_offset", "replica_id")


def is_object(value: object) -> bool:
    """Whether ``value`` wraps an object of this rank."""
    return _has(value, "key", "data", "global_shape", "global_offset", "unique_key") and not is_tensor(value)


def is_factory(value: object) -> bool:
    """Whether ``value`` makes wrapped tensors of a tensor, and a tensor of them again."""
    return _has(value, "key", "data", "build_fn", "merge_fn") and callable(getattr(value, "build", None))


def is_local_object(value: object) -> bool:
    """Whether ``value`` wraps an object that no checkpoint holds."""
    return _has(value, "obj") and callable(getattr(value, "unwrap", None))


def is_wrapper(value: object) -> bool:
    """Whether ``value`` is any of these."""
    return is_tensor(value) or is_object(value) or is_factory(value) or is_local_object(value)


def _has(value: object, *names: str) -> bool:
    return not isinstance(value, torch.Tensor) and all(hasattr(value, name) for name in names)


def parts_of(value: Any) -> list[tuple[Box, torch.Tensor]]:
    """``(box in global coordinates, view of the wrapped tensor)`` for each box that it holds.

    A flat range of the local tensor, as older distributed optimizers have it, is at most ``2 n - 1`` boxes.

    Raises:
        Unsupported: there is no tensor in the wrapper.
        LayoutError: the tensor is not of the size that the wrapper says.
    """
    data = value.data
    if not isinstance(data, torch.Tensor):
        raise Unsupported("a ShardedTensor without data cannot be filled", where=value.key, hint="call init_data first")
    lead = int(value.prepend_axis_num)
    offset, local_shape = tuple(value.global_offset), tuple(value.local_shape)
    held = getattr(value, "flattened_range", None)
    if held is None:
        if tuple(data.shape) != local_shape:
            raise LayoutError(f"expected a tensor of {list(local_shape)}, got {list(data.shape)}", where=value.key)
        return [(Box(offset, (*[1] * lead, *local_shape)), data[(None,) * lead])]
    if data.numel() != held.stop - held.start:
        expected = f"expected {counted(held.stop - held.start, 'element')} of a flat range, got {data.numel():,}"
        raise LayoutError(expected, where=value.key)
    parts, at, flat = [], 0, data.reshape(-1) if data.is_contiguous() else data.view(-1)
    for box in flat_boxes(held.start, held.stop, local_shape):
        view = flat[at : at + box.volume].view(box.sizes)
        at += box.volume
        place = tuple(o + b for o, b in zip(offset, (*[0] * lead, *box.offsets), strict=True))
        parts.append((Box(place, (*[1] * lead, *box.sizes)), view[(None,) * lead]))
    return parts


def unwrapped(value: Any) -> Any:
    """What a loaded state has in the place of a wrapped tensor or object."""
    return value.unwrap() if is_local_object(value) else value.data


def factory_result(factory: Any, built: Any) -> Any:
    """What a loaded state has in the place of a factory, once all that it had built is filled and unwrapped.

    Mostly the factory's own tensor: what was built of it are views of it, so that it is filled already.
    """
    parts = list(_tensors(built))
    storage = factory.data.untyped_storage().data_ptr() if isinstance(factory.data, torch.Tensor) else None
    are_views = all(part.untyped_storage().data_ptr() == storage for part in parts)
    if storage is not None and are_views and sum(part.numel() for part in parts) == factory.data.numel():
        return factory.data
    return factory.merge_fn(built)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for each in value:
            yield from _tensors(each)
