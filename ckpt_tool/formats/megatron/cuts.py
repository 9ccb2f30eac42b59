"""A cut is how a weight is spread over tensor-parallel ranks, read off the boxes that its chunks are stored in.

Nothing is taken from names: a weight in one box is replicated, one in as many boxes as ranks is cut evenly, and one in
a multiple of that consists of parts that are cut one by one (gate and up of a gated MLP). Reads nothing.
"""

from __future__ import annotations

from math import prod

import numpy as np

from ckpt_tool.errors import LayoutError
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.tables import ChunkTable, TensorTable
from ckpt_tool.records import dataclass, field
from ckpt_tool.sizes import counted

__all__ = ["Local", "Weights"]


@dataclass(frozen=True, slots=True)
class Local:
    """One rank's part of a weight, as the rank holds it in memory."""

    key: str
    boxes: tuple[Box, ...]
    """Global boxes, leading dimensions of layer and expert included; row by row one after another they are the part."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return sum(box.volume for box in self.boxes)


@dataclass(frozen=True)
class Weights:
    """The weights of a checkpoint, with the chunks that they are stored in."""

    tensors: TensorTable
    """Named by their keys."""
    chunks: ChunkTable
    _known: dict[tuple[str, tuple[int, ...], int, int], Local] = field(default_factory=dict, repr=False)

    def local(self, key: str, lead: tuple[int, ...], rank: int, n_ranks: int) -> Local:
        """What tensor-parallel rank ``rank`` of ``n_ranks`` holds of one layer (and expert) of a weight.

        Args:
            key: the weight.
            lead: indices of its leading dimensions: ``(layer,)``, ``(layer, expert)``, or none.
            rank: tensor-parallel rank.
            n_ranks: tensor-parallel size.

        Raises:
            LayoutError: the stored boxes are not those of an even cut.
        """
        known = (key, lead, rank, n_ranks)
        if known not in self._known:
            self._known[known] = self._local(key, lead, rank, n_ranks)
        return self._known[known]

    def _local(self, key: str, lead: tuple[int, ...], rank: int, n_ranks: int) -> Local:
        row = self.tensors.index[key]
        shape = self.tensors.shape_of(row)
        n_lead = len(lead)
        whole = Box((*lead, *(0,) * (len(shape) - n_lead)), ((1,) * n_lead + shape[n_lead:]))
        if n_ranks == 1:
            return Local(key, (whole,))
        rows = self.chunks.rows_of(row)
        rows = rows[(self.chunks.offsets[rows, :n_lead] == lead).all(axis=1)]
        bounds = [sorted(set(self.chunks.offsets[rows, dim].tolist())) for dim in range(n_lead, len(shape))]
        cut = [dim for dim, starts in enumerate(bounds, start=n_lead) if len(starts) > 1]
        if not cut:
            return Local(key, (whole,))
        starts = bounds[cut[0] - n_lead]
        sizes = np.diff([*starts, shape[cut[0]]]).tolist()
        n_parts, left = divmod(len(starts), n_ranks)
        parts = [sizes[part * n_ranks : (part + 1) * n_ranks] for part in range(n_parts)]
        if left or len(cut) > 1 or any(len(set(part)) > 1 for part in parts) or (n_parts > 1 and cut[0] != n_lead):
            raise LayoutError(
                f"{key!r} is stored in boxes of {sizes} along dimension {cut[0]}, which are not "
                f"{counted(n_ranks, 'equal part')}"
            )
        boxes = []
        for part in range(n_parts):
            piece = part * n_ranks + rank
            offsets, lengths = list(whole.offsets), list(whole.sizes)
            offsets[cut[0]], lengths[cut[0]] = starts[piece], sizes[piece]
            boxes.append(Box(tuple(offsets), tuple(lengths)))
        return Local(key, tuple(boxes))

    def numel(self, key: str, n_lead: int) -> int:
        """Elements of one layer (and expert) of a weight."""
        return prod(self.tensors.shape_of(self.tensors.index[key])[n_lead:])
