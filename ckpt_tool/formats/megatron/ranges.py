"""A range is a run of elements of a stored item that belongs to a box of a tensor, in row-major order.

Ranges become boxes, and boxes rows of a chunk table that still name the item: where in the item a box begins is told by
the boxes before it, because the boxes of one item stand in the item's order and cover it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ckpt_tool.geometry.flat import flat_boxes_columns
from ckpt_tool.manifest.model import TensorMeta
from ckpt_tool.manifest.tables import ChunkTable, IntArray, TensorTable
from ckpt_tool.records import dataclass, field

__all__ = ["Ranges", "Rewriting"]


@dataclass(frozen=True, eq=False)
class Ranges:
    """One row per range; ``n`` rows, ``D`` dimensions of the tensors, padded behind."""

    chunk: IntArray  # int64[n], row of the item in the chunk table
    tensor: IntArray  # int64[n], row of the rewritten tensors
    start: IntArray  # int64[n], in elements of the box
    stop: IntArray  # int64[n]
    shape: IntArray  # int64[n, D], of the box
    shift: IntArray  # int64[n, D], where the box begins in the tensor


@dataclass
class Rewriting:
    """Tensors and chunks of a new table, over the items of an old one."""

    source: ChunkTable
    metas: list[TensorMeta] = field(default_factory=list)
    _chunk: list[IntArray] = field(default_factory=list)
    _tensor: list[IntArray] = field(default_factory=list)
    _offsets: list[IntArray] = field(default_factory=list)
    _sizes: list[IntArray] = field(default_factory=list)

    def add_tensor(self, meta: TensorMeta) -> int:
        """Row of a new tensor."""
        self.metas.append(meta)
        return len(self.metas) - 1

    def keep(self, tensor: int, rows: IntArray, ndim: int) -> None:
        """Chunks that are boxes of ``tensor`` as they are."""
        self._add(rows, np.full(len(rows), tensor), self.source.offsets[rows, :ndim], self.source.sizes[rows, :ndim])

    def cut(self, ranges: Ranges) -> None:
        """The boxes of ranges, those of one item in its order."""
        row, offsets, sizes, _ = flat_boxes_columns(ranges.start, ranges.stop, ranges.shape)
        self._add(ranges.chunk[row], ranges.tensor[row], offsets + ranges.shift[row], sizes)

    def extend(self, other: Rewriting) -> None:
        """Tensors and chunks of another rewriting of the same chunks, behind these."""
        self._tensor += [column + len(self.metas) for column in other._tensor]
        self.metas += other.metas
        self._chunk += other._chunk
        self._offsets += other._offsets
        self._sizes += other._sizes

    def tables(self) -> tuple[TensorTable, ChunkTable]:
        """The finished tables; chunks keep file, item, rank and flags of the ones that they are parts of."""
        tensors = TensorTable.from_records(self.metas)
        width = tensors.shape.shape[1]
        chunk = np.concatenate([*self._chunk, np.zeros(0, dtype=np.int64)])
        origin = self.source.take(chunk)
        chunks = ChunkTable.from_columns(
            tensor=np.concatenate([*self._tensor, np.zeros(0, dtype=np.int64)]),
            offsets=_stacked(self._offsets, width, fill=0),
            sizes=_stacked(self._sizes, width, fill=1),
            file=origin.file,
            offset=origin.offset,
            length=origin.length,
            rank=origin.rank,
            flags=origin.flags,
        )
        return tensors, chunks

    def _add(self, chunk: IntArray, tensor: npt.ArrayLike, offsets: IntArray, sizes: IntArray) -> None:
        self._chunk.append(chunk)
        self._tensor.append(np.asarray(tensor, dtype=np.int64))
        self._offsets.append(offsets)
        self._sizes.append(sizes)


def _stacked(blocks: Sequence[IntArray], width: int, *, fill: int) -> IntArray:
    """Blocks of fewer dimensions padded behind; of more cut, where padding is all that is lost."""
    rows = sum(len(block) for block in blocks)
    stacked = np.full((rows, width), fill, dtype=np.int64)
    at = 0
    for block in blocks:
        used = min(width, block.shape[1])
        stacked[at : at + len(block), :used] = block[:, :used]
        at += len(block)
    return stacked
