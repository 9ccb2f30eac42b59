"""How long items are: of very many boxes at once, from few items that are really laid out.

An item's head is a pickle of fixed parts and numbers, whose opcodes are as wide as the numbers; behind the payload
comes padding by its length, and the rest is always the same. So boxes of one class (dtype, length of the pickle,
payload modulo the alignment) have equal surroundings, and one item of each class tells how long they are.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ckpt_tool.formats._dcp.written_items import ItemKinds
from ckpt_tool.formats.base import BoxTable
from ckpt_tool.geometry.columns import distinct
from ckpt_tool.geometry.overlaps import first_equal
from ckpt_tool.geometry.runs import contiguous_strides_columns
from ckpt_tool.manifest.tables import IntArray, TensorTable

__all__ = ["item_lengths"]

_ALIGNMENT = 64
_MAX_NDIM = 64
_WIDE_NBYTES = (1 << 32) - (1 << 16)
"""Payloads from here on may need wide zip records: they are laid out one by one."""


def item_lengths(tensors: TensorTable, boxes: BoxTable) -> tuple[IntArray, IntArray, IntArray]:
    """``(item, head, payload)``, bytes of each box's item, of what stands in it before the payload, and of that.

    Cost: an item laid out for each class, tens to hundreds; the rest is columns, for each run of equally large boxes of
    a tensor one row.
    """
    is_new = np.ones(len(boxes), dtype=np.bool_)
    is_new[1:] = boxes.tensor[1:] != boxes.tensor[:-1]
    for column in boxes.sizes.T:
        is_new[1:] |= column[1:] != column[:-1]
    first = np.flatnonzero(is_new)
    counts = np.diff(np.append(first, len(boxes)))
    item, head, payload = _lengths(tensors, boxes.tensor[first], boxes.sizes[first])
    return np.repeat(item, counts), np.repeat(head, counts), np.repeat(payload, counts)


def _lengths(
    tensors: TensorTable, tensor: npt.NDArray[np.int32], sizes: IntArray
) -> tuple[IntArray, IntArray, IntArray]:
    _, kind_of_tensor = tensors.kinds
    numel = np.prod(sizes, axis=1, dtype=np.int64)
    payload = (numel * tensors.bits[tensor] + 7) // 8
    kind, ndim = kind_of_tensor[tensor], tensors.ndim[tensor].astype(np.int64)
    around, head = np.empty((2, len(tensor)), dtype=np.int64)
    shape = first_equal([kind * (_MAX_NDIM + 1) + ndim, *sizes.T])
    own = np.flatnonzero(shape == np.arange(len(tensor)))
    small = np.where(payload[own] < _WIDE_NBYTES, payload[own] % _ALIGNMENT, payload[own])
    numbers = _numbers_nbytes(sizes[own], ndim[own], numel[own], payload[own])
    of_class = own[first_equal([kind[own], ndim[own], numbers, small, (payload[own] == 0).astype(np.int64)])]
    kinds = ItemKinds()
    for row in distinct(of_class).tolist():
        laid_out = kinds.kind(tensors.dtypes[tensor[row]], tuple(sizes[row, : ndim[row]].tolist()))
        around[row], head[row] = laid_out.nbytes - laid_out.payload_nbytes, len(laid_out.head)
    around[own], head[own] = around[of_class], head[of_class]
    return around[shape] + payload, head[shape], payload


def _numbers_nbytes(sizes: IntArray, ndim: IntArray, numel: IntArray, payload: IntArray) -> IntArray:
    """int64[n]: bytes that the numbers of each item's pickle take: sizes, strides, and the storage's length."""
    is_dim = np.arange(sizes.shape[1]) < ndim[:, None]
    each = np.where(is_dim, _number_nbytes(sizes) + _number_nbytes(contiguous_strides_columns(sizes)), 0)
    # A storage of bytes counts these, others count elements; to tell them apart is not needed, both belong to the key.
    total: IntArray = each.sum(axis=1) * 256 + _number_nbytes(numel) * 16 + _number_nbytes(payload)
    return total


def _number_nbytes(numbers: IntArray) -> IntArray:
    """Bytes of the opcode of each number from 0 (protocol 2): one, two or four bytes, else as many as it needs."""
    nbytes = np.full(numbers.shape, 5, dtype=np.int64)
    nbytes[numbers < 1 << 16] = 3
    nbytes[numbers < 1 << 8] = 2
    for width in range(5, 9):
        nbytes[numbers >= 1 << (8 * width - 9)] = 2 + width
    return nbytes
