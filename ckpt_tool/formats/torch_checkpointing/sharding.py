"""Which boxes of a tensor one rank's file holds, by the placement that ``metadata.pkl`` records.

Boxes are in global coordinates. Ranks are those of the whole job; a mesh lists them. Reads nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from ckpt_tool.dtypes import DType, dtype
from ckpt_tool.errors import FormatError, LayoutError, Unsupported
from ckpt_tool.formats._pickle.tensors import TensorRef, WrapperRef
from ckpt_tool.formats._torch_file.placed import Piece, Placed, held_boxes
from ckpt_tool.formats.torch_checkpointing.metadata import Group
from ckpt_tool.geometry.box import Box
from ckpt_tool.geometry.grid import PlacementSpec
from ckpt_tool.manifest.model import MeshInfo

__all__ = ["place_tensor"]

_EVIDENCE = "the mesh that metadata.pkl records for each tensor"

Held = tuple[tuple[int, ...], tuple[tuple[Box, Box], ...]]
"""Sizes of the local tensor, and its ``(global box, local box)`` pairs."""


def place_tensor(value: TensorRef | WrapperRef, groups: Sequence[Group], rank: int) -> Placed:
    """Where the tensor that ``rank`` stored belongs.

    Raises:
        FormatError: the rank is in no group, or the stored tensor is not what its placement says.
        Unsupported: a placement, or a tensor class, that is not known here.
    """
    group = next((group for group in groups if rank in group.ranks), None)
    if group is None:
        listed = sorted(rank for group in groups for rank in group.ranks)
        raise FormatError(f"rank {rank} holds it, metadata.pkl lists ranks {listed[:8]}")
    local = value.attribute("_local_tensor") if isinstance(value, WrapperRef) else value
    if not isinstance(local, TensorRef):
        name = value.cls.qualified if isinstance(value, WrapperRef) else type(value).__name__
        raise Unsupported(f"a {name} around something that is no plain tensor")
    try:
        shape = _sizes(group.data["global_shape"])
        recorded = _dtype(group.data["dtype"])
        if group.kind == "DTensorShardingMetadata":
            mesh, held = _by_mesh(group.data, shape, rank, local.shape)
        elif group.kind == "default_tensor_v1":
            mesh, held = None, _by_boxes(group.data, shape, local.shape)
        else:
            raise Unsupported(f"a placement of the kind {group.kind!r}, which is not known here")
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, (FormatError, LayoutError)):
            raise
        raise FormatError(f"its placement in metadata.pkl lacks or garbles {error}") from None
    if local.dtype != recorded:
        raise FormatError(f"the stored tensor is {local.dtype.name}, metadata.pkl says {recorded.name}")
    sizes, pairs = held
    if sizes != local.shape and prod(sizes) + prod(local.shape) > 0:
        raise FormatError(
            f"rank {rank} should hold {list(sizes)} of {list(shape)}, the stored tensor is {list(local.shape)}"
        )
    return Placed(recorded, shape, tuple(Piece(box, part, local) for box, part in pairs), "layout", mesh)


def _dtype(name: object) -> DType:
    if not isinstance(name, str):
        raise FormatError(f"the dtype is {name!r}, expected text")
    return dtype(name)


def _sizes(value: Any) -> tuple[int, ...]:
    sizes = tuple(value)
    if not all(type(size) is int and 0 <= size < 1 << 62 for size in sizes):
        raise FormatError(f"{list(sizes)} are no sizes")
    return sizes


def _by_mesh(
    data: Mapping[str, Any], shape: tuple[int, ...], rank: int, local: tuple[int, ...]
) -> tuple[MeshInfo | None, Held]:
    mesh = data["mesh_spec"]
    axes, ranks, names = _sizes(mesh["mesh_shape"]), tuple(mesh["mesh_data"]), mesh.get("mesh_dim_names")
    placements = tuple(_placement(entry) for entry in data["placements"])
    if rank not in ranks or len(ranks) != prod(axes) or len(placements) != len(axes):
        raise FormatError(
            f"rank {rank}, {len(placements)} placements and {len(ranks):,} ranks do not fit a mesh of {list(axes)}"
        )
    at = ranks.index(rank)
    coord: list[int] = []
    for size in reversed(axes):
        at, here = divmod(at, size)
        coord.insert(0, here)
    info = None
    if len(ranks) > 1:
        known = tuple(map(str, names)) if names and len(names) == len(axes) else None
        info = MeshInfo(known or tuple(f"axis{i}" for i in range(len(axes))), axes, _EVIDENCE)
    try:
        return info, held_boxes(shape, axes, tuple(coord), placements, local)
    except LayoutError as error:
        raise FormatError(error.message) from error


def _placement(entry: Mapping[str, Any]) -> PlacementSpec:
    kind = entry["type"]
    if kind == "Replicate":
        return ("replicate",)
    if kind not in ("Shard", "StridedShard"):
        raise Unsupported(f"a placement {kind!r}, which is not known here")
    dim, split_factor = _sizes([entry["dim"], entry.get("split_factor", 1)])
    return ("shard", dim) if kind == "Shard" else ("strided", dim, split_factor)


def _by_boxes(data: Mapping[str, Any], shape: tuple[int, ...], local: tuple[int, ...]) -> Held:
    """Explicit boxes, of which a local tensor may hold several anywhere in it."""
    columns = [[_sizes(row) for row in data[name]] for name in ("global_offsets", "local_offsets", "local_sizes")]
    if len({len(column) for column in columns}) != 1:
        raise FormatError(f"lists of {[len(column) for column in columns]} offsets and sizes, expected as many of each")
    pairs = [(Box(offsets, sizes), Box(starts, sizes)) for offsets, starts, sizes in zip(*columns, strict=True)]
    for box, part in pairs:
        if box.ndim != len(shape) or not Box.whole(shape).contains(box) or not Box.whole(local).contains(part):
            raise FormatError(f"the box {box} of {list(shape)}, {part} of the stored {list(local)}, lies outside")
    return local, tuple(pair for pair in pairs if pair[0].volume)
