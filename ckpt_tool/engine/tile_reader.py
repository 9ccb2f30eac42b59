"""Reads tiles: the pieces of a tile, wherever they are stored, into one buffer that is reused from tile to tile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ckpt_tool.engine.elements import apply_flags, bit_dtype
from ckpt_tool.engine.piece_rows import PieceRows
from ckpt_tool.geometry.box import Box
from ckpt_tool.geometry.runs import ByteRuns, byte_runs, contiguous_strides, merge_runs
from ckpt_tool.manifest.model import FileRange, Manifest
from ckpt_tool.plan.model import Pieces, Tiles
from ckpt_tool.storage.read_buffer import Allocate, ReadBuffer, plain_memory
from ckpt_tool.storage.store import Store

if TYPE_CHECKING:
    from ckpt_tool.storage.read_ahead import ReadAhead

__all__ = ["TileReader", "piece_slices"]

_SPAN_BYTES_ALWAYS_READ = 1 << 16
"""A strided piece within this many bytes is read as one span: the gaps cost less than further requests."""


def piece_slices(tiles: Tiles, pieces: Pieces, row: int) -> tuple[slice, ...]:
    """Index of a piece in its tile's elements."""
    start = pieces.offsets[row] - tiles.offsets[pieces.tile[row]]
    return tuple(slice(o, o + s) for o, s in zip(start.tolist(), pieces.sizes[row].tolist(), strict=True))


