"""Many short ranges read with few requests: neighbours are read together where a request costs more than the gap.

Knows stores and ranges, not what is in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ckpt_tool.manifest.model import FileRange
from ckpt_tool.manifest.tables import IntArray
from ckpt_tool.storage.store import ReadCost, Store

__all__ = ["merge", "read_merged"]

BATCH_NBYTES = 64 << 20
"""Bytes of requests that are held at once."""


def merge(file: IntArray, offset: IntArray, length: IntArray, cost: ReadCost) -> tuple[IntArray, IntArray, IntArray]:
    """``(order, starts, ends)``: rows by file and offset, where in that order requests begin, and their last bytes.

    Request ``r`` covers the rows ``order[starts[r]:starts[r + 1]]`` and ends at byte ``ends[r]``; ``starts`` has one
    number more than there are requests. No request is longer than ``cost.max_read_bytes`` unless a single range is.

    >>> cost = ReadCost(max_gap_bytes=10, max_read_bytes=100, concurrency=1)
    >>> merge(np.array([0, 0, 0]), np.array([50, 0, 15]), np.array([5, 10, 5]), cost)[1].tolist()
    [0, 2, 3]
    """
    order = np.lexsort((offset, file))
    starts, ends = [0], []
    current_file, start, end = -1, 0, 0
    limit, gap = cost.max_read_bytes, cost.max_gap_bytes
    columns = (file[order].tolist(), offset[order].tolist(), length[order].tolist())
    for position, (this_file, this_offset, this_length) in enumerate(zip(*columns, strict=True)):
        this_end = this_offset + this_length
        joins = this_file == current_file and this_offset - end <= gap and max(end, this_end) - start <= limit
        if not joins:
            if position:
                starts.append(position)
                ends.append(end)
            current_file, start, end = this_file, this_offset, this_end
        elif this_end > end:
            end = this_end
    if len(order):
        starts.append(len(order))
        ends.append(end)
    return order.astype(np.int64), np.array(starts, dtype=np.int64), np.array(ends, dtype=np.int64)


def read_merged(
    store: Store, paths: Sequence[str], file: IntArray, offset: IntArray, length: IntArray
) -> Iterator[tuple[int, memoryview]]:
    """Each row with its bytes, in the order of files and offsets; ``file`` counts in ``paths``.

    At most one request per row, ``store.cost.concurrency`` at once; at most ``BATCH_NBYTES`` (or one request, if that
    is longer) are held.
    """
    order, starts, ends = merge(file, offset, length, store.cost)
    rows, offsets, lengths, files = order.tolist(), offset.tolist(), length.tolist(), file.tolist()
    bounds = starts.tolist()
    requests = [
        FileRange(paths[files[row]], offsets[row], end - offsets[row])
        for row, end in zip((rows[first] for first in bounds[:-1]), ends.tolist(), strict=True)
    ]
    begin = 0
    while begin < len(requests):
        stop, held = begin + 1, requests[begin].length
        while stop < len(requests) and held + requests[stop].length <= BATCH_NBYTES:
            held += requests[stop].length
            stop += 1
        for number, data in enumerate(store.fetch(requests[begin:stop]), start=begin):
            view, base = memoryview(data), requests[number].offset
            for row in rows[bounds[number] : bounds[number + 1]]:
                place = offsets[row] - base
                yield row, view[place : place + lengths[row]]
        begin = stop
