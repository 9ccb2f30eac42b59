"""A partition is one data-parallel rank's part of the flattened parameters; here is which elements are in it.

Two layouts, both read off real files and ``deepspeed/utils/zero_to_fp32.py`` (0.19.8):

- *contiguous* (ZeRO-1, ZeRO-2, BF16_Optimizer): the parameters of a group one behind the other, with padding between
  them under ``parameter_alignment``; rank ``r`` has elements ``r * P`` to ``(r + 1) * P``;
- *per parameter* (ZeRO-3): each parameter cut into ``ceil(numel / W)`` elements per rank, and a rank's parts of all
  parameters one behind the other.

Positions are in elements: ``start`` and ``stop`` in the flattened parameter, ``position`` in the rank's own vector.
Padding is in no slice. Knows no file.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckpt_tool.errors import FormatError
from ckpt_tool.geometry.columns import Int64Array
from ckpt_tool.records import dataclass

__all__ = [
    "Slices",
    "contiguous_slices",
    "cut_at",
    "flat_starts",
    "partition_length",
    "per_parameter_slices",
    "round_robin_order",
]


@dataclass(frozen=True, slots=True)
class Slices:
    """Columns: one row per parameter that a rank has a part of."""

    parameter: Int64Array  # int64[n], index into the group's parameters
    start: Int64Array  # int64[n], in the flattened parameter
    stop: Int64Array  # int64[n]
    position: Int64Array  # int64[n], of ``start`` in the rank's vector

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.parameter)

    def take(self, rows: Int64Array) -> Slices:
        """The rows named by ``rows``."""
        return Slices(self.parameter[rows], self.start[rows], self.stop[rows], self.position[rows])


def flat_starts(numel: Int64Array, padding: Int64Array) -> Int64Array:
    """``int64[n]``: where each parameter starts in the group's flat vector, given the padding behind each."""
    ends = np.cumsum(numel + padding)
    return np.asarray(ends - (numel + padding), dtype=np.int64)


def partition_length(total: int, world_size: int, held: Sequence[int], ranks: Sequence[int]) -> int | None:
    """``P`` of a contiguous group; None when the ranks hold no such partition.

    Partitions are aligned to two elements since 0.4, to one before; files may keep the padding at the vector's end
    (BF16_Optimizer, and moments always) or not (masters of ZeRO-1 and ZeRO-2).

    Args:
        total: elements from the first parameter's first to the last one's last.
        world_size: number of partitions.
        held: elements that each rank's vector has.
        ranks: the rank of each.

    >>> partition_length(10, 4, [4, 4, 2, 0], [0, 1, 2, 3])
    4
    """
    for length in dict.fromkeys((-(-total // (2 * world_size)) * 2, -(-total // world_size))):
        own = [min(max(total - rank * length, 0), length) for rank in ranks]
        if all(h in (length, o) for h, o in zip(held, own, strict=True)):
            return length
    return None


def contiguous_slices(starts: Int64Array, numel: Int64Array, length: int, rank: int) -> Slices:
    """What rank ``rank`` holds of parameters at ``starts`` when partitions have ``length`` elements each.

    >>> contiguous_slices(np.array([0, 6]), np.array([6, 4]), 5, 1).position.tolist()
    [0, 1]
    """
    low = np.maximum(starts, rank * length)
    high = np.minimum(starts + numel, (rank + 1) * length)
    rows = np.flatnonzero(low < high)
    low, high = low[rows], high[rows]
    return Slices(rows.astype(np.int64), low - starts[rows], high - starts[rows], low - rank * length)


def per_parameter_slices(numel: Int64Array, world_size: int, rank: int) -> Slices:
    """What rank ``rank`` of ``world_size`` holds of parameters that are each cut by themselves.

    >>> per_parameter_slices(np.array([5, 4]), 2, 1).stop.tolist()
    [5, 4]
    """
    per_rank = -(-numel // world_size)
    position = np.cumsum(per_rank) - per_rank
    low = np.minimum(rank * per_rank, numel)
    high = np.minimum(low + per_rank, numel)
    rows = np.flatnonzero(low < high)
    return Slices(rows.astype(np.int64), low[rows], high[rows], position[rows].astype(np.int64))


def round_robin_order(count: int, world_size: int) -> list[int]:
    """Which parameter of a group comes at each place of the flat vector under ``round_robin_gradients``.

    >>> round_robin_order(5, 2)
    [0, 2, 4, 1, 3]
    """
    return [index for rank in range(world_size) for index in range(rank, count, world_size)]


def cut_at(slices: Slices, lengths: Sequence[int]) -> tuple[Slices, Int64Array]:
    """``slices`` of a vector that is stored in consecutive segments, cut where these end; and the segment of each row.

    Positions of the result count from the segment's first element.

    Raises:
        FormatError: a slice ends behind the last segment; ``where`` is left to the caller, ``hint`` empty.
    """
    bounds = np.concatenate([[0], np.cumsum(np.asarray(lengths, dtype=np.int64))])
    ends = slices.position + slices.stop - slices.start
    over = np.flatnonzero(ends > bounds[-1])
    if len(over):
        first = int(over[0])
        raise FormatError(f"ends at element {int(ends[first]):,} of {int(bounds[-1]):,}")
    if len(lengths) == 1:
        return slices, np.zeros(len(slices), dtype=np.int64)
    first_segment = np.searchsorted(bounds, slices.position, side="right") - 1
    last_segment = np.searchsorted(bounds, ends, side="left") - 1
    counts = last_segment - first_segment + 1
    row = np.repeat(np.arange(len(slices), dtype=np.int64), counts)
    segment = first_segment[row] + np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    low = np.maximum(slices.position[row], bounds[segment])
    high = np.minimum(ends[row], bounds[segment + 1])
    start = slices.start[row] + low - slices.position[row]
    kept = np.flatnonzero(low < high)
    cut = Slices(slices.parameter[row], start, start + high - low, low - bounds[segment])
    return cut.take(kept), segment[kept]
