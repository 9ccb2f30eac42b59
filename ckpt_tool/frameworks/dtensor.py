"""A DTensor is a global tensor cut over a device mesh; its placements say which intervals a rank holds.

Covers FSDP2, tensor parallelism, their products (strided shards) and HSDP. Imports DTensor only where torch has it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, TypeGuard

import torch

from ckpt_tool.errors import LayoutError, Unsupported
from ckpt_tool.frameworks.wrapped import with_memory
from ckpt_tool.geometry.box import Box
from ckpt_tool.geometry.grid import Interval, PlacementSpec, cut_order, interval_boxes, placement_intervals

__all__ = ["Known", "held_intervals", "is_dtensor", "parts_of", "shape_and_dtype"]


def is_dtensor(value: object) -> TypeGuard[Any]:
    """Whether ``value`` is a DTensor, of torch 2.5 and later or of before; a parameter made of one is one."""
    kind: Any = type(value)
    return _is_dtensor_type(kind)


@lru_cache(maxsize=64)
def _is_dtensor_type(cls: Any) -> bool:
    """Told by the class alone, some microseconds cheaper for each tensor."""
    names = ("device_mesh", "placements", "to_local")
    return issubclass(cls, torch.Tensor) and all(hasattr(cls, name) for name in names)


def shape_and_dtype(value: Any) -> tuple[tuple[int, ...], torch.dtype]:
    """Global shape and element type."""
    return tuple(value.shape), value.dtype


Known = dict[tuple[Any, ...], list[tuple[Box, tuple[slice, ...]]]]
"""Boxes by what decides them, for tensors that are looked at together: a model has few different ones."""


def parts_of(value: Any, *, where: str, known: Known) -> list[tuple[Box, torch.Tensor]]:
    """``(box in global coordinates, view of the local tensor)`` for each box that this rank holds. Without gradients.

    Raises:
        Unsupported: a placement whose values are partial sums, or a local tensor without memory of its own.
        LayoutError: the local tensor is not of the size that the placements give.
    """
    local = with_memory(value.to_local(), where)
    key = (id(value.device_mesh), value.placements, tuple(value.shape), tuple(local.shape))
    held = known.get(key)
    if held is None:
        held = known[key] = _held(value, tuple(local.shape), where)
    if len(held) == 1 and held[0][0].sizes == key[3]:
        return [(held[0][0], local)]
    return [(box, local[inside]) for box, inside in held]


def _held(value: Any, local_shape: tuple[int, ...], where: str) -> list[tuple[Box, tuple[slice, ...]]]:
    """Each box that this rank holds, and where it lies in the local tensor; none outside of the mesh."""
    found = value.device_mesh.get_coordinate()  # torch takes as long for it as all the rest of a tensor does
    if found is None:
        return []
    coord = tuple(found)
    placements = tuple(_spec(placement, where) for placement in value.placements)
    intervals = held_intervals(
        tuple(value.shape), tuple(value.device_mesh.shape), coord, placements, local_shape=local_shape
    )
    if intervals is None:
        raise LayoutError(
            f"{value.placements} on a mesh of {tuple(value.device_mesh.shape)} do not give the rank at {coord} "
            f"a local tensor of {list(local_shape)} of {list(value.shape)}",
            where=where,
        )
    return [(box, inside.slices) for box, inside in interval_boxes(intervals)]


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
