"""Strided parts of files go to strided memory by one copy: out of a span that was read into a buffer, run by run.

The loops over the runs that a part has in its file and in memory alike are found in columns. Where runs are long they
need no buffer. So columns of what was saved by rows, and rows of what was saved by columns, take no tiles. Knows no
torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt_tool.engine.landing import Landing
from ckpt_tool.geometry.columns import BoolArray
from ckpt_tool.geometry.runs import contiguous_strides_columns
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.tables import IntArray
from ckpt_tool.plan.model import Pieces
from ckpt_tool.records import dataclass
from ckpt_tool.storage.read_buffer import ReadBuffer
from ckpt_tool.storage.store import Store

__all__ = [
    "NO_STRIDED",
    "Loops",
    "StridedReads",
    "all_bytes",
    "long_runs",
    "loops_of",
    "read_strided",
    "strided_reads",
]

_LONG_RUN_BYTES = 32 << 10
"""Runs from this length on are read for themselves: a request takes less than a copy."""


@dataclass(frozen=True, eq=False)
class StridedReads:
    """Spans of files, and the loops over their runs, in file order."""

    path: tuple[str, ...]
    file_offset: tuple[int, ...]
    length: tuple[int, ...]
    """Bytes of the span, gaps included."""
    landing: tuple[int, ...]
    landing_offset: tuple[int, ...]
    """Bytes from the landing's first element to that of the first run."""
    shape: tuple[tuple[int, ...], ...]
    """Iterations of each loop, outermost first, and elements of a run."""
    in_file: tuple[tuple[int, ...], ...]
    """Bytes that one step of each moves in the span,"""
    in_memory: tuple[tuple[int, ...], ...]
    """and in memory."""

    def __len__(self) -> int:
        """Number of reads."""
        return len(self.path)


NO_STRIDED = StridedReads((), (), (), (), (), (), (), ())


@dataclass(frozen=True, eq=False)
class Loops:
    """Of pieces, the loops over the runs that they have in their file and in their landing alike."""

    run: IntArray
    """int64[m], bytes."""
    count: IntArray
    """int64[m, D]: iterations of each loop, outermost first; 1 of a dimension that is within the run."""
    in_file: IntArray
    """int64[m, D]: bytes of a step."""
    in_memory: IntArray
    """int64[m, D]: bytes of a step."""
    start: IntArray
    """int64[m]: bytes from the landing's first element to the piece's."""
    max_gap: IntArray
    """int64[m]: bytes between two runs of the file, at most; negative where they are not in the order of the loops."""

    @property
    def are_long(self) -> BoolArray:
        """bool[m]: pieces whose runs are worth a read each."""
        return self.run >= _LONG_RUN_BYTES


def loops_of(
    source: Manifest, reads: Pieces, box: IntArray, offsets: IntArray, sizes: IntArray, landings: Mapping[int, Landing]
) -> Loops:
    """The loops of pieces.

    Args:
        source: the manifest.
        reads: pieces of boxes.
        box: int64[m]: the landing of each.
        offsets: int64[m, D]: where that box begins.
        sizes: int64[m, D]: how large it is.
        landings: memory; an array of numbers of the stored width for each box that is named.
    """
    chunks, width = source.chunks, sizes.shape[1]
    item = source.tensors.bits[chunks.tensor[reads.chunk]] // 8
    chunk_sizes = chunks.sizes[reads.chunk]
    strides = contiguous_strides_columns(chunk_sizes) if chunks.strides is None else chunks.strides[reads.chunk]
    in_file = np.pad(strides, ((0, 0), (0, width - strides.shape[1])), constant_values=1) * item[:, None]
    in_memory = contiguous_strides_columns(sizes) * item[:, None]
    for number in {*box.tolist()}:
        array = landings[number].memory.array
        if array is not None and not array.flags.c_contiguous:
            in_memory[box == number, : array.ndim] = array.strides

    count, run, span = reads.sizes.copy(), item.copy(), item.copy()
    max_gap, is_inside = np.zeros_like(item), np.ones(len(reads), dtype=bool)
    for at in range(width - 1, -1, -1):
        is_loop = count[:, at] > 1
        goes_on = is_inside & is_loop & (in_file[:, at] == run) & (in_memory[:, at] == run)
        is_inside &= goes_on | ~is_loop
        gap = np.where(is_loop, in_file[:, at] - span, 0)
        max_gap = np.where((gap < 0) | (max_gap < 0), -1, np.maximum(max_gap, gap))
        span += np.where(is_loop, (count[:, at] - 1) * in_file[:, at], 0)
        run[goes_on] *= count[goes_on, at]
        count[goes_on, at] = 1
    start = ((reads.offsets - offsets) * in_memory).sum(axis=1)
    return Loops(run, count, in_file, in_memory, start, max_gap)


