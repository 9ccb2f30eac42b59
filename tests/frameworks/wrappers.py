"""Wrappers with the attributes of megatron-core's, which need not be installed where tests run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Sharded:
    """As ``ShardedTensor`` of megatron-core."""

    key: str
    data: torch.Tensor | None
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    prepend_axis_num: int = 0
    flattened_range: slice | None = None
    local_shape: tuple[int, ...] = ()
    replica_id: int = 0
    allow_shape_mismatch: bool = False
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        """The local shape is that of the data, unless it is given."""
        if self.data is not None and not self.local_shape:
            self.local_shape = tuple(self.data.shape)


@dataclass
class Held:
    """As ``ShardedObject``."""

    key: str
    data: Any
    global_shape: tuple[int, ...] = (2,)
    global_offset: tuple[int, ...] = (1,)

    @property
    def unique_key(self) -> str:
        """Its name in a checkpoint."""
        place, grid = (".".join(map(str, numbers)) for numbers in (self.global_offset, self.global_shape))
        return f"{self.key}/shard_{place}_{grid}"


@dataclass
class Factory:
    """As ``ShardedTensorFactory``."""

    key: str
    data: torch.Tensor
    build_fn: Any
    merge_fn: Any

    def build(self) -> Any:
        """What is saved in the place of ``data``."""
        return self.build_fn(self.key, self.data)


@dataclass
class Local:
    """As ``LocalNonpersistentObject``."""

    obj: Any = field(default_factory=lambda: ["mine"])

    def unwrap(self) -> Any:
        """What it wraps."""
        return self.obj
