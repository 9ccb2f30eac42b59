"""A block is a stretch of a file read at once; a span is a byte range that someone wants to see all of, in pieces.

Spans may overlap, nest and repeat: every byte that any of them wants is read once, and each block is handed over with
the parts of the spans that lie in it. Knows no tensor.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from ckpt_tool.errors import CkptError
from ckpt_tool.geometry.columns import Int64Array
from ckpt_tool.manifest.model import FileRange
from ckpt_tool.records import dataclass
from ckpt_tool.storage.mapped import mapped
from ckpt_tool.storage.read_buffer import ReadBuffer
from ckpt_tool.storage.shares import can_share, share_out
from ckpt_tool.storage.store import Store

__all__ = ["BlockVisitor", "Blocks", "Clip", "cut_blocks", "stream_blocks"]

_ALIGNMENT = 16  # widest element; blocks are cut between elements of the span that they cut
_STRETCH_BYTES = 32 << 20
"""So much of a file one worker reads in a row: forwards, and long enough for what a mapping costs."""

Seen = TypeVar("Seen")
Seen_co = TypeVar("Seen_co", covariant=True)


@dataclass(slots=True)
class Clip:
    """The part of one span that lies in one block."""

    span: int
    start: int
    """First byte, counted from the span's first one."""
    data: npt.NDArray[np.uint8]
    """A view into a buffer that is reused after the call, or into the file, where elements lie on any byte."""


class BlockVisitor(Protocol[Seen_co]):
    """Takes in some of the blocks, from one thread."""

    def visit(self, clips: list[Clip]) -> None:
        """The parts of spans that one block holds."""
        ...

    def failed(self, where: FileRange, spans: list[int], error: CkptError) -> None:
        """A block that cannot be read, and the spans that it holds parts of."""
        ...

    def seen(self) -> Seen_co:
        """What they came to; pickled where another process has read them."""
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


def stream_blocks(  # noqa: PLR0913 - what a pass needs
    blocks: Blocks,
    paths: tuple[str, ...],
    span_start: Int64Array,
    span_stop: Int64Array,
    *,
    store: Store,
    n_workers: int,
    visitor: Callable[[], BlockVisitor[Seen]],
    take: Callable[[Seen], None],
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Read every block once and hand its clips to a ``visitor``; ``take`` gets what each visitor has seen.

    Files of this machine are mapped by copies of this process where it can be copied, else blocks are read by threads.
    ``progress`` gets the bytes done and those of all blocks; it and ``take`` are called from one thread at a time.
    Memory: one block for each worker.
    """
    total = int((blocks.stop - blocks.start).sum())
    pieces = _Pieces(blocks, paths, span_start, span_stop)
    in_copies = can_share(store, set(pieces.paths), total)
    stretches = _stretches(blocks, _STRETCH_BYTES if in_copies else 0)
    done = 0

    def taken(result: tuple[int, Seen]) -> None:
        nonlocal done
        done += result[0]
        take(result[1])
        if progress is not None:
            progress(done, total)

    share_out(
        range(len(stretches)),
        lambda is_copy: _Reader(pieces, stretches, store, visitor, maps=is_copy).look_at,
        taken, n_workers=n_workers, in_copies=in_copies,
    )  # fmt: skip


def _stretches(blocks: Blocks, at_most_bytes: int) -> list[range]:
    """Blocks that one worker takes at a time: one, or neighbours in one file that are as long as that at most."""
    found: list[range] = []
    first = 0
    files, starts, stops = blocks.file.tolist(), blocks.start.tolist(), blocks.stop.tolist()
    for row in range(1, len(blocks) + 1):
        is_next = row < len(blocks) and files[row] == files[first] and starts[row] == stops[row - 1]
        if not is_next or stops[row] - starts[first] > at_most_bytes:
            found.append(range(first, row))
            first = row
    return found


class _Pieces:
    """Where the clips of each block lie, as plain numbers."""

    def __init__(self, blocks: Blocks, paths: tuple[str, ...], span_start: Int64Array, span_stop: Int64Array) -> None:
        self.paths = [paths[file] for file in blocks.file.tolist()]
        self.starts, self.stops = blocks.start.tolist(), blocks.stop.tolist()
        low = blocks.start[blocks.clip_block]
        begins = np.maximum(span_start[blocks.clip_span], low)
        ends = np.minimum(span_stop[blocks.clip_span], blocks.stop[blocks.clip_block])
        first = begins - span_start[blocks.clip_span]
        self._clips = list(
            zip(*(column.tolist() for column in (blocks.clip_span, first, begins - low, ends - low)), strict=True)
        )
        self._bounds: list[int] = np.searchsorted(blocks.clip_block, np.arange(len(blocks) + 1)).tolist()
        self.shifts = _shifts(blocks, low - span_start[blocks.clip_span], ends - begins).tolist()

    def has_clips(self, block: int) -> bool:
        """Whether any span meets a block."""
        return self._bounds[block] < self._bounds[block + 1]

    def spans(self, block: int) -> list[int]:
        """The spans that a block holds parts of."""
        return [span for span, *_ in self._clips[self._bounds[block] : self._bounds[block + 1]]]

    def clips(self, block: int, data: npt.NDArray[np.uint8]) -> list[Clip]:
        """The parts of spans in the bytes of a block."""
        own = self._clips[self._bounds[block] : self._bounds[block + 1]]
        return [Clip(span, start, data[begin:end]) for span, start, begin, end in own]


class _Reader(Generic[Seen]):
    """Reads stretches of blocks, one at a time; for one thread."""

    def __init__(
        self,
        pieces: _Pieces,
        stretches: list[range],
        store: Store,
        visitor: Callable[[], BlockVisitor[Seen]],
        *,
        maps: bool,
    ) -> None:
        self._pieces = pieces
        self._stretches = stretches
        self._store = store
        self._visitor = visitor
        self._maps = maps
        self._buffer = ReadBuffer()

    def look_at(self, stretch: int) -> tuple[int, Seen]:
        """The bytes of a stretch, and what a visitor has seen in them."""
        pieces, blocks = self._pieces, self._stretches[stretch]
        start, stop = pieces.starts[blocks.start], pieces.stops[blocks.stop - 1]
        window = mapped(self._store, pieces.paths[blocks.start], start, stop) if self._maps else None
        visitor = self._visitor()
        for block in blocks:
            low, high = pieces.starts[block], pieces.stops[block]
            if window is not None:
                visitor.visit(pieces.clips(block, window[low - start : high - start]))
            elif pieces.has_clips(block):
                self._read(visitor, block)
        return stop - start, visitor.seen()

    def _read(self, visitor: BlockVisitor[Seen], block: int) -> None:
        pieces = self._pieces
        path, start, shift = pieces.paths[block], pieces.starts[block], pieces.shifts[block]
        nbytes = pieces.stops[block] - start
        view = self._buffer.take(nbytes, start, shift)
        try:
            self._store.read_into(path, start, view.data)
        except CkptError as error:
            visitor.failed(FileRange(path, start, nbytes), pieces.spans(block), error)
            return
        visitor.visit(pieces.clips(block, view))


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
