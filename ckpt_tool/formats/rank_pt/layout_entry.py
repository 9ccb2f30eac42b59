"""The layout entry is what our own rank files say about themselves, under the key ``__ckpt_layout__``.

A plain dict, so that ``torch.load(weights_only=True)`` reads it::

    {
        "version": 1,
        "rank": 3,
        "world_size": 4,
        "mesh_axes": ["dp", "tp"],
        "mesh_sizes": [2, 2],
        "coord": [1, 1],
        "tensors": [{"entry": "w", "fqn": "w", "path": ["w"], "shape": [8, 4], "offsets": [4, 0]}, ...],
    }

``entry`` is the dotted name of a local piece in the file, ``fqn`` and ``path`` those of the tensor that it is a box of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

from ckpt_tool.errors import FormatError
from ckpt_tool.formats._pickle.tensors import TensorRef
from ckpt_tool.formats._torch_file.assemble import Part
from ckpt_tool.formats._torch_file.entries import Entry
from ckpt_tool.formats._torch_file.placed import Piece, Placed, whole
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.model import KeyPath, MeshInfo
from ckpt_tool.records import dataclass

__all__ = ["LAYOUT_KEY", "LayoutEntry", "describe_layout", "parse_layout"]

LAYOUT_KEY = "__ckpt_layout__"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class LayoutEntry:
    """The layout entry of one rank file."""

    rank: int
    world_size: int
    mesh: MeshInfo | None
    pieces: Mapping[str, tuple[str, KeyPath, tuple[int, ...], tuple[int, ...]]]
    """By entry: fqn and path of the tensor, its global shape, and the offsets of the piece."""

    def place(self, part: Part, entry: Entry) -> list[tuple[str, KeyPath, Placed]]:
        """Where one entry of the file belongs.

        Raises:
            FormatError: the piece does not lie in its tensor.
        """
        where = self.pieces.get(entry.fqn)
        if not isinstance(entry.value, TensorRef):
            raise FormatError("a wrapper class in a rank file with a layout", where=f"{part.where}: {entry.fqn}")
        if where is None:
            return [(entry.fqn, entry.path, whole(entry.value))]
        fqn, path, shape, offsets = where
        tensor = entry.value
        if len(tensor.shape) != len(offsets) or not Box.whole(shape).contains(Box(offsets, tensor.shape)):
            raise FormatError(
                f"a piece {list(tensor.shape)} at {list(offsets)} does not lie in {list(shape)}",
                where=f"{part.where}: {entry.fqn}",
            )
        box = Box(offsets, tensor.shape)
        pieces = (Piece(box, Box.whole(tensor.shape), tensor),) if box.volume else ()
        return [(fqn, path, Placed(tensor.dtype, shape, pieces, "layout", self.mesh, self.rank))]


def parse_layout(value: object, where: str) -> LayoutEntry:
    """The layout entry of a file's dict.

    Raises:
        FormatError: it is of another version, or not what a version 1 holds.
    """
    if not isinstance(value, dict) or value.get("version") != _VERSION:
        raise FormatError(f"{LAYOUT_KEY} of an unknown version, expected {_VERSION}", where=where)
    try:
        axes, sizes = [str(axis) for axis in value["mesh_axes"]], _numbers(value["mesh_sizes"])
        pieces: dict[str, tuple[str, KeyPath, tuple[int, ...], tuple[int, ...]]] = {}
        for piece in value["tensors"]:
            path = tuple(key if isinstance(key, int) else str(key) for key in piece["path"])
            pieces[str(piece["entry"])] = (
                str(piece["fqn"]), path, _numbers(piece["shape"]), _numbers(piece["offsets"])
            )  # fmt: skip
        (rank, world_size) = _numbers([value["rank"], value["world_size"]])
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{LAYOUT_KEY} lacks or garbles {error}", where=where) from error
    mesh = MeshInfo(tuple(axes), sizes, f"recorded in {LAYOUT_KEY}") if axes and len(axes) == len(sizes) else None
    return LayoutEntry(rank, world_size, mesh, pieces)


def describe_layout(
    rank: int,
    world_size: int,
    mesh_axes: Sequence[str],
    mesh_sizes: Sequence[int],
    pieces: Iterable[tuple[str, str, KeyPath, tuple[int, ...], tuple[int, ...]]],
) -> dict[str, Any]:
    """The layout entry of a file; ``pieces`` are (entry, fqn, path, global shape, offsets).

    Ranks count row-major over the mesh, the last axis fastest; ``coord`` is empty when the mesh is not of that size.
    """
    coord: list[int] = []
    if mesh_sizes and prod(mesh_sizes) == world_size:
        left = rank
        for size in reversed(mesh_sizes):
            left, here = divmod(left, size)
            coord.insert(0, here)
    return {
        "version": _VERSION,
        "rank": rank,
        "world_size": world_size,
        "mesh_axes": list(mesh_axes),
        "mesh_sizes": list(mesh_sizes),
        "coord": coord,
        "tensors": [
            {"entry": entry, "fqn": fqn, "path": list(path), "shape": list(shape), "offsets": list(offsets)}
            for entry, fqn, path, shape, offsets in pieces
        ],
    }


def _numbers(values: Any) -> tuple[int, ...]:
    numbers = tuple(values)
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("a list of sizes")
    return numbers
