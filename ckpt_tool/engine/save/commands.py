"""What a rank tells its writer process, as records."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ckpt_tool.engine.save.arena import StagedBox, arrange
from ckpt_tool.engine.save.columns import HeldState, Names
from ckpt_tool.engine.save.wire import Message
from ckpt_tool.manifest.tables import IntArray
from ckpt_tool.records import dataclass

__all__ = ["SaveCommand", "Structure"]


@dataclass(frozen=True, eq=False)
class Structure:
    """What a rank holds, and in which order of memory each box is staged."""

    key: str
    held: HeldState
    names: bytes
    """`HeldState.names`, encoded."""
    strides: dict[int, tuple[int, ...]]
    """In elements, of boxes that are staged in another order than row-major."""

    def to_message(self) -> Message:
        """As the writer process gets it."""
        boxes = self.held.encoded()
        strides = [[row, list(each)] for row, each in self.strides.items()]
        return Message("structure", {"key": self.key, "n": len(self.names), "strides": strides}, self.names + boxes)

    @classmethod
    def from_message(cls, message: Message) -> Structure:
        """What ``to_message`` gave."""
        fields, body = message.fields, bytes(message.body)
        names = body[: fields["n"]]
        held = HeldState.decoded(Names.decoded(names), body[fields["n"] :])
        return cls(fields["key"], held, names, {row: tuple(each) for row, each in fields["strides"]})

    def staged(self, rows: IntArray | None, wanted: IntArray) -> list[StagedBox]:
        """Where the boxes ``wanted`` lie in an arena that holds ``rows`` (None for all boxes), one behind another."""
        held = self.held
        present = np.arange(len(held)) if rows is None else rows
        offsets, _ = arrange(held.nbytes[present])
        place = offsets[np.searchsorted(present, wanted)].tolist()
        ndim = [len(shape) for shape in held.names.shapes]
        itemsize = [kind.itemsize for kind in held.names.kinds]
        found = []
        for row, offset, tensor in zip(wanted.tolist(), place, held.tensor[wanted].tolist(), strict=True):
            sizes = tuple(held.sizes[row, : ndim[tensor]].tolist())
            nbytes = int(held.nbytes[row])
            found.append(StagedBox(offset, nbytes, sizes, itemsize[tensor], self.strides.get(row)))
        return found


@dataclass(frozen=True, slots=True)
class SaveCommand:
    """One save, staged."""

    number: int
    """Counts the saves of a job; the same on all ranks."""
    url: str
    format: str
    key: str
    """Of the structure."""
    arena: int
    is_partial: bool
    """Whether only assigned boxes and objects were staged, all otherwise."""
    timeout_s: float
    overwrite: bool
    durable: bool
    digests: bool | None
    """Whether each tensor's digest is taken on the way; None where that is cheap."""
    is_urgent: bool
    """Whether somebody waits for it."""
    objects: tuple[bytes, ...]
    error: dict[str, Any] | None = None
    """Why this rank could not stage; nothing else counts then."""

    def to_message(self) -> Message:
        """As the writer process gets it."""
        fields = {
            "number": self.number, "url": self.url, "format": self.format, "key": self.key, "arena": self.arena,
            "is_partial": self.is_partial, "timeout_s": self.timeout_s, "overwrite": self.overwrite,
            "durable": self.durable, "digests": self.digests, "is_urgent": self.is_urgent, "error": self.error,
            "lengths": [len(data) for data in self.objects],
        }  # fmt: skip
        return Message("save", fields, b"".join(self.objects))

    @classmethod
    def from_message(cls, message: Message) -> SaveCommand:
        """What ``to_message`` gave."""
        fields = dict(message.fields)
        objects = _cut(bytes(message.body), fields.pop("lengths"))
        return cls(**fields, objects=objects)


def _cut(data: bytes, lengths: Sequence[int]) -> tuple[bytes, ...]:
    ends = np.cumsum([0, *lengths]).tolist()
    return tuple(data[start:end] for start, end in pairwise(ends))
