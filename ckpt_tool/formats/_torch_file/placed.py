"""A placed tensor says which boxes of a global tensor a pickled tensor holds: DTensor, ShardedTensor, or all of it.

Boxes are in global coordinates; *local* boxes lie in the tensor that was pickled. Classes are recognised by their last
name, for torch moved them between releases: 2.1 has ``torch.distributed._tensor.api.DTensor`` with a tensor for a mesh,
2.13 ``torch.distributed.tensor.DTensor`` with the mesh as a layout and a map of ranks. Knows no file and no byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any

from ckpt_tool.dtypes import DType
from ckpt_tool.errors import FormatError, LayoutError, Unsupported
from ckpt_tool.formats._pickle.nodes import Global, Stub
from ckpt_tool.formats._pickle.tensors import TensorRef, WrapperRef
from ckpt_tool.formats._torch_file.ragged import RAGGED, ragged_boxes
from ckpt_tool.geometry.box import Box
from ckpt_tool.geometry.grid import PlacementSpec, cut_order, interval_boxes, placement_intervals
from ckpt_tool.manifest.model import MeshInfo
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["Piece", "Placed", "held_boxes", "place", "whole"]


_REPLICATE: PlacementSpec = ("replicate",)


@dataclass(frozen=True, slots=True)
class Piece:
    """One box of the global tensor and where the pickled tensor holds it."""

    box: Box
    """In global coordinates."""
    local: Box
    """The same elements, in coordinates of ``tensor``."""
    tensor: TensorRef


@dataclass(frozen=True, slots=True)
class Placed:
    """What one file holds of one global tensor."""

    dtype: DType
    shape: tuple[int, ...]
    """Global."""
    pieces: tuple[Piece, ...]
    """Boxes that are not empty; none when the rank holds nothing."""
    kind: str
    """``plain`` (no placement recorded), ``dtensor``, ``sharded_tensor`` or ``layout``."""
    mesh: MeshInfo | None = None
    mesh_rank: int | None = None
    """The rank that the pickle says it is."""
    claims: tuple[tuple[int, Box], ...] = ()
    """ShardedTensor: every rank's box, as each file lists them."""


def whole(tensor: TensorRef) -> Placed:
    """A plain tensor: all of itself, as far as it says."""
    box = Box.whole(tensor.shape)
    pieces = (Piece(box, box, tensor),) if box.volume else ()
    return Placed(tensor.dtype, tensor.shape, pieces, "plain")


def place(node: TensorRef | WrapperRef, rank: int | None) -> Placed | None:
    """Where the parts of ``node`` belong; None for a wrapper that is neither DTensor nor ShardedTensor.

    Args:
        node: a tensor out of a pickle.
        rank: the rank whose file it is in, asked only when a DTensor does not record its own coordinate.

    Raises:
        FormatError: the local tensor does not have the shape that its placement gives it.
        Unsupported: partial sums, unknown placements, or a local part that is not a plain tensor.
    """
    if isinstance(node, TensorRef):
        return whole(node)
    if node.cls.last == "DTensor":
        return _dtensor(node, rank)
    if node.cls.last == "ShardedTensor":
        return _sharded_tensor(node)
    return None


def _attribute(record: object, name: str, default: object = None) -> Any:
    """An attribute of an inert object, whatever stands for it."""
    if isinstance(record, (Stub, WrapperRef)):
        return record.attribute(name, default)
    return record.get(name, default) if isinstance(record, Mapping) else default


def _lengths(value: object, what: str) -> tuple[int, ...]:
    if not isinstance(value, (tuple, list)) or any(type(item) is not int or item < 0 for item in value):
        raise FormatError(f"{what}: expected a tuple of integers, got {type(value).__name__}")
    return tuple(value)


def _dtype(value: object) -> DType:
    if not isinstance(value, DType):
        name = value.qualified if isinstance(value, Global) else type(value).__name__
        raise Unsupported(f"a tensor of the unknown dtype {name}")
    return value