class TileReader:
    """Reads the tiles of one manifest, one at a time; for one thread.

    Args:
        source: the manifest.
        tiles: all that will be read.
        reads: their pieces in the source's files.
        store: where those are.
        ahead_bytes: what ``ahead`` may fetch before it is needed.
        n_workers: readers that share the requests which the storage likes to have at once.
        allocate: makes the buffer that tiles come in.
    """

    def __init__(
        self, source: Manifest, tiles: Tiles, reads: Pieces, store: Store, *, ahead_bytes: int, n_workers: int,
        allocate: Allocate = plain_memory,
    ) -> None:  # fmt: skip
        self._source = source
        self._tiles = tiles
        self._reads = reads
        self._store = store
        self._ahead: ReadAhead | None = None
        self._ahead_bytes = min(ahead_bytes, store.cost.read_ahead_bytes)
        self._n_requests = max(store.cost.concurrency // n_workers, 2)
        self._tile = ReadBuffer(allocate)
        self.scratch = ReadBuffer()
        """Holds one piece while a tile is read, and nothing between two calls."""
        self._span = ReadBuffer()
        self._rows = PieceRows(reads, self._are_plain)
        self.read_nbytes = 0
        """Bytes read so far, gaps between strided pieces included."""

    def read(self, tile: int, into: npt.NDArray[np.uint8] | None = None) -> npt.NDArray[Any]:
        """The tile's elements as numbers of their width, in its own shape (flat for types narrower than a byte).

        A view of ``into`` (uint8 of the tile's size) where that is given, else of a buffer that the next call
        overwrites.
        """
        return self.elements(tile, self.read_bytes(tile, into))

    def read_bytes(self, tile: int, into: npt.NDArray[np.uint8] | None = None) -> npt.NDArray[np.uint8]:
        """The same as uint8[nbytes of the tile]."""
        rows = self._rows.of(tile)
        if into is None:
            _, _, _, first, start, _ = rows[0] if rows else (0, False, 0, 0, 0, 0)
            buffer = self._tile.take(int(self._tiles.nbytes[tile]), first - start)
        else:
            buffer = into
        view, paths = buffer.data, self._source.files.paths
        for row, is_plain, file, file_offset, start, length in rows:
            if is_plain:
                self._fetch(paths[file], file_offset, view[start : start + length])
            elif length:
                self._read_piece(row, self.elements(tile, buffer))
        return buffer

    def elements(self, tile: int, buffer: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
        """A view of a tile's bytes as `read` gives them."""
        dtype = self._source.tensors.dtypes[int(self._tiles.tensor[tile])]
        elements = buffer.view(bit_dtype(dtype))
        return elements.reshape(self._tiles.sizes[tile]) if dtype.bits % 8 == 0 else elements

    def _are_plain(self, rows: slice) -> npt.NDArray[np.bool_]:
        """bool[n]: pieces that are one run in the file and in the tile, with bits as they are stored."""
        reads = self._reads
        flags = self._source.chunks.flags[reads.chunk[rows]]
        are_plain: npt.NDArray[np.bool_] = reads.is_contiguous[rows] & reads.is_packed_in_tile[rows] & (flags == 0)
        return are_plain & (reads.length[rows] > 0)

    @contextmanager
    def ahead(self, tiles: Iterable[int]) -> Iterator[None]:
        """A block in which ``tiles`` will be read in this order, and are fetched before they are asked for.

        Nested blocks change nothing; nor does any where the storage answers at once.
        """
        if self._ahead is not None or not self._ahead_bytes:
            yield
            return
        from ckpt_tool.storage.read_ahead import ReadAhead  # for far storage alone

        ranges = (r for tile in tiles for r in self._ranges(tile))
        self._ahead = ReadAhead(self._store, ranges, max_bytes=self._ahead_bytes, concurrency=self._n_requests)
        try:
            yield
        finally:
            self._ahead.close()
            self._ahead = None

    def _ranges(self, tile: int) -> Iterator[FileRange]:
        """What reading a tile asks of the storage, but for pieces that are gathered from many places."""
        reads = self._reads
        for row in range(int(reads.starts[tile]), int(reads.starts[tile + 1])):
            length = int(reads.length[row])
            if length and (reads.is_contiguous[row] or self._is_one_read(row, self._strided(row)[1])):
                yield FileRange(self._source.files.paths[reads.file[row]], int(reads.file_offset[row]), length)

    def _read_piece(self, row: int, elements: npt.NDArray[Any]) -> None:
        """Put one source piece that is not plain into the tile."""
        reads = self._reads
        flags = int(self._source.chunks.flags[reads.chunk[row]])
        path = self._source.files.paths[reads.file[row]]
        length = int(reads.length[row])
        packed: npt.NDArray[Any]
        if reads.is_contiguous[row]:
            piece = self.scratch.take(length, int(reads.file_offset[row]))
            self._fetch(path, int(reads.file_offset[row]), piece.data)
            packed = piece.view(elements.dtype)
        else:
            packed = self._read_strided(row, elements.dtype)
        if flags:
            packed = np.ascontiguousarray(packed).reshape(-1)
            apply_flags(packed, self._source.tensors.dtypes[int(self._tiles.tensor[reads.tile[row]])], flags)
        elements[piece_slices(self._tiles, reads, row)] = packed.reshape(reads.sizes[row])

    def _fetch(self, path: str, offset: int, buffer: memoryview) -> None:
        (self._ahead or self._store).read_into(path, offset, buffer)
        self.read_nbytes += buffer.nbytes

    def _read_strided(self, row: int, element: np.dtype[Any]) -> npt.NDArray[Any]:
        """The elements of a piece that is not one run of its file, of its sizes or packed."""
        strides, runs = self._strided(row)
        path = self._source.files.paths[self._reads.file[row]]
        offset, span = int(self._reads.file_offset[row]), int(self._reads.length[row])
        if self._is_one_read(row, runs):
            buffer = self._span.take(span, offset)
            self._fetch(path, offset, buffer.data)
            steps = tuple(stride * element.itemsize for stride in strides)
            sizes = tuple(self._reads.sizes[row].tolist())
            view: npt.NDArray[Any] = np.ndarray(sizes, element, buffer.data, 0, steps)
            return view
        return self._gather(path, offset, runs).view(element)

    def _strided(self, row: int) -> tuple[tuple[int, ...], ByteRuns]:
        """Strides, in elements, of a piece that is not one run of its file, and its runs from the piece's start."""
        reads, chunks = self._reads, self._source.chunks
        chunk = int(reads.chunk[row])
        sizes = reads.sizes[row].tolist()
        padding = [1] * (len(sizes) - chunks.sizes.shape[1])
        strides = contiguous_strides(chunks.sizes[chunk].tolist() + padding)
        if chunks.strides is not None:
            strides = tuple(chunks.strides[chunk].tolist() + padding)
        strides = strides[: len(sizes)]
        dtype = self._source.tensors.dtypes[int(self._tiles.tensor[reads.tile[row]])]
        return strides, byte_runs(Box((0,) * len(sizes), tuple(sizes)), strides, bit_dtype(dtype).itemsize * 8)

    def _is_one_read(self, row: int, runs: ByteRuns) -> bool:
        """Whether the whole span of a strided piece is read, gaps and all."""
        cost, span = self._store.cost, int(self._reads.length[row])
        is_cheap = span <= cost.max_read_bytes and _largest_gap(runs) <= cost.max_gap_bytes
        return is_cheap or span <= max(_SPAN_BYTES_ALWAYS_READ, 2 * runs.n_runs * runs.nbytes)

    def _gather(self, path: str, offset: int, runs: ByteRuns) -> npt.NDArray[np.uint8]:
        """uint8[n_runs * nbytes]: the runs laid end to end, read in as few requests as the store's cost says."""
        packed = self.scratch.take(runs.n_runs * runs.nbytes).reshape(runs.n_runs, runs.nbytes)
        starts = runs.starts()
        cost = self._store.cost
        lengths = np.full(len(starts), runs.nbytes, dtype=np.int64)
        read_start, read_length, read_of_run = merge_runs(
            starts, lengths, max_gap_bytes=cost.max_gap_bytes, max_read_bytes=max(cost.max_read_bytes, runs.nbytes),
            split=False,
        )  # fmt: skip
        order = np.argsort(read_of_run, kind="stable")
        bounds = np.searchsorted(read_of_run[order], np.arange(len(read_start) + 1)).tolist()
        for read, (start, length) in enumerate(zip(read_start.tolist(), read_length.tolist(), strict=True)):
            rows = order[bounds[read] : bounds[read + 1]]
            if len(rows) == 1 and length == runs.nbytes:
                self._fetch(path, offset + start, packed[rows[0]].data)
                continue
            buffer = self._span.take(length, offset + start)
            self._fetch(path, offset + start, buffer.data)
            _copy_runs(packed, rows, buffer, starts[rows] - start)
        return packed.reshape(-1)


def _largest_gap(runs: ByteRuns) -> int:
    """Bytes between two neighbouring runs, at most; 0 where runs of a permuted tensor interlock."""
    largest, span = 0, runs.nbytes
    for n, step in zip(reversed(runs.counts), reversed(runs.steps), strict=True):
        largest = max(largest, step - span)
        span += (n - 1) * step
    return largest


def _copy_runs(
    packed: npt.NDArray[np.uint8], rows: npt.NDArray[np.int64], buffer: npt.NDArray[np.uint8], at: npt.NDArray[np.int64]
) -> None:
    """Copy the run that begins at byte ``at[i]`` of ``buffer`` to row ``rows[i]`` of ``packed``."""
    steps, turns = np.diff(at), np.diff(rows)
    nbytes = packed.shape[1]
    if (turns == 1).all() and (steps == steps[:1]).all():  # a loop of equal steps: one strided copy
        step = int(steps[0]) if len(steps) else nbytes
        first = int(rows[0])
        view: npt.NDArray[np.uint8] = np.ndarray((len(rows), nbytes), np.uint8, buffer.data, int(at[0]), (step, 1))
        width = next(w for w in (8, 4, 2, 1) if not (nbytes % w or step % w or int(at[0]) % w))
        packed[first : first + len(rows)].view(f"u{width}")[...] = view.view(f"u{width}")
        return
    packed[rows] = buffer[at[:, None] + np.arange(nbytes)]
