"""The pieces of one tensor are the boxes that the ranks of a mesh hold of it, after expert, tensor and data axes cut.

Works on columns of all ranks at once. Knows places and sizes along axes, not the axes' names.
"""

from __future__ import annotations

from math import prod

import numpy as np
import numpy.typing as npt

from ckpt_tool.geometry.columns import Int64Array, distinct
from ckpt_tool.geometry.flat import flat_boxes_columns
from ckpt_tool.geometry.grid import split_columns
from ckpt_tool.geometry.overlaps import exact_duplicates
from ckpt_tool.layout.placement import Flat, Placement, Replicate, Shard
from ckpt_tool.records import dataclass

__all__ = ["Cut", "Pieces", "cut_pieces"]


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """How each kind of axis cuts a tensor, applied in this order; coordinates are ``int64[world_size]``."""

    ep: Shard | Replicate
    ep_coord: Int64Array
    ep_parts: int
    tp: Shard | Replicate
    fused: tuple[int, ...]
    """Sizes of parts along the dimension of ``tp``, each cut by itself; empty for one part."""
    tp_coord: Int64Array
    tp_parts: int
    data: Placement
    data_coord: Int64Array
    data_parts: int

    @property
    def parts(self) -> tuple[int, ...]:
        """Fused parts that really come apart: none when there is one tensor rank."""
        return self.fused if isinstance(self.tp, Shard) and self.tp_parts > 1 else ()


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Boxes in global coordinates, sorted by rank and then by place in the rank's own tensor."""

    rank: npt.NDArray[np.int32]
    replica: npt.NDArray[np.int32]
    offsets: Int64Array
    sizes: Int64Array
    n_idle: int
    """Ranks that hold nothing of it."""


def cut_pieces(shape: tuple[int, ...], cut: Cut, ranks: Int64Array, width: int) -> Pieces:
    """The boxes that ``ranks`` hold of a tensor; columns are padded to ``width`` dimensions.

    Boxes that are not equal are disjoint. Empty ones are dropped; a tensor without elements keeps one, whole, on the
    first rank.
    """
    if prod(shape) == 0:
        whole = np.array([shape], dtype=np.int64)
        rank, offsets, sizes = ranks[:1], np.zeros_like(whole), whole
    else:
        rank, offsets, sizes = _cut_model(shape, cut, ranks)
        if isinstance(cut.data, Shard) and shape:
            _cut_rows(offsets, sizes, cut, cut.data.dim, cut.data_coord[rank])
        elif isinstance(cut.data, Flat):
            rank, offsets, sizes = _cut_flat(rank, offsets, sizes, cut)
        kept = np.flatnonzero((sizes > 0).all(axis=1))
        rank, offsets, sizes = rank[kept], offsets[kept], sizes[kept]
    pad = ((0, 0), (0, width - len(shape)))
    return Pieces(
        n_idle=len(ranks) - len(distinct(rank)),
        rank=rank.astype(np.int32),
        replica=_replicas(offsets, sizes),
        offsets=np.pad(offsets, pad),
        sizes=np.pad(sizes, pad, constant_values=1),
    )


def _cut_model(shape: tuple[int, ...], cut: Cut, ranks: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    """``(rank, offsets, sizes)`` after expert and tensor axes: one row per rank, or one per rank and fused part."""
    rank = np.repeat(ranks, max(len(cut.parts), 1))
    sizes = np.tile(np.array(shape, dtype=np.int64).reshape(1, -1), (len(rank), 1))
    offsets = np.zeros_like(sizes)
    if isinstance(cut.ep, Shard):
        split_columns(offsets, sizes, cut.ep.dim, cut.ep_coord[rank], cut.ep_parts)
    if isinstance(cut.tp, Shard):
        if cut.parts:
            part_sizes = np.array(cut.parts, dtype=np.int64)
            offsets[:, cut.tp.dim] = np.tile(np.cumsum(part_sizes) - part_sizes, len(ranks))
            sizes[:, cut.tp.dim] = np.tile(part_sizes, len(ranks))
        split_columns(offsets, sizes, cut.tp.dim, cut.tp_coord[rank], cut.tp_parts)
    return rank, offsets, sizes


def _cut_rows(offsets: Int64Array, sizes: Int64Array, cut: Cut, dim: int, coord: Int64Array) -> None:
    """Cut every rank's own tensor along ``dim``, in place; fused parts lie in it one behind the other."""
    if not (cut.parts and cut.tp == Shard(dim)):
        split_columns(offsets, sizes, dim, coord, cut.data_parts)
        return
    by_rank = sizes[:, dim].reshape(-1, len(cut.parts))
    position = (np.cumsum(by_rank, axis=1) - by_rank).reshape(-1)
    total = np.repeat(by_rank.sum(axis=1), len(cut.parts))
    piece = -(-total // cut.data_parts)
    low = np.clip(coord * piece - position, 0, sizes[:, dim])
    high = np.clip((coord + 1) * piece - position, 0, sizes[:, dim])
    offsets[:, dim] += low
    sizes[:, dim] = high - low


def _cut_flat(
    rank: Int64Array, offsets: Int64Array, sizes: Int64Array, cut: Cut
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Cut the row-major elements of every box into equal ranges, and these into boxes."""
    numel = sizes.prod(axis=1)
    coord = cut.data_coord[rank]
    piece = -(-numel // cut.data_parts)
    starts = np.minimum(coord * piece, numel)
    row, local_offsets, local_sizes, _ = flat_boxes_columns(starts, np.minimum(starts + piece, numel), sizes)
    return rank[row], offsets[row] + local_offsets, local_sizes


def _replicas(offsets: Int64Array, sizes: Int64Array) -> npt.NDArray[np.int32]:
    """How many rows before each one hold an equal box."""
    first = exact_duplicates(offsets, sizes)
    order = np.argsort(first, kind="stable")
    heads = np.flatnonzero(np.diff(first[order], prepend=-1))
    counts = np.diff(np.append(heads, len(order)))
    replica = np.empty(len(order), dtype=np.int32)
    replica[order] = np.arange(len(order)) - np.repeat(heads, counts)
    return replica
