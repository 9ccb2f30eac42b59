"""What a rank tells its writer process, as records."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from ckpt_tool.engine.save.arena import StagedBox, arrange
from ckpt_tool.engine.save.assignment import Assigned
from ckpt_tool.engine.save.columns import HeldState, Names
from ckpt_tool.engine.save.wire import Message
from ckpt_tool.geometry.runs import contiguous_strides
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

    def order_of(self, row: int, sizes: Sequence[int]) -> tuple[int, ...] | None:
        """Strides of a box, or of a part of it with these ``sizes``, that is staged by itself; None for row-major."""
        strides = self.strides.get(row)
        if strides is None:
            return None
        packed, step = [0] * len(sizes), 1
        for _, dim in sorted((stride, dim) for dim, stride in enumerate(strides)):
            packed[dim] = step
            step *= sizes[dim]
        return tuple(packed)

    def staged(self, assigned: Assigned, *, is_partial: bool) -> list[StagedBox]:
        """Where the boxes to be written lie in an arena that holds them, or else all boxes, one behind another."""
        held, boxes = self.held, assigned.boxes
        starts = arrange(boxes.nbytes)[0] if is_partial else arrange(held.nbytes)[0][assigned.rows]
        ndim = [len(shape) for shape in held.names.shapes]
        itemsize = [kind.itemsize for kind in held.names.kinds]
        columns = (assigned.rows, starts, boxes.nbytes, boxes.tensor, boxes.sizes, held.sizes[assigned.rows])
        inner = boxes.offsets - held.offsets[assigned.rows]
        found = []
        for number, (row, start, nbytes, tensor, part, box) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            n, width = ndim[tensor], itemsize[tensor]
            sizes, whole = tuple(part[:n]), tuple(box[:n])
            if is_partial or sizes == whole:
                found.append(StagedBox(start, nbytes, sizes, width, self.order_of(row, sizes)))
                continue
            strides = self.strides.get(row, contiguous_strides(whole))
            begin = start + width * sum(
                at * stride for at, stride in zip(inner[number].tolist(), strides, strict=False)
            )
            is_run = strides == contiguous_strides(sizes)
            found.append(StagedBox(begin, nbytes, sizes, width, None if is_run else strides))
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