# ---------------------------------------------------------------------------------------------------------- DTensor


def _dtensor(node: WrapperRef, rank: int | None) -> Placed:
    local = node.attribute("_local_tensor")
    spec = node.attribute("_spec")
    if not isinstance(local, TensorRef):
        name = local.cls.qualified if isinstance(local, WrapperRef) else type(local).__name__
        raise Unsupported(f"a DTensor around {name}, expected a plain tensor")
    mesh = _attribute(spec, "mesh")
    sizes = _mesh_sizes(mesh)
    coord = _coordinate(mesh, sizes, rank)
    raw = _attribute(spec, "placements", ())
    ragged = [axis for axis, placement in enumerate(raw) if _class_of(placement) in RAGGED]
    placements = tuple(_REPLICATE if axis in ragged else _placement(p) for axis, p in enumerate(raw))
    if not len(sizes) == len(coord) == len(placements):
        raise FormatError(
            f"a DTensor has {counted(len(placements), 'placement')} and the coordinate {coord} on a mesh of "
            f"{len(sizes)} axes"
        )
    order = _shard_order(placements, _attribute(spec, "shard_order"))
    try:
        held, boxes = held_boxes(
            node.shape,
            tuple(sizes[i] for i in order),
            tuple(coord[i] for i in order),
            tuple(placements[i] for i in order),
            local.shape,
        )
    except LayoutError as error:
        raise FormatError(f"a DTensor of shape {list(node.shape)}: {error.message}") from error
    if ragged:
        return _placed_dtensor(node, local, mesh, sizes, _ragged_pieces(boxes, raw, ragged, coord, local))
    if held != local.shape and prod(held) + prod(local.shape) > 0:
        raise FormatError(
            f"a DTensor of shape {list(node.shape)} with {_spelled(placements)} at {coord} of mesh {sizes} holds "
            f"{list(held)}, its local tensor is {list(local.shape)}"
        )
    return _placed_dtensor(node, local, mesh, sizes, tuple(Piece(box, part, local) for box, part in boxes))


def _ragged_pieces(
    boxes: Sequence[tuple[Box, Box]],
    raw: Sequence[object],
    ragged: Sequence[int],
    coord: Sequence[int],
    local: TensorRef,
) -> tuple[Piece, ...]:
    """Pieces of a rank that holds its share of what the other axes leave it."""
    if len(ragged) > 1 or len(boxes) > 1:
        raise Unsupported(
            f"a DTensor with {counted(len(ragged), 'ragged placement')} of {counted(len(boxes), 'box')}; expected one "
            "of one"
        )
    placement = raw[ragged[0]]
    dims = _lengths(_attribute(placement, "dims"), "dims of a ragged shard")
    units = _lengths(_attribute(placement, "local_units"), "units of a ragged shard")
    if not boxes or ragged[0] >= len(coord) or coord[ragged[0]] >= len(units):
        return ()
    found = ragged_boxes(boxes[0][0], dims, units, coord[ragged[0]], local)
    return tuple(Piece(box, Box.whole(box.sizes), own) for box, own in found)


def _placed_dtensor(
    node: WrapperRef, local: TensorRef, mesh: object, sizes: tuple[int, ...], pieces: tuple[Piece, ...]
) -> Placed:
    names = _attribute(mesh, "_mesh_dim_names") or _attribute(mesh, "mesh_dim_names") or ()
    axes = tuple(map(str, names)) if len(names) == len(sizes) else tuple(f"axis{i}" for i in range(len(sizes)))
    mesh_rank = _attribute(mesh, "_rank")
    return Placed(
        dtype=local.dtype,
        shape=node.shape,
        pieces=pieces,
        kind="dtensor",
        mesh=MeshInfo(axes, sizes, "the device mesh that each DTensor records"),
        mesh_rank=mesh_rank if type(mesh_rank) is int else None,
    )


