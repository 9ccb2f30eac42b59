"""A block is a stretch of a file read at once; a span is a byte range that someone wants to see all of, in pieces.

Spans may overlap, nest and repeat: every byte that any of them wants is read once, and each block is handed over with
the parts of the spans that lie in it. Knows no tensor.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ckpt_tool.errors import CkptError
from ckpt_tool.geometry.columns import Int64Array
from ckpt_tool.manifest.model import FileRange
from ckpt_tool.records import dataclass
from ckpt_tool.storage.fetch import fetch_all
from ckpt_tool.storage.store import Store

__all__ = ["BlockVisitor", "Blocks", "Clip", "cut_blocks", "stream_blocks"]

_ALIGNMENT = 16  # widest element; blocks are cut between elements of the span that they cut
_BLOCKS_PER_RUN = 4
"""Blocks that one worker reads in a row, so that files are read forwards."""


@dataclass(slots=True)
class Clip:
    """The part of one span that lies in one block."""

    span: int
    start: int
    """First byte, counted from the span's first one."""
    data: npt.NDArray[np.uint8]
    """A view into the worker's buffer, reused after the call."""


class BlockVisitor(Protocol):
    """Takes blocks in, from several threads and in no order."""

    def visit(self, clips: list[Clip]) -> None:
        """The parts of spans that one block holds."""
        ...

    def failed(self, where: FileRange, spans: list[int], error: CkptError) -> None:
        """A block that cannot be read, and the spans that it holds parts of."""
        ...


@dataclass(frozen=True, eq=False)
class Blocks:
    """Blocks in file order, and which spans meet them."""

    file: Int64Array  # int64[n], number of the file as in the spans
    start: Int64Array  # int64[n], first byte
    stop: Int64Array  # int64[n], one past the last
    clip_block: Int64Array  # int64[m], ascending
    clip_span: Int64Array  # int64[m]

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self.file)


def cut_blocks(
    file: Int64Array, start: Int64Array, stop: Int64Array, *, block_bytes: int, max_gap_bytes: int
) -> Blocks:
    """Blocks of at most ``block_bytes`` over spans ``[start, stop)``, reading over gaps of up to ``max_gap_bytes``.

    Empty spans meet no block. A block that is cut ends where a span begins, if that leaves a quarter of it. Else cuts
    lie a multiple of 16 bytes behind the start of their span (of the last one to begin, where several are cut).
    """
    rows = np.flatnonzero(stop > start)
    rows = rows[np.lexsort((stop[rows], start[rows], file[rows]))]
    blocks: list[Int64Array] = []
    for low, high in _file_bounds(file[rows]):
        own = rows[low:high]
        blocks.append(_cut_file(int(file[own[0]]), start[own], stop[own], block_bytes, max_gap_bytes))
    table = np.concatenate(blocks) if blocks else np.zeros((0, 3), dtype=np.int64)
    block_file, block_start, block_stop = table[:, 0], table[:, 1], table[:, 2]
    # A span meets the blocks from the last that begins at or before it to the last that begins before its end.
    places = np.unique(np.concatenate([start, stop, block_start]), return_inverse=True)[1].reshape(-1)
    unit = int(places.max(initial=0)) + 1
    n = len(start)
    key = block_file * unit + places[2 * n :]
    first = np.searchsorted(key, file[rows] * unit + places[:n][rows], side="right") - 1
    last = np.searchsorted(key, file[rows] * unit + places[n : 2 * n][rows], side="left")
    counts = last - first
    clip_span = np.repeat(rows, counts)
    within = np.arange(len(clip_span)) - np.repeat(np.cumsum(counts) - counts, counts)
    clip_block = np.repeat(first, counts) + within
    order = np.argsort(clip_block, kind="stable")
    return Blocks(block_file, block_start, block_stop, clip_block[order], clip_span[order])


def _file_bounds(file: Int64Array) -> Iterator[tuple[int, int]]:
    bounds = [0, *(np.flatnonzero(np.diff(file)) + 1).tolist(), len(file)]
    return ((low, high) for low, high in pairwise(bounds) if high > low)


