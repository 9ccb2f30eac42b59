"""A worker executes tiles: reads the pieces of a tile into one buffer, writes the buffer's pieces to the target.

Each worker owns its buffers and reuses them: fresh large buffers cost page faults that are dearer than the copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ckpt_tool.checksum import crc32
from ckpt_tool.dtypes import cast_array
from ckpt_tool.engine.base import CastEffect
from ckpt_tool.engine.clones import Clones
from ckpt_tool.engine.elements import count_changes
from ckpt_tool.engine.journal import UnitRecord
from ckpt_tool.engine.piece_rows import PieceRows
from ckpt_tool.engine.tile_digests import TileDigests, UnitDigests
from ckpt_tool.engine.tile_reader import TileReader, piece_slices
from ckpt_tool.plan.model import Plan
from ckpt_tool.storage.read_buffer import ReadBuffer
from ckpt_tool.storage.store import Store

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

    ``ahead_bytes`` may be fetched before they are needed; ``n_workers`` share the requests that the storage likes.
    ``clones`` says what the target may have in common with the source.
    """

    def __init__(
        self,
        plan: Plan,
        store: Store,
        sink: PieceSink,
        *,
        with_crc32: bool,
        digests: TileDigests | None = None,
        ahead_bytes: int,
        n_workers: int = 1,
        clones: Clones | None = None,
    ) -> None:
        self._plan = plan
        self._clones = clones
        self._store = store
        self._sink = sink
        self._with_crc32 = with_crc32
        self._digests = digests
        self._unit: UnitDigests | None = None
        self._reader = TileReader(
            plan.source, plan.tiles, plan.reads, store, ahead_bytes=ahead_bytes, n_workers=n_workers
        )
        self._scratch = self._reader.scratch  # idle once a tile is read
        self._cast = ReadBuffer()
        self._rows = PieceRows(plan.writes, self._are_plain)

    def ahead(self, units: Sequence[int]) -> AbstractContextManager[None]:
        """A block in which these units are executed in this order, without a pause in reading between them."""
        return self._reader.ahead(self._plan.tiles.of_units(units))

    def run_unit(self, unit: int, progress: Callable[[int], None]) -> UnitRecord:
        """Execute all tiles of a unit in order; ``progress`` gets the bytes written, some tens of MB at a time."""
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
        clones = self._clones if self._clones is not None and self._clones.shares_any() else None
        buffer = self._reader.read_bytes(tile)
        view = buffer.data
        written = 0
        takes_pieces = self._sum_tile(tile, buffer)
        for row, is_plain, file, offset, begin, length in self._rows.of(tile):
            data = view[begin : begin + length] if is_plain else self._packed_piece(row, tile, buffer, casts)
            for start, end in ((0, length),) if clones is None else clones.share(row):
                if start < end:
                    self._sink.write(target[file], offset + start, data[start:end])
            if self._with_crc32:
                crcs.append((row, crc32(data)))
                if takes_pieces and self._unit is not None:
                    self._unit.add_piece(row, tile, length, crcs[-1][1])
            written += length
        return written

    def _are_plain(self, rows: slice) -> npt.NDArray[np.bool_]:
        """bool[n]: pieces that are one run of their tile, in the type that the target has."""
        writes = self._plan.writes
        tensor = self._plan.target.chunks.tensor[writes.chunk[rows]]
        are_plain: npt.NDArray[np.bool_] = writes.is_packed_in_tile[rows] & ~self._plan.is_cast[tensor]
        return are_plain

    def _sum_tile(self, tile: int, buffer: npt.NDArray[np.uint8]) -> bool:
        """Add a tile to the digests, unless the CRCs of its pieces are all that they need; whether they are."""
        if self._digests is None or self._unit is None:
            return False
        if self._with_crc32 and self._digests.takes_pieces(tile):
            return True
        self._unit.add_tile(tile, buffer)
        return False

    def _packed_piece(
        self, row: int, tile: int, buffer: npt.NDArray[np.uint8], casts: dict[str, CastEffect]
    ) -> memoryview:
        """The bytes of one target piece that is not plain, packed; valid until the next call."""
        plan, writes = self._plan, self._plan.writes
        target = int(plan.target.chunks.tensor[writes.chunk[row]])
        before = plan.source.tensors.dtypes[int(plan.tiles.tensor[tile])]
        after = plan.target.tensors.dtypes[target]
        length = int(writes.length[row])
        values = self._reader.elements(tile, buffer)[piece_slices(plan.tiles, writes, row)]
        if before == after:
            packed = self._scratch.take(length)
            packed.view(values.dtype).reshape(writes.sizes[row])[...] = values
            return packed.data
        values = values.view(before.as_numpy())
        packed = self._cast.take(length)
        result = packed.view(after.as_numpy()).reshape(writes.sizes[row])
        with np.errstate(over="ignore", invalid="ignore"):
            result[...] = cast_array(values, after)
            effect = count_changes(values, result)
        fqn = plan.target.tensors.fqns[target]
        casts[fqn] = casts.get(fqn, CastEffect()).merged(effect)
        if self._unit is not None:
            self._unit.add_cast(row, tile, packed, after)
        return packed.data
