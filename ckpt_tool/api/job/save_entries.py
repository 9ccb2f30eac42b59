"""What of a state is staged as tensors, and what is saved as objects, in the way of a format.

Most formats keep each value by itself; some have one object for many, with small tensors among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ckpt_tool.engine.save.commands import Structure
from ckpt_tool.errors import Unsupported
from ckpt_tool.formats.joint import Entry, JointWriter
from ckpt_tool.manifest.model import KeyPath
from ckpt_tool.records import dataclass

if TYPE_CHECKING:
    from ckpt_tool.frameworks.held import Held, HeldTensor

__all__ = ["Entries", "Staged", "entries_of"]


@dataclass(slots=True)
class Staged:
    """What the arenas are filled with."""

    structure: Structure
    views: list[Any]
    objects: list[Any]


@dataclass(frozen=True, slots=True)
class _Object:
    """One object, and where what it is made of stands."""

    path: KeyPath
    parts: tuple[tuple[tuple[Any, ...], int], ...]
    """Keys in the object, and number of the part: views first, then values."""


@dataclass(frozen=True, slots=True)
class Entries:
    """How the entries of one structure are kept."""

    structure: Structure
    objects: tuple[_Object, ...]
    staged: tuple[int, ...]
    """Numbers of the views that are staged as tensors."""
    writer: JointWriter

    def of(self, views: Sequence[Any], values: Sequence[Any]) -> Staged:
        """Memory and values of a state of this structure, as they are kept."""
        from ckpt_tool.frameworks.held import nested

        n = len(views)

        def part(number: int) -> Any:
            return values[number - n] if number >= n else views[number].detach().cpu().clone()

        objects = [
            self.writer.as_object(nested([(keys, part(number)) for keys, number in each.parts]))
            for each in self.objects
        ]
        return Staged(self.structure, [views[row] for row in self.staged], objects)


def entries_of(writer: JointWriter, held: Held, extra: Sequence[KeyPath], rank: int, world_size: int) -> Entries:
    """How a format keeps what a rank holds, and the objects ``extra`` of its own behind that.

    Raises:
        Unsupported: a tensor that the format has in an object is not whole.
    """
    from ckpt_tool.engine.save.staging import structure_of

    tensors: list[tuple[KeyPath, str, tuple[int, ...]]] = []
    boxes: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
    staged: list[int] = []
    made: dict[KeyPath, list[tuple[tuple[Any, ...], int]]] = {}
    n_views = 0
    views = [part.view for tensor in held.tensors for part in tensor.parts]
    for tensor in held.tensors:
        place = writer.holder(
            Entry(tensor.path, tensor.keys, is_tensor=True, is_named=tensor.is_named), rank, world_size
        )
        if place is not None:
            _check_whole(tensor)
            made.setdefault(place[0], []).append((place[1], n_views))
        else:
            boxes += [(len(tensors), part.box.offsets, part.box.sizes) for part in tensor.parts]
            staged += range(n_views, n_views + len(tensor.parts))
            tensors.append((tensor.path, tensor.dtype, tensor.shape))
        n_views += len(tensor.parts)
    values = [Entry(each.path, each.keys, is_tensor=False, is_named=each.is_named) for each in held.values]
    values += [Entry(path, path, is_tensor=False, is_named=False) for path in extra]
    for number, entry in enumerate(values):
        path, keys = writer.holder(entry, rank, world_size) or (entry.path, ())
        made.setdefault(path, []).append((keys, n_views + number))
    structure = structure_of(tensors, boxes, [views[row] for row in staged], list(made), writer.name)
    objects = tuple(_Object(path, tuple(parts)) for path, parts in made.items())
    return Entries(structure, objects, tuple(staged), writer)


def _check_whole(tensor: HeldTensor) -> None:
    if len(tensor.parts) == 1 and tensor.parts[0].box.sizes == tensor.shape:
        return
    raise Unsupported(
        "the format has this tensor in an object of each rank, whole; here it is cut into boxes",
        where=".".join(map(str, tensor.path)),
        hint='leave it out, or save as "dcp" or "safetensors"',
    )
