"""A grid is a placement that the format can record: a tensor cut along its dimensions as ``torch.chunk`` cuts.

Boxes are in global coordinates, each on a rank of its own. What is cut otherwise has no placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

from ckpt_tool.dtypes import DType
from ckpt_tool.geometry.box import Box
from ckpt_tool.geometry.grid import chunk_bounds
from ckpt_tool.geometry.runs import contiguous_strides
from ckpt_tool.records import dataclass

__all__ = ["Grid", "grid_of", "group_record"]


@dataclass(frozen=True, slots=True)
class Grid:
    """A mesh made for one tensor."""

    sizes: tuple[int, ...]
    """Of the mesh's axes; ``(1,)`` for a whole tensor."""
    ranks: tuple[int, ...]
    """One per cell, the last axis fastest."""
    dims: tuple[int, ...]
    """Dimension of the tensor that each axis cuts; none for a whole tensor."""


def grid_of(shape: tuple[int, ...], boxes: Sequence[tuple[Box, int]]) -> Grid | None:
    """The grid of ``boxes`` (with their ranks) that together are a tensor; None when they are no such cut.

    >>> grid_of((5, 2), [(Box((3, 0), (2, 2)), 7), (Box((0, 0), (3, 2)), 4)])
    Grid(sizes=(2,), ranks=(4, 7), dims=(0,))
    """
    ranks = {box.offsets: rank for box, rank in boxes}
    if len(ranks) != len(boxes) or len(set(ranks.values())) != len(boxes):
        return None
    starts = [sorted({box.offsets[dim] for box, _ in boxes}) for dim in range(len(shape))]
    bounds = [chunk_bounds(length, len(found)).tolist() for length, found in zip(shape, starts, strict=True)]
    if [list(found) for found in starts] != [found[:-1] for found in bounds] or prod(map(len, starts)) != len(boxes):
        return None
    for box, _ in boxes:
        ends = [found[found.index(start) + 1] for found, start in zip(bounds, box.offsets, strict=True)]
        if list(box.ends) != ends:
            return None
    dims = tuple(dim for dim, found in enumerate(starts) if len(found) > 1)
    if not dims:
        return Grid((1,), (boxes[0][1],), ())
    return Grid(tuple(len(starts[dim]) for dim in dims), tuple(ranks[cell] for cell in product(*starts)), dims)


def group_record(grid: Grid, dtype: DType, shape: tuple[int, ...]) -> dict[str, Any]:
    """What ``metadata.pkl`` says of a tensor on this grid (torch-checkpointing 0.1.1, ``dtensor_metadata.py``)."""
    placements = [{"type": "Shard", "dim": dim} for dim in grid.dims] or [{"type": "Replicate"}]
    return {
        "ranks": grid.ranks,
        "sharding_metadata": {
            "type": "DTensorShardingMetadata",
            "data": {
                "global_shape": list(shape),
                "dtype": f"torch.{dtype.name}",
                "stride": list(contiguous_strides(shape)),
                "mesh_spec": {
                    "device_type": "cpu",
                    "mesh_shape": grid.sizes,
                    "mesh_data": grid.ranks,
                    "mesh_dim_names": None,
                },
                "placements": placements,
            },
        },
    }
