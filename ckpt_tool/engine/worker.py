"""A worker executes tiles: reads the pieces of a tile into one buffer, writes the buffer's pieces to the target.

Each worker owns its buffers and reuses them: fresh large buffers cost page faults that are dearer than the copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ckpt_tool.checksum import crc32
from ckpt_tool.engine.elements import apply_flags, bit_dtype, count_changes
from ckpt_tool.engine.journal import UnitRecord
from ckpt_tool.geometry.box import Box
from ckpt_tool.geometry.runs import ByteRuns, byte_runs, contiguous_strides, merge_runs
from ckpt_tool.plan.model import Pieces, Plan
from ckpt_tool.storage.store import Store

__all__ = ["Buffer", "PieceSink", "Worker"]

_SPAN_BYTES_ALWAYS_READ = 1 << 16
"""A strided piece within this many bytes is read as one span: the gaps cost less than further requests."""


class PieceSink(Protocol):
    """Where written pieces go."""

    def write(self, path: str, offset: int, data: memoryview) -> None:
        """Put ``data`` at byte ``offset`` of ``path``; the buffer is reused after the call."""
        ...


class Buffer:
    """A byte buffer that grows to the largest size asked for and is reused."""

    def __init__(self) -> None:
        self._bytes: npt.NDArray[np.uint8] = np.empty(0, dtype=np.uint8)

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """uint8[nbytes]; the content is whatever was there."""
        if len(self._bytes) < nbytes:
            self._bytes = np.empty(nbytes, dtype=np.uint8)
        return self._bytes[:nbytes]


class Worker:
    """Executes tiles of one plan, one at a time."""

    def __init__(self, plan: Plan, store: Store, sink: PieceSink, *, with_crc32: bool) -> None:
        self._plan = plan
        self._store = store
        self._sink = sink
        self._with_crc32 = with_crc32
        self._tile = Buffer()
        self._scratch = Buffer()
        self._span = Buffer()
        self._cast = Buffer()

    def run_unit(self, unit: int, progress: Callable[[int], None]) -> UnitRecord:
        """Execute all tiles of a unit in order; ``progress`` gets the bytes written by each tile."""
        first, last = self._plan.tiles.unit_bounds[unit : unit + 2].tolist()
        crcs: list[tuple[int, int]] = []
        casts: dict[str, tuple[int, float]] = {}
        for tile in range(first, last):
            progress(self._run_tile(tile, crcs, casts))
        return UnitRecord(unit, tuple(crcs), tuple((fqn, n, error) for fqn, (n, error) in casts.items()))

    def _run_tile(self, tile: int, crcs: list[tuple[int, int]], casts: dict[str, tuple[int, float]]) -> int:
        tiles = self._plan.tiles
        buffer = self._tile.take(int(tiles.nbytes[tile]))
        dtype = self._plan.source.tensors.dtypes[int(tiles.tensor[tile])]
        elements = buffer.view(bit_dtype(dtype))
        if dtype.bits % 8 == 0:
            elements = elements.reshape(tiles.sizes[tile])
        reads, writes = self._plan.reads, self._plan.writes
        for row in range(int(reads.starts[tile]), int(reads.starts[tile + 1])):
            self._read_piece(row, buffer, elements)
        written = 0
        for row in range(int(writes.starts[tile]), int(writes.starts[tile + 1])):
            data = self._packed_piece(row, buffer, elements, casts)
            self._sink.write(self._plan.target.files.paths[writes.file[row]], int(writes.file_offset[row]), data)
            if self._with_crc32:
                crcs.append((row, crc32(data)))
            written += data.nbytes
        return written

    def _local(self, pieces: Pieces, row: int) -> tuple[slice, ...]:
        """Index of a piece in its tile's elements."""
        start = pieces.offsets[row] - self._plan.tiles.offsets[pieces.tile[row]]
        return tuple(slice(o, o + s) for o, s in zip(start.tolist(), pieces.sizes[row].tolist(), strict=True))

    def _read_piece(self, row: int, buffer: npt.NDArray[np.uint8], elements: npt.NDArray[Any]) -> None:
        """Put one source piece into the tile."""
        reads = self._plan.reads
        flags = int(self._plan.source.chunks.flags[reads.chunk[row]])
        path = self._plan.source.files.paths[reads.file[row]]
        length = int(reads.length[row])
        if not length:
            return
        if reads.is_contiguous[row] and reads.is_packed_in_tile[row] and not flags:
            start = int(reads.tile_offset[row])
            self._store.read_into(path, int(reads.file_offset[row]), buffer[start : start + length].data)
            return
        packed: npt.NDArray[Any]
        if reads.is_contiguous[row]:
            piece = self._scratch.take(length)
            self._store.read_into(path, int(reads.file_offset[row]), piece.data)
            packed = piece.view(elements.dtype)
        else:
            packed = self._read_strided(row, elements.dtype)
        if flags:
            apply_flags(packed, self._plan.source.tensors.dtypes[int(self._plan.tiles.tensor[reads.tile[row]])], flags)
        elements[self._local(reads, row)] = packed.reshape(reads.sizes[row])

    def _read_strided(self, row: int, element: np.dtype[Any]) -> npt.NDArray[Any]:
        """The packed elements of a piece that is not one run of its file."""
        reads, chunks = self._plan.reads, self._plan.source.chunks
        chunk = int(reads.chunk[row])
        sizes = reads.sizes[row].tolist()
        width = chunks.sizes.shape[1]
        chunk_sizes = chunks.sizes[chunk].tolist() + [1] * (len(sizes) - width)
        strides = contiguous_strides(chunk_sizes)
        if chunks.strides is not None:
            strides = tuple(chunks.strides[chunk].tolist() + [1] * (len(sizes) - width))
        strides = strides[: len(sizes)]
        path = self._plan.source.files.paths[reads.file[row]]
        offset, span = int(reads.file_offset[row]), int(reads.length[row])
        runs = byte_runs(Box((0,) * len(sizes), tuple(sizes)), strides, element.itemsize * 8)
        needed = runs.n_runs * runs.nbytes
        if span <= max(_SPAN_BYTES_ALWAYS_READ, 2 * needed):
            buffer = self._span.take(span)
            self._store.read_into(path, offset, buffer.data)
            steps = tuple(stride * element.itemsize for stride in strides)
            view: npt.NDArray[Any] = np.ndarray(tuple(sizes), element, buffer.data, 0, steps)
            return np.ascontiguousarray(view).reshape(-1)
        return self._gather(path, offset, runs).view(element)

    def _gather(self, path: str, offset: int, runs: ByteRuns) -> npt.NDArray[np.uint8]:
        """uint8[n_runs * nbytes]: the runs laid end to end, read in as few requests as the store's cost says."""
        packed = self._scratch.take(runs.n_runs * runs.nbytes).reshape(runs.n_runs, runs.nbytes)
        starts = runs.starts()
        cost = self._store.cost
        lengths = np.full(len(starts), runs.nbytes, dtype=np.int64)
        read_start, read_length, read_of_run = merge_runs(
            starts, lengths, max_gap_bytes=cost.max_gap_bytes, max_read_bytes=max(cost.max_read_bytes, runs.nbytes),
            split=False,
        )  # fmt: skip
        order = np.argsort(read_of_run, kind="stable")
        bounds = np.searchsorted(read_of_run[order], np.arange(len(read_start) + 1)).tolist()
        within = np.arange(runs.nbytes)
        for read, (start, length) in enumerate(zip(read_start.tolist(), read_length.tolist(), strict=True)):
            buffer = self._span.take(length)
            self._store.read_into(path, offset + start, buffer.data)
            rows = order[bounds[read] : bounds[read + 1]]
            packed[rows] = buffer[(starts[rows] - start)[:, None] + within]
        return packed.reshape(-1)

    def _packed_piece(
        self, row: int, buffer: npt.NDArray[np.uint8], elements: npt.NDArray[Any], casts: dict[str, tuple[int, float]]
    ) -> memoryview:
        """The bytes of one target piece, packed; valid until the next call."""
        plan, writes = self._plan, self._plan.writes
        chunk = int(writes.chunk[row])
        target = int(plan.target.chunks.tensor[chunk])
        before = plan.source.tensors.dtypes[int(plan.tiles.tensor[writes.tile[row]])]
        after = plan.target.tensors.dtypes[target]
        length = int(writes.length[row])
        if before == after:
            if writes.is_packed_in_tile[row]:
                start = int(writes.tile_offset[row])
                return buffer[start : start + length].data
            packed = self._scratch.take(length)
            piece = packed.view(elements.dtype).reshape(writes.sizes[row])
            piece[...] = elements[self._local(writes, row)]
            return packed.data
        values = elements[self._local(writes, row)].view(before.as_numpy())
        packed = self._cast.take(length)
        result = packed.view(after.as_numpy()).reshape(writes.sizes[row])
        with np.errstate(over="ignore", invalid="ignore"):
            result[...] = values.astype(after.as_numpy())
            n_changed, error = count_changes(values, result)
        fqn = plan.target.tensors.fqns[target]
        total, worst = casts.get(fqn, (0, 0.0))
        casts[fqn] = (total + n_changed, max(worst, error))
        return packed.data
