"""A landing is memory that one box of a tensor is to be put into; filling takes tiles of a plan to landings.

The plan's target is a manifest whose "files" are ranks and whose byte positions are only places in a list, so that the
planner need not know of memory. Knows no torch: memory is what has an array of numbers, or takes elements by a call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ckpt_tool.dtypes import DType
from ckpt_tool.engine.elements import bit_dtype
from ckpt_tool.engine.journal import UnitRecord
from ckpt_tool.engine.tile_reader import TileReader, piece_slices
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.model import FileEntry, Manifest
from ckpt_tool.manifest.tables import ChunkTable, FileTable, IntArray
from ckpt_tool.plan.model import Plan
from ckpt_tool.storage.store import Store

__all__ = ["Filler", "Landing", "Memory", "PieceTaker", "box_rows", "packed_nbytes", "put_piece", "rank_manifest"]


_AHEAD_BYTES = 32 << 20
_AHEAD_REQUESTS = 4
"""Of each filler: several share a rank's storage."""


class Memory(Protocol):
    """Writable elements of one box."""

    array: npt.NDArray[Any] | None
    """Numbers of the element's width, of the box's sizes and with any strides; None where only ``put`` works."""

    def put(self, index: tuple[slice, ...], elements: npt.NDArray[Any]) -> None:
        """Set the elements at ``index``; ``elements`` are numbers of the same width."""
        ...


@dataclass(frozen=True, slots=True)
class Landing:
    """Where one box goes."""

    tensor: int
    """Row of the source's tensor table."""
    box: Box
    """In global coordinates."""
    dtype: DType
    """Element type of the memory; a cast where it is not that of the source."""
    memory: Memory


def box_rows(boxes: list[tuple[int, Box]], width: int) -> IntArray:
    """``int64[n, 1 + 2 * width]``: tensor, offsets and sizes of each box, padded behind with offset 0 and size 1."""
    rows = np.zeros((len(boxes), 1 + 2 * width), dtype=np.int64)
    rows[:, 1 + width :] = 1
    for row, (tensor, box) in enumerate(boxes):
        rows[row, 0] = tensor
        rows[row, 1 : 1 + box.ndim] = box.offsets
        rows[row, 1 + width : 1 + width + box.ndim] = box.sizes
    return rows


def rank_manifest(source: Manifest, rows_of_rank: Mapping[int, IntArray], world_size: int) -> Manifest:
    """A manifest whose file ``r`` is rank ``r`` and whose chunks are the `box_rows` of the ranks, in their order."""
    width = source.tensors.shape.shape[1]
    ranks = sorted(rows_of_rank)
    rows = np.concatenate([np.zeros((0, 1 + 2 * width), dtype=np.int64), *(rows_of_rank[rank] for rank in ranks)])
    rank = np.repeat(np.array(ranks, dtype=np.int64), [len(rows_of_rank[rank]) for rank in ranks])
    sizes = rows[:, 1 + width :]
    length = np.prod(sizes, axis=1) * source.tensors.bits[rows[:, 0]] // 8
    end = np.cumsum(length)
    chunks = ChunkTable.from_columns(
        tensor=rows[:, 0], offsets=rows[:, 1 : 1 + width].reshape(-1), sizes=sizes.reshape(-1), file=rank,
        offset=end - length, length=length, rank=rank,
    )  # fmt: skip
    if len(chunks) and not width:
        chunks = chunks.replace(offsets=rows[:, 1:1], sizes=rows[:, 1:1])
    files = FileTable(tuple(FileEntry(f"rank {number}", -1) for number in range(world_size)))
    return Manifest("memory", "memory", source.tensors, chunks, files)


def put_piece(landing: Landing, plan: Plan, row: int, elements: npt.NDArray[Any], source_dtype: DType) -> None:
    """Put the elements of a written piece of ``plan`` into the landing of its chunk, cast where types differ."""
    sizes = plan.writes.sizes[row, : landing.box.ndim].tolist()
    start = (plan.writes.offsets[row] - plan.target.chunks.offsets[plan.writes.chunk[row]])[: landing.box.ndim].tolist()
    index = tuple(slice(o, o + s) for o, s in zip(start, sizes, strict=True))
    piece = elements.reshape(sizes)
    if landing.dtype != source_dtype:
        values = np.ascontiguousarray(piece).reshape(-1).view(source_dtype.as_numpy())
        with np.errstate(over="ignore", invalid="ignore"):
            piece = values.astype(landing.dtype.as_numpy()).view(bit_dtype(landing.dtype)).reshape(sizes)
    landing.memory.put(index, piece)


