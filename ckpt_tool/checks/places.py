"""A place is the index of an element in its tensor, found from where it lies in the bytes of its chunk.

Positions count elements from a chunk's lowest address. Knows no file.
"""

from __future__ import annotations

import numpy as np

from ckpt_tool.geometry.columns import BoolArray, Int64Array
from ckpt_tool.geometry.runs import contiguous_strides
from ckpt_tool.manifest.tables import ChunkTable

__all__ = ["global_indices", "is_packed", "packed_columns", "strides_of"]


def packed_columns(sizes: Int64Array) -> Int64Array:
    """``int64[n, D]``: row-major strides, in elements, of packed boxes of these sizes."""
    strides = np.ones_like(sizes)
    if sizes.shape[1] > 1:
        strides[:, :-1] = np.cumprod(np.maximum(sizes[:, :0:-1], 1), axis=1)[:, ::-1]
    return strides


def is_packed(chunks: ChunkTable, rows: Int64Array) -> BoolArray:
    """bool[n]: whether chunks are stored row-major without gaps."""
    if chunks.strides is None:
        return np.ones(len(rows), dtype=np.bool_)
    sizes = chunks.sizes[rows]
    packed: BoolArray = ((chunks.strides[rows] == packed_columns(sizes)) | (sizes == 1)).all(axis=1)
    return packed


def strides_of(chunks: ChunkTable, row: int, ndim: int) -> tuple[int, ...]:
    """Strides of one chunk in elements."""
    if chunks.strides is None:
        return contiguous_strides(tuple(chunks.sizes[row, :ndim].tolist()))
    return tuple(chunks.strides[row, :ndim].tolist())


def global_indices(chunks: ChunkTable, row: int, ndim: int, positions: Int64Array) -> tuple[Int64Array, BoolArray]:
    """``(int64[n, ndim], bool[n])``: global index of each position, and whether an element of the box is there.

    Positions between the elements of a strided chunk are none. Dimensions are told apart by stride, largest first,
    which is right for every view whose elements are distinct.
    """
    sizes = chunks.sizes[row, :ndim].tolist()
    strides = strides_of(chunks, row, ndim)
    index = np.zeros((len(positions), ndim), dtype=np.int64)
    rest = positions.copy()
    for dim in sorted(range(ndim), key=lambda d: -abs(strides[d])):
        step = abs(strides[dim])
        if step == 0 or sizes[dim] == 1:
            continue
        index[:, dim] = np.minimum(rest // step, sizes[dim] - 1)
        rest -= index[:, dim] * step
        if strides[dim] < 0:
            index[:, dim] = sizes[dim] - 1 - index[:, dim]
    return index + chunks.offsets[row, :ndim], rest == 0