@lru_cache(maxsize=4096)
def held_boxes(
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    coord: tuple[int, ...],
    placements: tuple[PlacementSpec, ...],
    local: tuple[int, ...],
) -> tuple[tuple[int, ...], tuple[tuple[Box, Box], ...]]:
    """Sizes of what the rank at ``coord`` holds, and its ``(global box, local box)`` pairs; layers of a model repeat.

    Strided shards of uneven dimensions are cut in two ways (`cut_order`), which give different sizes where they
    disagree: that which gives ``local``, the sizes of the stored tensor, is taken; the first one if neither does.

    Raises:
        LayoutError: the placements do not fit the mesh or the shape.
    """
    first = _held(shape, sizes, coord, placements)
    if first[0] == local or not any(placement[0] == "strided" for placement in placements):
        return first
    order = cut_order(sizes, placements)
    axes = [axis for axis, _ in order]
    second = _held(shape, tuple(sizes[i] for i in axes), tuple(coord[i] for i in axes), tuple(one for _, one in order))
    return second if second[0] == local else first


def _held(
    shape: tuple[int, ...], sizes: tuple[int, ...], coord: tuple[int, ...], placements: tuple[PlacementSpec, ...]
) -> tuple[tuple[int, ...], tuple[tuple[Box, Box], ...]]:
    intervals = placement_intervals(shape, sizes, coord, placements)
    held = tuple(sum(stop - start for start, stop in pieces) for pieces in intervals)
    return held, tuple(interval_boxes(intervals)) if prod(held) else ()


def _mesh_sizes(mesh: object) -> tuple[int, ...]:
    """2.13 keeps a layout of axes, earlier releases the ranks as a tensor."""
    layout = _attribute(mesh, "_layout")
    axes = _attribute(layout, "axes")
    if isinstance(axes, (tuple, list)):
        shapes = [_lengths(_attribute(axis, "shape"), "shape of a mesh axis") for axis in axes]
        return tuple(prod(shape) for shape in shapes)
    if layout is not None and (shape := _attribute(layout, "shape")) is not None:
        return _lengths((shape,) if isinstance(shape, int) else shape, "shape of a mesh")
    ranks = _attribute(mesh, "mesh", _attribute(mesh, "_mesh"))
    if isinstance(ranks, TensorRef):
        return ranks.shape
    raise Unsupported("a DTensor whose device mesh is recorded in a way that is not known here")


def _coordinate(mesh: object, sizes: tuple[int, ...], rank: int | None) -> tuple[int, ...]:
    recorded = _attribute(mesh, "_coordinate_on_dim")
    if recorded is not None:
        return _lengths(recorded, "coordinate on a mesh")
    ranks = _attribute(mesh, "_flatten_rank_map")
    flat = tuple(ranks) if isinstance(ranks, (tuple, list)) else tuple(range(prod(sizes)))
    if rank not in flat or len(flat) != prod(sizes):
        raise Unsupported(f"a DTensor does not record its coordinate, and rank {rank} is not in its mesh of {sizes}")
    at = flat.index(rank)
    coord: list[int] = []
    for size in reversed(sizes):
        at, here = divmod(at, size)
        coord.append(here)
    return tuple(reversed(coord))


def _class_of(placement: object) -> str:
    return placement.cls.last if isinstance(placement, Stub) else type(placement).__name__


def _placement(placement: object) -> PlacementSpec:
    name = _class_of(placement)
    if name == "Replicate":
        return ("replicate",)
    if name in ("Shard", "_StridedShard"):
        dim, factor = _attribute(placement, "dim"), _attribute(placement, "split_factor", 1)
        if type(dim) is not int or type(factor) is not int:
            raise FormatError(f"a placement {name} without dim")
        return ("shard", dim) if name == "Shard" else ("strided", dim, factor)
    if name in ("Partial", "_Partial"):
        raise Unsupported("a DTensor placed Partial: each rank holds a summand, which no file layout can join")
    raise Unsupported(f"a DTensor placed {name}, which is not known here")


