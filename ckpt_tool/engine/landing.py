"""A landing is memory that one box of a tensor is to be put into; filling takes tiles of a plan to landings.

The plan's target is a manifest whose "files" are ranks and whose byte positions are only places in a list, so that the
planner need not know of memory. Knows no torch: memory is what has an array of numbers, or takes elements by a call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ckpt_tool.dtypes import DType, cast_array
from ckpt_tool.engine.elements import bit_dtype
from ckpt_tool.engine.tile_reader import TileReader
from ckpt_tool.geometry.box import Box
from ckpt_tool.geometry.columns import distinct
from ckpt_tool.manifest.model import FileEntry, Manifest
from ckpt_tool.manifest.tables import ChunkTable, FileTable, IntArray
from ckpt_tool.plan.model import Plan
from ckpt_tool.records import dataclass
from ckpt_tool.storage.read_buffer import plain_memory
from ckpt_tool.storage.store import Store

__all__ = [
    "Filler",
    "Landing",
    "Memory",
    "PieceTaker",
    "Places",
    "box_rows",
    "packed_nbytes",
    "put_elements",
    "rank_manifest",
]


_AHEAD_BYTES = 32 << 20
_N_SHARING = 4
"""Fillers that share a rank's storage, about."""


class Memory(Protocol):
    """Writable elements of one box."""

    array: npt.NDArray[Any] | None
    """Numbers of the element's width, of the box's sizes and with any strides; None where only ``put`` works."""

    def put(self, index: tuple[slice, ...], elements: npt.NDArray[Any]) -> None:
        """Set the elements at ``index``; ``elements`` are numbers of the same width."""
        ...

    def buffer(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """uint8[nbytes] out of which ``put`` takes elements fastest."""
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


def put_elements(landing: Landing, index: tuple[slice, ...], elements: npt.NDArray[Any], source: DType) -> None:
    """Put elements of type ``source`` into the landing at ``index`` of its box, cast where types differ."""
    if landing.dtype != source:
        values = np.ascontiguousarray(elements).reshape(-1).view(source.as_numpy())
        with np.errstate(over="ignore", invalid="ignore"):
            cast = cast_array(values, landing.dtype)
        elements = cast.view(bit_dtype(landing.dtype)).reshape(elements.shape)
    landing.memory.put(index, elements)


def packed_nbytes(plan: Plan) -> IntArray:
    """int64[m]: bytes of the elements of each written piece, wherever its landing puts them."""
    bits = plan.source.tensors.bits[plan.tiles.tensor[plan.writes.tile]]
    nbytes: IntArray = np.prod(plan.writes.sizes, axis=1, dtype=np.int64) * bits // 8
    return nbytes


class Places:
    """Where written pieces of a plan lie, in their tile and in their landing, as indices of arrays; made once.

    Args:
        plan: what is written.
        rows: int64[n], ascending: the written pieces that are asked for.
    """

    def __init__(self, plan: Plan, rows: IntArray) -> None:
        writes, tiles, boxes = plan.writes, plan.tiles, plan.target.chunks
        tile, chunk = writes.tile[rows], writes.chunk[rows]
        ndim = plan.source.tensors.ndim[tiles.tensor[tile]].tolist()
        sizes = writes.sizes[rows]
        width = boxes.offsets.shape[1]
        self.row: list[int] = rows.tolist()
        self.chunk: list[int] = chunk.tolist()
        self._sizes, self._ndim = sizes, ndim
        self.in_tile = _slices(writes.offsets[rows] - tiles.offsets[tile], sizes, ndim)
        self.in_box = _slices(writes.offsets[rows, :width] - boxes.offsets[chunk], sizes[:, :width], ndim)
        self._starts: list[int] = np.searchsorted(tile, np.arange(len(tiles) + 1)).tolist()
        dtypes = plan.source.tensors.dtypes
        kinds = {number: bit_dtype(dtypes[number]) for number in distinct(tiles.tensor[tile]).tolist()}
        self._forms = {
            at: (dtypes[tensor], kinds[tensor], tuple(shape[:n]) if dtypes[tensor].bits % 8 == 0 else None)
            for at, tensor, n, shape in zip(
                tile.tolist(), tiles.tensor[tile].tolist(), ndim, tiles.sizes[tile].tolist(), strict=True
            )
        }

    @cached_property
    def sizes(self) -> list[tuple[int, ...]]:
        """Of each piece."""
        return [tuple(held[:n]) for held, n in zip(self._sizes.tolist(), self._ndim, strict=True)]

    def of_tile(self, tile: int) -> range:
        """Positions of a tile's pieces in the lists."""
        return range(self._starts[tile], self._starts[tile + 1])

    def form(self, tile: int) -> tuple[DType, np.dtype[Any], tuple[int, ...] | None]:
        """Of a tile with pieces: its type, that of numbers of its width, and its shape; None where it stays bytes."""
        return self._forms[tile]


def _slices(start: IntArray, sizes: IntArray, ndim: list[int]) -> list[tuple[slice, ...]]:
    """Indices of boxes of ``ndim`` dimensions; both columns have padding behind."""
    bounds = zip(start.tolist(), (start + sizes).tolist(), ndim, strict=True)
    return [tuple(map(slice, low[:n], high)) for low, high, n in bounds]


class PieceTaker(Protocol):
    """Takes the pieces of a tile that are for other ranks."""

    def __call__(self, row: int, elements: npt.NDArray[Any]) -> None:
        """Copy the elements of the plan's written piece ``row``; they are overwritten by the next tile."""
        ...


class Filler:
    """Reads tiles of a plan and puts their pieces into landings; for one thread."""

    def __init__(
        self,
        plan: Plan,
        store: Store,
        landings: Mapping[int, Landing],
        places: Places,
        take_other: PieceTaker | None = None,
    ) -> None:
        self._places, self._landings = places, landings
        self._take_other = take_other
        devices = (each.memory.buffer for each in landings.values() if each.memory.array is None)
        self._reader = TileReader(
            plan.source, plan.tiles, plan.reads, store, ahead_bytes=_AHEAD_BYTES, n_workers=_N_SHARING,
            allocate=next(devices, plain_memory),
        )  # fmt: skip

    @property
    def read_nbytes(self) -> int:
        """Bytes read so far."""
        return self._reader.read_nbytes

    def ahead(self, tiles: Iterable[int]) -> AbstractContextManager[None]:
        """A block in which these tiles are filled in this order; slow storage is asked before."""
        return self._reader.ahead(tiles)

    def fill(self, tile: int) -> None:
        """Read one tile and put its pieces in place."""
        self.place(tile, self._reader.read(tile))

    def read(self, tile: int, into: npt.NDArray[np.uint8]) -> None:
        """Read one tile into ``into``, uint8 of its size."""
        self._reader.read_bytes(tile, into)

    def place(self, tile: int, elements: npt.NDArray[Any]) -> None:
        """Put the pieces of a tile in place; ``elements`` are its content, as numbers or bytes, of any shape."""
        places = self._places
        pieces = places.of_tile(tile)
        if not pieces:
            return
        dtype, kind, shape = places.form(tile)
        numbers = elements.view(kind)
        if shape is not None:
            numbers = numbers.reshape(shape)
        for at in pieces:
            piece = numbers if shape is None else numbers[places.in_tile[at]]
            landing = self._landings.get(places.chunk[at])
            if landing is not None:
                put_elements(landing, places.in_box[at], piece, dtype)
            elif self._take_other is not None:
                self._take_other(places.row[at], piece)
