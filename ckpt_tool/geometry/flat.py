"""A flat range is a run of elements of a tensor in row-major order, as ZeRO and FSDP flat parameters cut them.

It is in general no box, but a short list of boxes. Flat positions count elements from the tensor's first one; boxes are
in global coordinates. Knows nothing of the buffers that such ranges are cut from.
"""

from __future__ import annotations

from math import prod

import numpy as np

from ckpt_tool.errors import LayoutError
from ckpt_tool.geometry.box import Box
from ckpt_tool.geometry.columns import BoolArray, Int64Array, boxes_from_columns
from ckpt_tool.sizes import counted

__all__ = ["flat_boxes", "flat_boxes_columns"]


def flat_boxes(start: int, stop: int, shape: tuple[int, ...]) -> list[Box]:
    """At most ``2 * ndim - 1`` disjoint boxes that hold exactly the flat range, in flat order.

    Each box is itself contiguous in row-major order. ``flat_boxes(0, prod(shape), shape) == [Box.whole(shape)]`` for a
    tensor that is not empty.

    >>> [str(box) for box in flat_boxes(2, 11, (3, 4))]
    ['[0:1, 2:4]', '[1:2, 0:4]', '[2:3, 0:3]']

    Raises:
        LayoutError: the range does not lie in the tensor.
    """
    _, offsets, sizes, _ = flat_boxes_columns(
        np.array([start], dtype=np.int64),
        np.array([stop], dtype=np.int64),
        np.array([shape], dtype=np.int64).reshape(1, len(shape)),
    )
    return boxes_from_columns(offsets, sizes)


def flat_boxes_columns(
    starts: Int64Array, stops: Int64Array, shape: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """`flat_boxes` of many ranges: ``(row int64[m], offsets int64[m, D], sizes int64[m, D], flat_start int64[m])``.

    ``shape`` is ``int64[n, D]``, each row one tensor, padded with trailing 1s (the boxes then have size 1 there). Rows
    of the result are sorted by input row, then by flat position; ``flat_start`` is the flat position in the tensor of a
    box's first element. Empty ranges give no rows. Cost: ``2 * D - 1`` passes over the ranges.

    Raises:
        LayoutError: a range does not lie in its tensor.
    """
    n_ranges, ndim = shape.shape
    _check_ranges(starts, stops, shape)
    if ndim == 0:
        rows = np.flatnonzero(stops > starts)
        nothing = np.zeros((len(rows), 0), dtype=np.int64)
        return rows, nothing, nothing.copy(), starts[rows]
    # Elements that one step along a dimension moves by; 1 stands for the 0 of empty tensors, which have no range.
    step = np.ones((n_ranges, ndim), dtype=np.int64)
    step[:, :-1] = np.cumprod(shape[:, :0:-1], axis=1)[:, ::-1]
    step = np.maximum(step, 1)

    # Climb from the last dimension to the first, filling up to the next whole step of the dimension above; then descend
    # with what is left. Each pass emits at most one box per range: dims before are single, dims behind are whole.
    climb = list(range(ndim - 1, -1, -1))
    passes = climb + climb[-2::-1]
    position = starts.copy()
    kept: list[BoolArray] = []
    begins: list[Int64Array] = []
    counts: list[Int64Array] = []
    for index, dim in enumerate(passes):
        end = stops - stops % step[:, dim]
        if index < ndim - 1:
            end = np.minimum(end, -(-position // step[:, dim - 1]) * step[:, dim - 1])
        count = np.maximum(end - position, 0) // step[:, dim]
        kept.append(count > 0)
        begins.append(position.copy())
        counts.append(count)
        position = position + count * step[:, dim]

    rows, which = np.nonzero(np.stack(kept, axis=1))
    flat_start = np.stack(begins, axis=1)[rows, which]
    count = np.stack(counts, axis=1)[rows, which]
    dims = np.array(passes, dtype=np.int64)[which][:, None]
    offsets = flat_start[:, None] // step[rows] % np.maximum(shape[rows], 1)
    columns = np.arange(ndim)
    sizes = np.where(columns < dims, 1, np.where(columns == dims, count[:, None], shape[rows]))
    return rows.astype(np.int64), offsets, sizes, flat_start


def _check_ranges(starts: Int64Array, stops: Int64Array, shape: Int64Array) -> None:
    numel = shape.prod(axis=1) if shape.shape[1] else np.ones(len(shape), dtype=np.int64)
    wrong = np.flatnonzero((starts < 0) | (stops < starts) | (stops > numel))
    if len(wrong):
        row = int(wrong[0])
        sizes = tuple(shape[row].tolist())
        raise LayoutError(
            f"flat range {int(starts[row]):,}:{int(stops[row]):,} does not lie in a tensor of shape {sizes} "
            f"with {counted(prod(sizes), 'element')}"
        )