def _shard_order(placements: Sequence[PlacementSpec], shard_order: object) -> list[int]:
    """Mesh axes in the order in which they cut.

    Left to right, unless ``shard_order`` (2.10 and later) says otherwise for a dimension; strided shards already
    express the order by their split factors, and the record then repeats it.
    """
    order = list(range(len(placements)))
    for entry in shard_order if isinstance(shard_order, (tuple, list)) else ():
        mesh_dims = _attribute(entry, "mesh_dims")
        if mesh_dims is None and isinstance(entry, Stub) and len(entry.args) == 2:
            mesh_dims = entry.args[1]
        axes = [axis for axis in (mesh_dims or ()) if isinstance(axis, int) and 0 <= axis < len(placements)]
        if any(placements[axis][0] != "shard" for axis in axes):
            continue
        for slot, axis in zip(sorted(axes), axes, strict=True):
            order[slot] = axis
    return order


def _spelled(placements: Sequence[PlacementSpec]) -> str:
    return "(" + ", ".join(" ".join(map(str, p)) for p in placements) + ")"


# ------------------------------------------------------------------------------------------------------ ShardedTensor


def _sharded_tensor(node: WrapperRef) -> Placed:
    """``(local shards, metadata, process group state, sharding spec, ...)``, with explicit offsets."""
    state = node.state
    if not isinstance(state, tuple) or len(state) < 2 or not isinstance(state[0], (list, tuple)):
        raise FormatError(f"a ShardedTensor of shape {list(node.shape)} without local shards and metadata")
    shards, metadata = state[0], state[1]
    recorded = _attribute(metadata, "size")
    shape = node.shape if recorded is None else _lengths(recorded, "size of a ShardedTensor")
    pieces: list[Piece] = []
    dtypes = {_attribute(_attribute(metadata, "tensor_properties"), "dtype")} - {None}
    for shard in shards:
        tensor = _attribute(shard, "tensor")
        box, _ = _claim(_attribute(shard, "metadata"))
        if not isinstance(tensor, TensorRef) or tensor.shape != box.sizes:
            got = list(tensor.shape) if isinstance(tensor, TensorRef) else type(tensor).__name__
            raise FormatError(f"a shard of a ShardedTensor is {got}, its metadata says {list(box.sizes)}")
        if not Box.whole(shape).contains(box):
            raise FormatError(f"a shard {box} of a ShardedTensor lies outside its shape {list(shape)}")
        dtypes.add(tensor.dtype)
        if box.volume:
            pieces.append(Piece(box, Box.whole(box.sizes), tensor))
    dtypes = dtypes or {node.dtype}
    if len(dtypes) != 1:
        raise FormatError(f"a ShardedTensor of shape {list(shape)} names {counted(len(dtypes), 'dtype')}")
    claims = [_claim(entry) for entry in _attribute(metadata, "shards_metadata", ())]
    return Placed(
        dtype=_dtype(dtypes.pop()),
        shape=shape,
        pieces=tuple(pieces),
        kind="sharded_tensor",
        claims=tuple((rank, box) for box, rank in claims if rank is not None),
    )


def _claim(metadata: object) -> tuple[Box, int | None]:
    """Box and rank of a ``ShardMetadata``."""
    offsets = _lengths(_attribute(metadata, "shard_offsets"), "offsets of a shard")
    sizes = _lengths(_attribute(metadata, "shard_sizes"), "sizes of a shard")
    if len(offsets) != len(sizes):
        raise FormatError(f"a shard has offsets {list(offsets)} and sizes {list(sizes)}")
    rank = _attribute(_attribute(metadata, "placement"), "_rank")
    return Box(offsets, sizes), rank if type(rank) is int else None
