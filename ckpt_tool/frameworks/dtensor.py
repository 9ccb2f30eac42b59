"""A DTensor is a global tensor cut over a device mesh; its placements say which intervals a rank holds.

Covers FSDP2, tensor parallelism, their products (strided shards) and HSDP. Imports DTensor only where torch has it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeGuard

import torch

from ckpt_tool.errors import LayoutError, Unsupported
from ckpt_tool.geometry.box import Box
from ckpt_tool.geometry.grid import Interval, PlacementSpec, cut_order, interval_boxes, placement_intervals

__all__ = ["held_intervals", "is_dtensor", "parts_of", "shape_and_dtype"]


def is_dtensor(value: object) -> TypeGuard[Any]:
    """Whether ``value`` is a DTensor, of torch 2.5 and later or of before; a parameter made of one is one."""
    if not isinstance(value, torch.Tensor) or type(value) is torch.Tensor:
        return False
    return all(hasattr(value, name) for name in ("device_mesh", "placements", "to_local"))


def shape_and_dtype(value: Any) -> tuple[tuple[int, ...], torch.dtype]:
    """Global shape and element type."""
    return tuple(value.shape), value.dtype


def parts_of(value: Any, *, where: str) -> list[tuple[Box, torch.Tensor]]:
    """``(box in global coordinates, view of the local tensor)`` for each box that this rank holds.

    Raises:
        Unsupported: a placement whose values are partial sums.
        LayoutError: the local tensor is not of the size that the placements give.
    """
    coord = value.device_mesh.get_coordinate()
    if coord is None:
        return []
    with torch.no_grad():
        local = value.to_local()
    local = getattr(local, "elem", local)
    intervals = held_intervals(
        tuple(value.shape),
        tuple(value.device_mesh.shape),
        tuple(coord),
        tuple(_spec(placement, where) for placement in value.placements),
        local_shape=tuple(local.shape),
    )
    if intervals is None:
        raise LayoutError(
            f"{value.placements} on a mesh of {tuple(value.device_mesh.shape)} do not give the rank at {tuple(coord)} "
            f"a local tensor of {list(local.shape)} of {list(value.shape)}",
            where=where,
        )
    return [(box, local[inside.slices]) for box, inside in interval_boxes(intervals)]


@lru_cache(maxsize=4096)  # a model has few shapes
def held_intervals(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coord: tuple[int, ...],
    placements: tuple[PlacementSpec, ...],
    *,
    local_shape: tuple[int, ...],
) -> list[list[Interval]] | None:
    """Global intervals per dimension held by the rank at ``coord``; None when they do not make up ``local_shape``.

    FSDP2 over tensor parallelism cuts in the order of `cut_order`; where that does not explain the local tensor's size,
    DTensor's own arithmetic for strided shards is tried.
    """
    order = cut_order(mesh_shape, placements)
    axes = [axis for axis, _ in order]
    as_fsdp = placement_intervals(
        shape, [mesh_shape[a] for a in axes], [coord[a] for a in axes], [placement for _, placement in order]
    )
    for intervals in (as_fsdp, placement_intervals(shape, mesh_shape, coord, placements)):
        if tuple(sum(stop - start for start, stop in held) for held in intervals) == local_shape:
            return intervals
    return None


def _spec(placement: Any, where: str) -> PlacementSpec:
    """A torch placement as a value. Told by attributes: classes moved between modules, veScale has its own."""
    if placement.is_replicate():
        return ("replicate",)
    split_factor = getattr(placement, "split_factor", None)
    if split_factor is not None:
        return ("strided", int(placement.dim), int(split_factor))
    if placement.is_shard():
        return ("shard", int(placement.dim))
    raise Unsupported(
        f"placement {placement} holds partial values, not elements", where=where, hint="redistribute it first"
    )
