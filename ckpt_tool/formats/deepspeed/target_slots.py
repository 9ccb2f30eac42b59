"""A slot is one tensor of a target's files (a vector, a weight, a fragment), and the boxes that fill it.

Boxes come out of a request again as they went in, in any order: a box and its rank tell its slot.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ckpt_tool.errors import LayoutError
from ckpt_tool.formats.base import BoxTable
from ckpt_tool.geometry.columns import Int64Array
from ckpt_tool.manifest.tables import TensorTable
from ckpt_tool.records import dataclass, field
from ckpt_tool.sizes import counted

__all__ = ["FilledSlots", "SlotBuilder", "Slots"]


@dataclass(frozen=True)
class Slots:
    """Columns: boxes with their slots and places."""

    boxes: BoxTable
    slot: Int64Array  # int64[n]
    position: Int64Array  # int64[n], element of the slot at which the box begins
    numbers: Mapping[Hashable, int]
    """By key."""

    def filled(self, boxes: BoxTable, tensors: TensorTable) -> FilledSlots:
        """The slots with the rows of a request that holds the same boxes.

        Raises:
            LayoutError: it holds others.
        """
        own, given = _order(self.boxes), _order(boxes)
        if len(own) != len(given) or any(
            not np.array_equal(mine[own], other[given])
            for mine, other in zip(_columns(self.boxes), _columns(boxes), strict=True)
        ):
            raise LayoutError(
                f"{counted(len(given), 'box', 'are')} not the {len(own):,} that the target's ranks store",
                where=tensors.fqns[int(boxes.tensor[0])] if len(boxes) else "",
            )
        row = np.empty(len(own), dtype=np.int64)
        row[own] = given
        order = np.lexsort((self.position, self.slot))
        bounds = np.searchsorted(self.slot[order], np.arange(len(self.numbers) + 1))
        return FilledSlots(row[order], self.position[order], bounds, self.numbers)


@dataclass(frozen=True)
class FilledSlots:
    """Rows of a request by slot, in the order of their place."""

    row: Int64Array
    position: Int64Array
    bounds: npt.NDArray[np.intp]
    numbers: Mapping[Hashable, int]

    def of(self, key: Hashable) -> tuple[Int64Array, Int64Array]:
        """Rows and positions of one slot; nothing for one without boxes."""
        number = self.numbers.get(key)
        if number is None:
            return self.row[:0], self.position[:0]
        own = slice(self.bounds[number], self.bounds[number + 1])
        return self.row[own], self.position[own]


@dataclass
class SlotBuilder:
    """Slots under construction."""

    width: int
    """Dimensions of the request's boxes."""
    _blocks: list[tuple[Int64Array, Int64Array, Int64Array, Int64Array, int, Int64Array]] = field(default_factory=list)
    _numbers: dict[Hashable, int] = field(default_factory=dict)

    def add(
        self,
        key: Hashable,
        rank: int,
        tensor: Int64Array,
        offsets: Int64Array,
        sizes: Int64Array,
        position: Int64Array,
    ) -> None:
        """Boxes of a slot, none of them empty."""
        if len(tensor):
            number = self._numbers.setdefault(key, len(self._numbers))
            slot = np.full(len(tensor), number, dtype=np.int64)
            self._blocks.append((tensor, offsets, sizes, position, rank, slot))

    def add_whole(self, keys: Sequence[Hashable], rank: int, tensor: Int64Array, shape: Int64Array) -> None:
        """A new slot for each of ``tensor``, which it holds whole; those without elements have none."""
        kept = np.flatnonzero((shape > 0).all(axis=1))
        if not len(kept):
            return
        first = len(self._numbers)
        self._numbers.update({keys[row]: first + number for number, row in enumerate(kept.tolist())})
        slot = np.arange(first, len(self._numbers), dtype=np.int64)
        nothing = np.zeros(len(kept), dtype=np.int64)
        self._blocks.append((tensor[kept], np.zeros_like(shape[kept]), shape[kept], nothing, rank, slot))

    def slots(self) -> Slots:
        """All that was added."""
        blocks = self._blocks
        nothing = np.zeros(0, dtype=np.int64)
        boxes = BoxTable(
            tensor=np.concatenate([nothing, *(own[0] for own in blocks)]).astype(np.int32),
            offsets=np.concatenate(
                [np.zeros((0, self.width), np.int64), *(self._widened(own[1], 0) for own in blocks)]
            ),
            sizes=np.concatenate([np.zeros((0, self.width), np.int64), *(self._widened(own[2], 1) for own in blocks)]),
            rank=np.concatenate([nothing, *(np.full(len(own[0]), own[4]) for own in blocks)]).astype(np.int32),
        )
        position = np.concatenate([nothing, *(own[3] for own in blocks)])
        slot = np.concatenate([nothing, *(own[5] for own in blocks)])
        return Slots(boxes, slot, position, self._numbers)

    def _widened(self, columns: Int64Array, fill: int) -> Int64Array:
        found = np.full((len(columns), self.width), fill, dtype=np.int64)
        found[:, : columns.shape[1]] = columns[:, : self.width]
        return found


def _columns(boxes: BoxTable) -> list[Int64Array]:
    columns = [boxes.rank.astype(np.int64), boxes.tensor.astype(np.int64)]
    return columns + [table[:, dim] for table in (boxes.offsets, boxes.sizes) for dim in range(table.shape[1])]


def _order(boxes: BoxTable) -> npt.NDArray[np.intp]:
    return np.lexsort(tuple(_columns(boxes)))
