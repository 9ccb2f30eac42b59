"""A worker executes tiles: reads the pieces of a tile into one buffer, writes the buffer's pieces to the target.

What is mapped (see `windows`) passes through no buffer: it is written from where the system keeps it.

Each worker owns its buffers and reuses them: fresh large buffers cost page faults that are dearer than the copy.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ckpt_tool.dtypes import cast_array
from ckpt_tool.engine.base import CastEffect
from ckpt_tool.engine.clones import Clones
from ckpt_tool.engine.elements import bit_dtype, count_changes
from ckpt_tool.engine.journal import UnitRecord
from ckpt_tool.engine.piece_rows import PieceRows
from ckpt_tool.engine.slabs import TileBytes, crc32_of, cut
from ckpt_tool.engine.tile_digests import TileDigests, UnitDigests
from ckpt_tool.engine.tile_reader import Buffer, TileReader
from ckpt_tool.errors import StorageError
from ckpt_tool.plan.model import Plan

__all__ = ["PieceSink", "Worker"]

_PROGRESS_BYTES = 32 << 20
"""Written between two reports: each wakes the caller's thread, which then wants the interpreter's lock."""


class PieceSink(Protocol):
    """Where written pieces go."""

    def write(self, path: str, offset: int, data: memoryview) -> None:
        """Put ``data`` at byte ``offset`` of ``path``; the buffer is reused after the call."""
        ...


class Worker:
    """Executes tiles of one plan, one at a time.

    ``reader`` reads the plan's tiles, for this worker alone; ``clones`` says what the target may have in common with
    the source.
    """

    def __init__(
        self,
        plan: Plan,
        reader: TileReader,
        sink: PieceSink,
        *,
        with_crc32: bool,
        digests: TileDigests | None = None,
        clones: Clones | None = None,
    ) -> None:
        self._plan = plan
        self._clones = clones
        self._reader = reader
        self._sink = sink
        self._with_crc32 = with_crc32
        self._digests = digests
        self._unit: UnitDigests | None = None
        self._scratch = self._reader.scratch  # idle once a tile is read
        self._cast = Buffer()
        self._rows = PieceRows(plan.writes, self._are_plain)

    def ahead(self, units: Sequence[int]) -> AbstractContextManager[None]:
        """A block in which these units are executed in this order, without a pause in reading between them."""
        return self._reader.ahead(self._plan.tiles.of_units(units))

    def run_unit(self, unit: int, progress: Callable[[int], None]) -> UnitRecord:
        """Execute all tiles of a unit in order; ``progress`` gets the bytes written, some tens of MB at a time."""
        try:
            return self._run_unit(unit, progress)
        except StorageError as error:
            if not (isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EFAULT):
                raise
        self._reader.mapped_bytes = 0  # a file shrank after it was mapped: reading it says so
        return self._run_unit(unit, progress)

    def _run_unit(self, unit: int, progress: Callable[[int], None]) -> UnitRecord:
        crcs: list[tuple[int, int]] = []
        casts: dict[str, CastEffect] = {}
        self._unit = None if self._digests is None else self._digests.unit()
        unreported = 0
        with self.ahead([unit]):
            for tile in self._plan.tiles.of_units([unit]):
                unreported += self._run_tile(tile, crcs, casts)
                if unreported >= _PROGRESS_BYTES:
                    progress(unreported)
                    unreported = 0
        progress(unreported)
        sums = () if self._unit is None else self._unit.sums()
        return UnitRecord(unit, tuple(crcs), tuple(casts.items()), sums)

    def _run_tile(self, tile: int, crcs: list[tuple[int, int]], casts: dict[str, CastEffect]) -> int:
        target = self._plan.target.files.paths
        data = self._reader.slabs(tile)
        written = 0
        takes_pieces = self._sum_tile(tile, data)
        for row, is_plain, file, offset, begin, length in self._rows.of(tile):
            parts = data.run(begin, length) if is_plain else [self._packed_piece(row, tile, data, casts)]
            if self._with_crc32:
                crcs.append((row, crc32_of(parts)))
                if takes_pieces and self._unit is not None:
                    self._unit.add_piece(row, tile, length, crcs[-1][1])
            self._write(row, target[file], offset, parts)
            written += length
        return written

    def _write(self, row: int, path: str, offset: int, parts: Sequence[memoryview]) -> None:
        """Put a piece into the target, but for what that shares with the source."""
        if self._clones is not None and self._clones.shares_any():
            for start, end in self._clones.share(row):
                self._put(path, offset + start, cut(parts, start, end))
        else:
            self._put(path, offset, parts)

    def _put(self, path: str, offset: int, parts: Sequence[memoryview]) -> None:
        for part in parts:
            self._sink.write(path, offset, part)
            offset += len(part)

    def _are_plain(self, rows: slice) -> npt.NDArray[np.bool_]:
        """bool[n]: pieces that are one run of their tile, in the type that the target has."""
        writes = self._plan.writes
        tensor = self._plan.target.chunks.tensor[writes.chunk[rows]]
        are_plain: npt.NDArray[np.bool_] = writes.is_packed_in_tile[rows] & ~self._plan.is_cast[tensor]
        return are_plain

    def _sum_tile(self, tile: int, data: TileBytes) -> bool:
        """Add a tile to the digests, unless the CRCs of its pieces are all that they need; whether they are."""
        if self._digests is None or self._unit is None:
            return False
        if self._with_crc32 and self._digests.takes_pieces(tile):
            return True
        self._unit.add_tile(tile, data)
        return False

    def _packed_piece(self, row: int, tile: int, data: TileBytes, casts: dict[str, CastEffect]) -> memoryview:
        """The bytes of one target piece that is not plain, packed; valid until the next call."""
        plan, writes = self._plan, self._plan.writes
        target = int(plan.target.chunks.tensor[writes.chunk[row]])
        before = plan.source.tensors.dtypes[int(plan.tiles.tensor[tile])]
        after = plan.target.tensors.dtypes[target]
        length = int(writes.length[row])
        sizes = tuple(writes.sizes[row].tolist())
        parts = list(self._parts(row, tile, data))
        values = parts[0][1]
        if before == after or len(parts) > 1:
            packed = self._scratch.take(values.itemsize * math.prod(sizes))
            elements = packed.view(values.dtype).reshape(sizes)
            for place, part in parts:
                elements[place] = part
            if before == after:
                return packed.data
            values = elements
        values = values.view(before.as_numpy())
        packed = self._cast.take(length)
        result = packed.view(after.as_numpy()).reshape(sizes)
        with np.errstate(over="ignore", invalid="ignore"):
            result[...] = cast_array(values, after)
            effect = count_changes(values, result)
        fqn = plan.target.tensors.fqns[target]
        casts[fqn] = casts.get(fqn, CastEffect()).merged(effect)
        if self._unit is not None:
            self._unit.add_cast(row, tile, packed, after)
        return packed.data

    def _parts(self, row: int, tile: int, data: TileBytes) -> Iterator[tuple[tuple[slice, ...], npt.NDArray[Any]]]:
        """Where in a target piece, and which, are the elements that each slab of its tile has of it."""
        writes = self._plan.writes
        element = bit_dtype(self._plan.source.tensors.dtypes[int(self._plan.tiles.tensor[tile])])
        piece = list(zip(writes.offsets[row].tolist(), writes.sizes[row].tolist(), strict=True))
        for slab in data.slabs:
            offsets, sizes = self._reader.box(tile, slab)
            common = [
                (offset, max(first, offset), min(first + n, offset + size), first)
                for (first, n), offset, size in zip(piece, offsets, sizes, strict=True)
            ]
            if all(low < high for _, low, high, _ in common):
                values = slab.data.view(element).reshape(sizes)
                inside = tuple(slice(low - offset, high - offset) for offset, low, high, _ in common)
                yield tuple(slice(low - first, high - first) for _, low, high, first in common), values[inside]
