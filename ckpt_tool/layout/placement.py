"""A placement says what one mesh axis does to one tensor; a tensor layout collects the placements of one tensor.

The words are those of DTensor. Knows neither names of tensors nor sizes of meshes.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from ckpt_tool.records import dataclass

__all__ = ["Flat", "Placement", "Replicate", "Shard", "StageName", "TensorLayout"]

StageName: TypeAlias = Literal["first", "last", "layer", "all"]


@dataclass(frozen=True, slots=True)
class Shard:
    """Cut along a dimension of what the earlier axes left, by the rule of ``torch.chunk``."""

    dim: int


@dataclass(frozen=True, slots=True)
class Replicate:
    """Every rank along the axis holds the same."""


@dataclass(frozen=True, slots=True)
class Flat:
    """Cut the row-major elements of what the earlier axes left into equal ranges, whatever its shape."""


Placement: TypeAlias = Shard | Replicate | Flat


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """How one tensor lies over tensor-, expert- and pipeline-parallel ranks; data parallelism is the same for all."""

    tp: Shard | Replicate = Replicate()
    parts: tuple[int, ...] = ()
    """Sizes of fused parts along the dimension that ``tp`` cuts: each part is cut by itself. Empty: one part."""
    ep: Shard | Replicate = Replicate()
    expert: int | None = None
    """The expert that the whole tensor belongs to."""
    stage: StageName = "all"
    layer: int | None = None
    """Layer that the tensor belongs to, for ``stage="layer"``."""
    is_whole: bool = False
    """Whether data-parallel ranks replicate it where they cut others: buffers, random states, counters."""

    @property
    def is_expert(self) -> bool:
        """Whether expert-parallel ranks hold different parts, so that they are no data-parallel ranks for it."""
        return self.expert is not None or isinstance(self.ep, Shard)