def packed_nbytes(plan: Plan) -> IntArray:
    """int64[m]: bytes of the elements of each written piece, wherever its landing puts them."""
    bits = plan.source.tensors.bits[plan.tiles.tensor[plan.writes.tile]]
    nbytes: IntArray = np.prod(plan.writes.sizes, axis=1, dtype=np.int64) * bits // 8
    return nbytes


class PieceTaker(Protocol):
    """Takes the pieces of a tile that are for other ranks."""

    def __call__(self, row: int, elements: npt.NDArray[Any]) -> None:
        """Copy the elements of the plan's written piece ``row``; they are overwritten by the next tile."""
        ...


class Filler:
    """Reads tiles of a plan and puts their pieces into landings; for one thread."""

    def __init__(
        self, plan: Plan, store: Store, landings: Mapping[int, Landing], take_other: PieceTaker | None = None
    ) -> None:
        self._plan = plan
        self._landings = landings
        self._take_other = take_other
        self._reader = TileReader(plan.source, plan.tiles, plan.reads, store)

    @property
    def read_nbytes(self) -> int:
        """Bytes read so far."""
        return self._reader.read_nbytes

    def ahead(self, units: Sequence[int]) -> AbstractContextManager[None]:
        """A block in which these units are filled in this order; slow storage is asked before."""
        tiles = self._plan.tiles.of_units(units)
        return self._reader.ahead(tiles, max_bytes=_AHEAD_BYTES, concurrency=_AHEAD_REQUESTS)

    def run_unit(self, unit: int, progress: Any) -> UnitRecord:
        """Fill from all tiles of a unit; ``progress`` gets the bytes of each tile."""
        with self.ahead([unit]):
            for tile in self._plan.tiles.of_units([unit]):
                self.fill(tile)
                progress(int(self._plan.tiles.nbytes[tile]))
        return UnitRecord(unit, (), ())

    def fill(self, tile: int) -> None:
        """Read one tile and put its pieces in place."""
        plan, writes = self._plan, self._plan.writes
        dtype = plan.source.tensors.dtypes[int(plan.tiles.tensor[tile])]
        rows = list(range(int(writes.starts[tile]), int(writes.starts[tile + 1])))
        direct = self._direct_row(tile, dtype, rows)
        if direct is None:
            elements = self._reader.read(tile)
        else:
            row, memory = direct
            elements = self._reader.read(tile, memory.reshape(-1).view(np.uint8))
            rows.remove(row)
        for row in rows:
            piece = (
                elements if elements.ndim == 1 and dtype.bits % 8 else elements[piece_slices(plan.tiles, writes, row)]
            )
            landing = self._landings.get(int(writes.chunk[row]))
            if landing is not None:
                put_piece(landing, plan, row, piece, dtype)
            elif self._take_other is not None:
                self._take_other(row, piece)

    def _direct_row(self, tile: int, dtype: DType, rows: list[int]) -> tuple[int, npt.NDArray[Any]] | None:
        """A written piece that is the whole tile and lies in one run of this rank's memory: it is read into place."""
        plan, writes = self._plan, self._plan.writes
        for row in rows:
            chunk = int(writes.chunk[row])
            landing = self._landings.get(chunk)
            if landing is None or landing.memory.array is None or landing.dtype != dtype:
                continue
            if not np.array_equal(writes.sizes[row], plan.tiles.sizes[tile]):
                continue
            start = (writes.offsets[row] - plan.target.chunks.offsets[chunk])[: landing.box.ndim].tolist()
            sizes = writes.sizes[row, : landing.box.ndim].tolist()
            index: Any = (*(slice(o, o + s) for o, s in zip(start, sizes, strict=True)), ...)
            memory: npt.NDArray[Any] = landing.memory.array[index]
            if memory.flags.c_contiguous:
                return row, memory
        return None