def _cut_file(file: int, start: Int64Array, stop: Int64Array, block_bytes: int, max_gap_bytes: int) -> Int64Array:
    """``int64[n, 3]``: file, start and stop of the blocks of one file; spans are sorted by start."""
    reach = np.maximum.accumulate(stop)
    heads = np.flatnonzero(np.concatenate([[True], start[1:] > reach[:-1] + max_gap_bytes]))
    tails = np.concatenate([heads[1:], [len(start)]]) - 1
    bounds: list[tuple[int, int, int]] = []
    starts, stops = start.tolist(), stop.tolist()
    for low, high in zip(start[heads].tolist(), reach[tails].tolist(), strict=True):
        at = low
        while high - at > block_bytes:
            cut = at + block_bytes
            row = bisect_right(starts, cut) - 1
            begin = starts[row]
            if begin >= at + block_bytes // 4 + _ALIGNMENT:  # elements of one span alone lie as they like it
                cut = begin
            elif begin < cut < stops[row]:
                cut = max(begin + (cut - begin) // _ALIGNMENT * _ALIGNMENT, at + _ALIGNMENT)
            bounds.append((file, at, cut))
            at = cut
        bounds.append((file, at, high))
    return np.array(bounds, dtype=np.int64).reshape(-1, 3)


def stream_blocks(
    blocks: Blocks,
    paths: tuple[str, ...],
    span_start: Int64Array,
    span_stop: Int64Array,
    *,
    store: Store,
    n_workers: int,
    visitor: BlockVisitor,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Read every block once and hand its clips to ``visitor``, from ``n_workers`` threads at a time.

    ``progress`` gets the bytes done and those of all blocks, from one thread at a time. Memory: one block for each
    worker.
    """
    starts, stops = blocks.start.tolist(), blocks.stop.tolist()
    total_nbytes = sum(stops) - sum(starts)
    done_nbytes = 0
    lock = threading.Lock()
    clip_bounds = np.searchsorted(blocks.clip_block, np.arange(len(blocks) + 1)).tolist()
    clip_spans = blocks.clip_span.tolist()
    low = blocks.start[blocks.clip_block]
    begins = np.maximum(span_start[blocks.clip_span], low)
    ends = np.minimum(span_stop[blocks.clip_span], blocks.stop[blocks.clip_block])
    shifts = _shifts(blocks, low - span_start[blocks.clip_span], ends - begins).tolist()
    clip_starts = (begins - span_start[blocks.clip_span]).tolist()
    clip_begins, clip_ends = (begins - low).tolist(), (ends - low).tolist()
    files = blocks.file.tolist()
    local = threading.local()

    def work(run: range) -> None:
        nonlocal done_nbytes
        for block in run:
            look_at(block)
            if progress is not None:
                with lock:
                    done_nbytes += stops[block] - starts[block]
                    progress(done_nbytes, total_nbytes)

    def look_at(block: int) -> None:
        clips = range(clip_bounds[block], clip_bounds[block + 1])
        if not clips:
            return
        nbytes, shift = stops[block] - starts[block], shifts[block]
        view = _buffer(local, nbytes + _ALIGNMENT)[shift : shift + nbytes]
        path = paths[files[block]]
        try:
            store.read_into(path, starts[block], view.data)
        except CkptError as error:
            spans = [clip_spans[clip] for clip in clips]
            visitor.failed(FileRange(path, starts[block], nbytes), spans, error)
            return
        visitor.visit([Clip(clip_spans[c], clip_starts[c], view[clip_begins[c] : clip_ends[c]]) for c in clips])

    runs = [range(i, min(i + _BLOCKS_PER_RUN, len(blocks))) for i in range(0, len(blocks), _BLOCKS_PER_RUN)]
    fetch_all(work, runs, concurrency=n_workers)


def _shifts(blocks: Blocks, before: Int64Array, nbytes: Int64Array) -> Int64Array:
    """Where in its buffer each block begins, so that elements of its longest part lie on multiples of their size.

    ``before`` are the bytes from the start of each clip's span to that of its block, ``nbytes`` those of the clip.
    """
    order = np.lexsort((nbytes, blocks.clip_block))
    block = blocks.clip_block[order]
    longest = order[np.flatnonzero(np.append(block[1:] != block[:-1], True))[: len(block)]]
    shifts = np.zeros(len(blocks), dtype=np.int64)
    shifts[blocks.clip_block[longest]] = before[longest] % _ALIGNMENT
    return shifts


def _buffer(local: threading.local, nbytes: int) -> npt.NDArray[np.uint8]:
    """This thread's buffer, grown when needed; numpy lays it on 16 bytes at least."""
    found: npt.NDArray[np.uint8] | None = getattr(local, "buffer", None)
    if found is None or len(found) < nbytes:
        found = np.empty(nbytes, dtype=np.uint8)
        local.buffer = found
    return found