def long_runs(loops: Loops, rows: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Every run of the pieces ``rows``: the piece, and bytes from the piece's first in the file and in memory."""
    n_runs = np.prod(loops.count[rows], axis=1)
    piece = np.repeat(rows, n_runs)
    number = np.arange(len(piece)) - np.repeat(np.cumsum(n_runs) - n_runs, n_runs)
    in_file, in_memory = np.zeros_like(number), np.zeros_like(number)
    for at in range(loops.count.shape[1] - 1, -1, -1):
        number, turn = np.divmod(number, loops.count[piece, at])
        in_file += turn * loops.in_file[piece, at]
        in_memory += turn * loops.in_memory[piece, at]
    return piece, in_file, in_memory


def strided_reads(
    source: Manifest, reads: Pieces, box: IntArray, loops: Loops, rows: IntArray, max_span_bytes: int
) -> StridedReads:
    """The reads that take the pieces ``rows``, each of a span of at most ``max_span_bytes`` where that holds a run."""
    rows = rows[np.lexsort((reads.file_offset[rows], reads.file[rows]))]
    item = source.tensors.bits[source.chunks.tensor[reads.chunk[rows]]] // 8
    columns = (reads.file[rows], reads.file_offset[rows], box[rows], loops.start[rows], loops.run[rows], item)
    nests = np.stack([loops.count[rows], loops.in_file[rows], loops.in_memory[rows]], axis=2)
    known: dict[tuple[object, ...], list[_Span]] = {}
    found = []
    for nest, file, offset, landing, start, run, width in zip(
        nests.tolist(), *(column.tolist() for column in columns), strict=True
    ):
        path = source.files.paths[file]
        key = (run, width, *map(tuple, nest))
        spans = known.get(key)
        if spans is None:
            spans = known[key] = _spans([loop for loop in nest if loop[0] > 1], run, width, max_span_bytes)
        found += [
            (path, offset + at, length, landing, start + to, *steps) for at, length, to, steps in spans
        ]  # fmt: skip
    return StridedReads(*(tuple(column) for column in zip(*found, strict=True))) if found else NO_STRIDED


_Span = tuple[int, int, int, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
"""Bytes from the piece's first in the file, length, bytes from it in memory; iterations, and steps in both."""


def _spans(loops: list[list[int]], run: int, width: int, limit: int) -> list[_Span]:
    """The spans of one nest of loops, each (iterations, step in the file, step in memory)."""
    length = run + sum((count - 1) * in_file for count, in_file, _ in loops)
    if length <= limit or not loops:
        counts, in_file, in_memory = zip(*loops, (run // width, width, width), strict=True)
        return [(0, length, 0, (counts, in_file, in_memory))]
    (count, file_step, memory_step), *inner = loops
    n = max((limit - length) // file_step + count, 1)  # iterations of the outermost loop that fit
    if n > 1:
        parts = [(first, [[min(n, count - first), file_step, memory_step], *inner]) for first in range(0, count, n)]
    else:
        parts = [(first, inner) for first in range(count)]
    return [
        (first * file_step + at, nbytes, first * memory_step + to, steps)
        for first, part in parts
        for at, nbytes, to, steps in _spans(part, run, width, limit)
    ]


class _View:
    """Memory of an array from some byte on, as another array of the same numbers or of bytes."""

    def __init__(self, array: npt.NDArray[Any], **place: Any) -> None:
        self._array = array  # which keeps its memory
        self.__array_interface__ = array.__array_interface__ | place


def _address(array: npt.NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def read_strided(
    reads: StridedReads, rows: Sequence[int], store: Store, memory: Mapping[int, npt.NDArray[Any]], buffer: ReadBuffer
) -> None:
    """Do some of the reads; ``memory`` are the arrays of the landings that they go to."""
    for row in rows:
        span = buffer.take(reads.length[row], reads.file_offset[row])
        store.read_into(reads.path[row], reads.file_offset[row], span.data)
        array, shape = memory[reads.landing[row]], reads.shape[row]
        source: npt.NDArray[Any] = np.ndarray(shape, array.dtype, span.data, 0, reads.in_file[row])
        place = (_address(array) + reads.landing_offset[row], False)
        np.asarray(_View(array, data=place, shape=shape, strides=reads.in_memory[row]))[...] = source


def all_bytes(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """uint8 from the array's first element to its last, with what lies between; its strides are not negative."""
    span = array.itemsize + sum((n - 1) * step for n, step in zip(array.shape, array.strides, strict=True))
    found: npt.NDArray[np.uint8] = np.asarray(_View(array, shape=(span,), strides=None, typestr="|u1"))
    return found
