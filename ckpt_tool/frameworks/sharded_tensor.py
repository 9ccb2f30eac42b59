"""A ShardedTensor, as FSDP1's sharded state dicts hold, lists its local shards with their places."""

from __future__ import annotations

from typing import Any, TypeGuard

import torch

from ckpt_tool.geometry.box import Box

__all__ = ["is_sharded_tensor", "parts_of", "shape_and_dtype"]


def is_sharded_tensor(value: object) -> TypeGuard[Any]:
    """Whether ``value`` is one of torch's; told by its methods, since not every build of torch has the class."""
    return callable(getattr(value, "local_shards", None)) and callable(getattr(value, "metadata", None))


def shape_and_dtype(value: Any) -> tuple[tuple[int, ...], torch.dtype]:
    """Global shape and element type."""
    metadata = value.metadata()
    return tuple(metadata.size), metadata.tensor_properties.dtype


def parts_of(value: Any) -> list[tuple[Box, torch.Tensor]]:
    """``(box in global coordinates, the shard's tensor)`` for each local shard."""
    return [
        (Box(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes)), shard.tensor)
        for shard in value.local_shards()
    ]
