"""Formats that the ranks of a job write together: each its own files, and one of them what joins the parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from ckpt_tool.formats.base import BoxTable, Segment, Writer
from ckpt_tool.manifest.model import FileRange, KeyPath
from ckpt_tool.manifest.tables import IntArray, TensorTable
from ckpt_tool.records import dataclass, field

__all__ = ["Entry", "Joined", "JointWriter", "PlacedObject", "PlainEntries", "RankLayOut"]


@dataclass(frozen=True, slots=True)
class PlacedObject:
    """An object that is not a tensor, where a rank has put it: a whole torch.save zip."""

    fqn: str
    path: KeyPath
    where: FileRange


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a live state, by which a format tells where it keeps it."""

    path: KeyPath
    """Its name."""
    keys: tuple[Any, ...]
    """Keys as the state has them, of any class, positions in lists among them."""
    is_tensor: bool
    is_named: bool
    """Whether the state itself names it (Megatron's wrappers do): ``path`` is that name, ``keys`` play no part."""


class PlainEntries:
    """How most formats keep the entries of a state: each by itself."""

    def holder(self, entry: Entry, rank: int, world_size: int) -> tuple[KeyPath, tuple[Any, ...]] | None:
        """The object that an entry is a part of, and its keys in there; None for one that stands by itself.

        Args:
            entry: of the state of one rank.
            rank: its number.
            world_size: number of ranks.
        """
        del entry, rank, world_size
        return None

    def as_object(self, value: Any) -> Any:
        """What is saved of an object's value."""
        return value


@dataclass(frozen=True)
class RankLayOut:
    """What one rank writes of a checkpoint that ranks write together; it does not depend on the other ranks.

    The start of a file, and head, payload and rear of its boxes, in their order, fill it from its first byte to its
    last; objects go behind.
    """

    files: Mapping[str, int]
    """Path and size of each file, without objects."""
    paths: tuple[str, ...]
    """Path of each box's file."""
    order: IntArray
    """int64[n]: rows of the boxes as they lie one behind another, those of a file together."""
    heads: Sequence[bytes]
    """What comes right before the payload of each box."""
    rear: Callable[[int, int], bytes]
    """What comes right behind it, given the box's row and the CRC-32 of its payload."""
    object_path: Callable[[KeyPath], str]
    """The file behind whose end an object goes, by the object's keys."""
    starts: Mapping[str, bytes] = field(default_factory=dict)
    """What comes before the first box of a file."""


@dataclass(frozen=True)
class Joined:
    """The parts of all ranks as one checkpoint."""

    fqns: tuple[str | None, ...]
    """What the format's reader calls each tensor; None for one that it shows as parts of others."""
    last: Callable[[Sequence[PlacedObject], Mapping[str, int]], tuple[Segment, ...]]
    """The files that make it one, given the objects of all ranks and the sizes of their files: the last one's last."""


@runtime_checkable
class JointWriter(Writer, Protocol):
    """A writer of a format that ranks can write each for itself, if one of them joins the parts in the end."""

    commit_path: str
    """The file that makes the parts a checkpoint."""

    def holder(self, entry: Entry, rank: int, world_size: int) -> tuple[KeyPath, tuple[Any, ...]] | None:
        """See `PlainEntries`."""
        ...

    def as_object(self, value: Any) -> Any:
        """See `PlainEntries`."""
        ...

    def lay_out_rank(self, tensors: TensorTable, boxes: BoxTable, rank: int, world_size: int) -> RankLayOut:
        """The files of one rank.

        Args:
            tensors: at least those that the rank has boxes of.
            boxes: what the rank stores; tensors without elements have one empty box.
            rank: its number.
            world_size: number of ranks.

        Raises:
            Unsupported: dtypes that the format cannot hold.
        """
        ...

    def join(self, tensors: TensorTable, boxes: BoxTable, world_size: int) -> Joined:
        """What makes the files of all ranks one checkpoint.

        Args:
            tensors: those of all ranks, in the order in which the state is to be rebuilt.
            boxes: those of all ranks, of each rank in the order that it was given to `lay_out_rank`.
            world_size: number of ranks.

        Raises:
            LayoutError: two boxes of a tensor begin at the same place.
        """
        ...
