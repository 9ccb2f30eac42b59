"""The sizes that shape a plan: apart from what builds one, because whoever opens a checkpoint says them."""

from __future__ import annotations

from ckpt_tool.records import dataclass

__all__ = ["PlanLimits"]


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """Sizes that shape a plan."""

    max_tile_bytes: int
    """Buffer for one tile."""
    max_odd_tile_bytes: int
    """Buffer for a tensor stored with odd strides (transposed, expanded), which is not cut if it fits."""
    unit_bytes: int
    """About this many bytes are executed and journaled together."""
    in_file_order: bool = False
    """Fill every target file from its first byte to its last, for storage without seek; may read some bytes twice."""
    one_read_per_tile: bool = False
    """Cut tiles where the source's chunks end, so that each can be read by another process."""
