"""Optimizer state as flattened ranges, for a checkpoint that mcore up to 0.14 is to load.

A tensor cut into a grid of equal boxes is one of the grid's shape with one more dimension, the elements of a box; the
payload is the same. The inverse of ``flattened``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ckpt_tool.formats.base import BoxTable
from ckpt_tool.manifest.model import KeyPath
from ckpt_tool.manifest.tables import IntArray, TensorTable

__all__ = ["as_ranges"]


def as_ranges(
    tensors: TensorTable, boxes: BoxTable, paths: Sequence[KeyPath]
) -> tuple[TensorTable, BoxTable, Mapping[int, tuple[int, ...]]]:
    """Tensors and boxes with optimizer state flattened, and the shapes that it had, by row.

    Args:
        tensors: with the shapes of the weights.
        boxes: equal ones for each tensor, that tile it.
        paths: keys of the tensors.
    """
    rows = [row for row, path in enumerate(paths) if path[:2] == ("optimizer", "state") and tensors.ndim[row]]
    is_state = np.zeros(len(tensors), dtype=np.bool_)
    is_state[rows] = True
    width = boxes.sizes.shape[1]
    offsets: IntArray = np.pad(boxes.offsets, ((0, 0), (0, 1)))
    sizes: IntArray = np.pad(boxes.sizes, ((0, 0), (0, 1)), constant_values=1)
    chosen = np.flatnonzero(is_state[boxes.tensor])
    ndim = tensors.ndim[boxes.tensor[chosen]].astype(np.int64)
    own = np.maximum(boxes.sizes[chosen], 1)
    offsets[chosen, :width] = boxes.offsets[chosen] // own
    sizes[chosen] = 1
    sizes[chosen, ndim] = np.prod(boxes.sizes[chosen], axis=1)
    shape: IntArray = np.pad(tensors.shape, ((0, 0), (0, 1)), constant_values=1)
    firsts = np.full(len(tensors), -1, dtype=np.int64)
    firsts[boxes.tensor[chosen[::-1]]] = chosen[::-1]
    before = {row: tensors.shape_of(row) for row in rows if firsts[row] >= 0}
    for row, known in before.items():
        box = boxes.sizes[firsts[row], : len(known)]
        shape[row, : len(known)] = np.array(known, dtype=np.int64) // np.maximum(box, 1)
        shape[row, len(known)] = int(np.prod(box))
    ndims = tensors.ndim.copy()
    ndims[list(before)] += 1
    flat = replace(tensors, shape=shape, ndim=ndims)
    return flat, BoxTable(boxes.tensor, offsets, sizes, boxes.rank), before
