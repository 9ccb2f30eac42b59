"""Which boxes of a tensor one rank's file holds, by the placement that ``metadata.pkl`` records.

Boxes are in global coordinates. Ranks are those of the whole job; a mesh lists them. Reads nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
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
from ckpt_tool.records import dataclass, field
from ckpt_tool.sizes import counted

__all__ = ["TensorPlacements"]

_EVIDENCE = "the mesh that metadata.pkl records for each tensor"

Held = tuple[tuple[int, ...], tuple[tuple[Box, Box], ...]]
"""Sizes of the local tensor, and its ``(global box, local box)`` pairs."""


class TensorPlacements:
    """All groups of one tensor, read once and asked for each rank that stored a part of it."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = [(_positions(group.ranks), group) for group in groups]
        self._read: dict[int, _Placement] = {}

    def place(self, value: TensorRef | WrapperRef, rank: int) -> Placed:
        """Where the tensor that ``rank`` stored belongs.

        Raises:
            FormatError: the rank is in no group, or the stored tensor is not what its placement says.
            Unsupported: a placement, or a tensor class, that is not known here.
        """
        group = next((group for ranks, group in self._groups if rank in ranks), None)
        if group is None:
            listed = sorted(rank for ranks, _ in self._groups for rank in ranks)
            raise FormatError(f"rank {rank} holds it, metadata.pkl lists ranks {listed[:8]}")
        local = value.attribute("_local_tensor") if isinstance(value, WrapperRef) else value
        if not isinstance(local, TensorRef):
            name = value.cls.qualified if isinstance(value, WrapperRef) else type(value).__name__
            raise Unsupported(f"a {name} around something that is no plain tensor")
        placement = self._read.get(id(group))
        if placement is None:
            placement = self._read[id(group)] = _read_group(group)
        if local.dtype != placement.dtype:
            raise FormatError(f"the stored tensor is {local.dtype.name}, metadata.pkl says {placement.dtype.name}")
        sizes, pairs = placement.held(rank, local.shape)
        if sizes != local.shape and prod(sizes) + prod(local.shape) > 0:
            raise FormatError(
                f"rank {rank} should hold {list(sizes)} of {list(placement.shape)}, the stored tensor is "
                f"{list(local.shape)}"
            )
        pieces = tuple(Piece(box, part, local) for box, part in pairs)
        return Placed(placement.dtype, placement.shape, pieces, "layout", placement.mesh)


@dataclass(frozen=True, slots=True)
class _Placement:
    """One group, checked."""

    dtype: DType
    shape: tuple[int, ...]
    axes: tuple[int, ...] = ()
    positions: Mapping[int, int] = field(default_factory=dict)
    """By rank: its cell in the mesh, counted row-major."""
    placements: tuple[PlacementSpec, ...] = ()
    mesh: MeshInfo | None = None
    boxes: tuple[tuple[Box, Box], ...] | None = None
    """Explicit ``(global box, local box)`` pairs, where there is no mesh."""

    def held(self, rank: int, local: tuple[int, ...]) -> Held:
        """What ``rank`` holds in a tensor of the sizes ``local``.

        Raises:
            FormatError: the rank is not in the mesh, or placements do not fit the tensor.
        """
        if self.boxes is not None:
            for box, part in self.boxes:
                if part.ndim != len(local) or not Box.whole(local).contains(part):
                    raise FormatError(_outside(box, self.shape, part, local))
            return local, tuple(pair for pair in self.boxes if pair[0].volume)
        at = self.positions.get(rank)
        if at is None or len(self.positions) != prod(self.axes) or len(self.placements) != len(self.axes):
            raise FormatError(
                f"rank {rank}, {counted(len(self.placements), 'placement')} and "
                f"{counted(len(self.positions), 'rank', 'do')} not fit a mesh of {list(self.axes)}"
            )
        coord: list[int] = []
        for size in reversed(self.axes):
            at, here = divmod(at, size)
            coord.insert(0, here)
        try:
            return held_boxes(self.shape, self.axes, tuple(coord), self.placements, local)
        except LayoutError as error:
            raise FormatError(error.message) from error


@lru_cache(maxsize=256)
def _positions(ranks: tuple[int, ...]) -> Mapping[int, int]:
    """Position of each rank; most tensors are on the same ranks."""
    return {rank: position for position, rank in enumerate(ranks)}


def _read_group(group: Group) -> _Placement:
    try:
        shape, element = _sizes(group.data["global_shape"]), _dtype(group.data["dtype"])
        if group.kind == "DTensorShardingMetadata":
            return _on_mesh(group.data, element, shape)
        if group.kind == "default_tensor_v1":
            return _Placement(element, shape, boxes=_boxes(group.data, shape))
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, (FormatError, LayoutError)):
            raise
        raise FormatError(f"its placement in metadata.pkl lacks or garbles {error}") from None
    raise Unsupported(f"a placement of the kind {group.kind!r}, which is not known here")


def _dtype(name: object) -> DType:
    if not isinstance(name, str):
        raise FormatError(f"the dtype is {name!r}, expected text")
    return dtype(name)


def _sizes(value: Any) -> tuple[int, ...]:
    sizes = tuple(value)
    if not all(type(size) is int and 0 <= size < 1 << 62 for size in sizes):
        raise FormatError(f"{list(sizes)} are no sizes")
    return sizes


def _on_mesh(data: Mapping[str, Any], element: DType, shape: tuple[int, ...]) -> _Placement:
    mesh = data["mesh_spec"]
    axes, ranks, names = _sizes(mesh["mesh_shape"]), _sizes(mesh["mesh_data"]), mesh.get("mesh_dim_names")
    placements = tuple(_placement(entry) for entry in data["placements"])
    info = None
    if len(ranks) > 1:
        known = tuple(map(str, names)) if names and len(names) == len(axes) else None
        info = MeshInfo(known or tuple(f"axis{i}" for i in range(len(axes))), axes, _EVIDENCE)
    return _Placement(element, shape, axes, _positions(ranks), placements, info)


def _placement(entry: Mapping[str, Any]) -> PlacementSpec:
    kind = entry["type"]
    if kind == "Replicate":
        return ("replicate",)
    if kind not in ("Shard", "StridedShard"):
        raise Unsupported(f"a placement {kind!r}, which is not known here")
    dim, split_factor = _sizes([entry["dim"], entry.get("split_factor", 1)])
    return ("shard", dim) if kind == "Shard" else ("strided", dim, split_factor)


def _boxes(data: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[tuple[Box, Box], ...]:
    """Explicit boxes, of which a local tensor may hold several anywhere in it."""
    columns = [[_sizes(row) for row in data[name]] for name in ("global_offsets", "local_offsets", "local_sizes")]
    if len({len(column) for column in columns}) != 1:
        raise FormatError(f"lists of {[len(column) for column in columns]} offsets and sizes, expected as many of each")
    pairs = [(Box(offsets, sizes), Box(starts, sizes)) for offsets, starts, sizes in zip(*columns, strict=True)]
    for box, part in pairs:
        if box.ndim != len(shape) or not Box.whole(shape).contains(box):
            raise FormatError(_outside(box, shape, part, None))
    return tuple(pairs)


def _outside(box: Box, shape: tuple[int, ...], part: Box, local: tuple[int, ...] | None) -> str:
    stored = "the stored tensor" if local is None else f"the stored {list(local)}"
    return f"the box {box} of {list(shape)}, {part} of {stored}, lies outside"
