"""Digests on the way: what each tensor of a target holds, summed from the tiles while they are in memory.

Of a target whose tensors are views (split, joined, renamed), also what the tensors hold that they were made of: the
same bytes in another order. A unit's sums are a few numbers, which the journal keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ckpt_tool.checksum import crc32
from ckpt_tool.dtypes import DType
from ckpt_tool.engine.base import TakenDigests
from ckpt_tool.geometry.join import Boxes, Pairs, is_packed_in, join_boxes
from ckpt_tool.geometry.overlaps import exact_duplicates
from ckpt_tool.geometry.runs import contiguous_strides_columns
from ckpt_tool.manifest.digest import ContentDigest, Part, content_digest, linear_forms
from ckpt_tool.manifest.model import TensorMeta
from ckpt_tool.manifest.tables import IntArray
from ckpt_tool.plan.model import Plan

if TYPE_CHECKING:
    from ckpt_tool.layout.origins import Origins

__all__ = ["DigestSum", "TileDigests", "UnitDigests"]

DigestSum = tuple[int, int, int]
"""Number of the tensor (target rows, then originals), bytes summed, their share of the CRC-32's linear form."""


class TileDigests:
    """Where each tile's bytes lie in the tensors that digests are taken of; shared by all workers of a run."""

    def __init__(self, plan: Plan, origins: Origins | None) -> None:
        source, target = plan.source.tensors, plan.target.tensors
        self._plan = plan
        self._origins = origins
        self._n_targets = len(target)
        self._target_row = np.full(len(source), -1, dtype=np.int64)
        self._target_row[plan.source_tensor] = np.arange(len(target))
        tiles = plan.tiles
        self.is_cast = plan.is_cast[self._target_row[tiles.tensor]]
        shape = _fit(source.shape[tiles.tensor], tiles.sizes.shape[1])
        self.itemsize = np.maximum(source.bits[tiles.tensor] // 8, 1)
        self._strides = contiguous_strides_columns(shape)
        self._start = (tiles.offsets * self._strides).sum(axis=1) * source.bits[tiles.tensor] // 8
        self._is_run = is_packed_in(tiles.sizes, shape)
        self._is_first, self._covers = _pieces_once(plan)
        self._total = [*target.nbytes.tolist()]
        self._faces: Pairs | None = None
        if origins is not None:
            self._follow(origins)

    def _follow(self, origins: Origins) -> None:
        tiles = self._plan.tiles
        source = self._plan.source.tensors
        width = tiles.sizes.shape[1]
        rows = [row for row, fqn in enumerate(origins.fqns) if fqn in source.index]
        key = np.array([source.index[origins.fqns[row]] for row in rows], dtype=np.int64)
        self._face_rows = np.array(rows, dtype=np.int64)
        self._face_offsets = _padded([origins.offsets[row] for row in rows], width, 0)
        sizes = _padded([origins.sizes[row] for row in rows], width, 1)
        self._face_strides = _padded([origins.strides[row] for row in rows], width, 1)
        pairs = join_boxes(
            Boxes(key, self._face_offsets, sizes), Boxes(tiles.tensor.astype(np.int64), tiles.offsets, tiles.sizes)
        )
        self._faces = pairs.take(np.argsort(pairs.right, kind="stable"))
        self._face_bounds = np.searchsorted(self._faces.right, np.arange(len(tiles) + 1)).tolist()
        self._total += [_nbytes(meta) for meta in origins.originals]

    def unit(self) -> UnitDigests:
        """Sums of one unit, empty."""
        return UnitDigests(self)

    def row_of(self, tile: int) -> int:
        """The target's row of a tile's tensor."""
        return int(self._target_row[self._plan.tiles.tensor[tile]])

    def takes_pieces(self, tile: int) -> bool:
        """Whether the CRCs of the pieces that a tile is written in are all that its digest needs."""
        if self._faces is not None and self._face_bounds[tile + 1] > self._face_bounds[tile]:
            return False
        return bool(self._is_run[tile] and self._covers[tile] and not self.is_cast[tile])

    def is_first(self, piece: int) -> bool:
        """Whether no earlier piece of the tile is the same box."""
        return bool(self._is_first[piece])

    def piece_start(self, piece: int, tile: int) -> int:
        """First byte of a packed piece in its tensor."""
        return int(self._start[tile] + self._plan.writes.tile_offset[piece])

    def tile_runs(self, tile: int) -> tuple[IntArray, IntArray, int]:
        """Runs of a tile in its tensor: first bytes in the tile, in the tensor, and their length."""
        sizes = self._plan.tiles.sizes[tile]
        nbytes, itemsize = int(self._plan.tiles.nbytes[tile]), int(self.itemsize[tile])
        if self._is_run[tile]:
            return np.zeros(1, np.int64), self._start[tile : tile + 1], nbytes
        at, there, length = _common_runs(sizes, sizes, self._strides[tile])
        return at * itemsize, int(self._start[tile]) + there * itemsize, length * itemsize

    def piece_runs(self, piece: int, tile: int, target: DType) -> tuple[IntArray, IntArray, int]:
        """Runs of a piece in its tensor's target type: first bytes in the packed piece, in the tensor, their length."""
        writes = self._plan.writes
        sizes = writes.sizes[piece]
        first = int((writes.offsets[piece] * self._strides[tile]).sum())
        at, there, length = _common_runs(sizes, sizes, self._strides[tile])
        width = target.bits // 8
        return at * width, (first + there) * width, length * width

    def origin_runs(self, tile: int) -> list[tuple[int, IntArray, IntArray, int]]:
        """Runs of a tile in originals: number of the original, first bytes in the tile, in the original, length."""
        if self._faces is None or self._origins is None:
            return []
        found = []
        itemsize = int(self.itemsize[tile])
        tiles, pairs = self._plan.tiles, self._faces
        tile_strides = contiguous_strides_columns(tiles.sizes[tile][None])[0]
        for row in range(self._face_bounds[tile], self._face_bounds[tile + 1]):
            face = int(pairs.left[row])
            number = int(self._face_rows[face])
            strides = self._face_strides[face]
            low = pairs.offsets[row]
            at, there, length = _common_runs(pairs.sizes[row], tiles.sizes[tile], strides)
            at0 = int(((low - tiles.offsets[tile]) * tile_strides).sum())
            there0 = int(self._origins.start[number] + ((low - self._face_offsets[face]) * strides).sum())
            original = self._n_targets + int(self._origins.original[number])
            found.append((original, (at0 + at) * itemsize, (there0 + there) * itemsize, length * itemsize))
        return found

    def total(self, numbers: IntArray) -> IntArray:
        """int64[n]: bytes of the tensors that these numbers mean."""
        return np.asarray(self._total, dtype=np.int64)[numbers]

    def digests(self, sums: Sequence[DigestSum]) -> TakenDigests:
        """The sums of all units put together."""
        added: dict[int, Part] = {}
        for number, nbytes, linear in sums:
            added[number] = added.get(number, Part()) + Part(nbytes, linear)
        target = self._plan.target.tensors
        found: dict[int, ContentDigest] = {}
        for row in range(self._n_targets):
            part, total = added.get(row, Part()), int(target.nbytes[row])
            if part.nbytes == total:
                found[row] = content_digest(part, target.dtypes[row].name, target.shape_of(row), total, wide=False)
        originals = []
        for number, meta in enumerate(self._origins.originals if self._origins is not None else ()):
            part, total = added.get(self._n_targets + number, Part()), _nbytes(meta)
            if part.nbytes == total:
                originals.append((meta, content_digest(part, meta.dtype.name, meta.shape, total, wide=False)))
        return TakenDigests(found, tuple(originals))


class UnitDigests:
    """What the tiles of one unit add; for one thread."""

    def __init__(self, tiles: TileDigests) -> None:
        self._tiles = tiles
        self._rows: list[tuple[int, int, int, int]] = []  # number, first byte in the tensor, bytes, CRC-32

    def add_tile(self, tile: int, data: npt.NDArray[np.uint8]) -> None:
        """Take in the bytes of a tile, before they are cast."""
        row = self._tiles.row_of(tile)
        runs = self._tiles.origin_runs(tile)
        if not self._tiles.is_cast[tile]:
            runs = [*runs, (row, *self._tiles.tile_runs(tile))]
        known: dict[tuple[int, int], int] = {}
        for number, at, there, length in runs:
            for begin, start in zip(at.tolist(), there.tolist(), strict=True):
                crc = known.get((begin, length))
                if crc is None:
                    crc = known[begin, length] = crc32(data[begin : begin + length].data)
                self._rows.append((number, start, length, crc))

    def add_piece(self, piece: int, tile: int, nbytes: int, crc: int) -> None:
        """Take in a packed piece whose CRC-32 is known."""
        if self._tiles.is_first(piece):
            row = self._tiles.row_of(tile)
            self._rows.append((row, self._tiles.piece_start(piece, tile), nbytes, crc))

    def add_cast(self, piece: int, tile: int, data: npt.NDArray[np.uint8], dtype: DType) -> None:
        """Take in a piece that was cast."""
        if self._tiles.is_first(piece):
            at, there, length = self._tiles.piece_runs(piece, tile, dtype)
            row = self._tiles.row_of(tile)
            for begin, start in zip(at.tolist(), there.tolist(), strict=True):
                self._rows.append((row, start, length, crc32(data[begin : begin + length].data)))

    def sums(self) -> tuple[DigestSum, ...]:
        """What was taken in, by tensor."""
        if not self._rows:
            return ()
        number, start, nbytes, crc = np.array(self._rows, dtype=np.int64).T
        forms = linear_forms(crc.astype(np.uint32), nbytes, self._tiles.total(number) - start - nbytes)
        numbers, place = np.unique(number, return_inverse=True)
        linear = np.zeros(len(numbers), dtype=np.uint32)
        np.bitwise_xor.at(linear, place, forms)
        summed = np.bincount(place, weights=nbytes).astype(np.int64)
        return tuple(zip(numbers.tolist(), summed.tolist(), linear.tolist(), strict=True))


def _pieces_once(plan: Plan) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """bool[n_pieces]: no earlier piece is the same box; bool[n_tiles]: these are packed runs and add up to the tile."""
    writes, tiles = plan.writes, plan.tiles
    first = exact_duplicates(writes.offsets, writes.sizes, writes.tile.astype(np.int64))
    is_first = first == np.arange(len(writes))
    chosen = np.flatnonzero(is_first)
    summed = np.bincount(writes.tile[chosen], weights=writes.length[chosen], minlength=len(tiles))
    is_packed = np.ones(len(tiles), dtype=bool)
    is_packed[writes.tile[chosen][~writes.is_packed_in_tile[chosen]]] = False
    # Packed runs that overlap and leave a hole of the same size would add up too: boxes of one tile do not overlap
    # unless a region is one box, and then there is but one.
    return is_first, is_packed & (summed == tiles.nbytes)


def _common_runs(sizes: IntArray, container: IntArray, strides: IntArray) -> tuple[IntArray, IntArray, int]:
    """Runs that a box has both in a packed container of other sizes and in an array of these strides, in elements.

    First elements in the container and in the array, both counted from the box's first, and the length of each run.
    """
    packed = contiguous_strides_columns(container[None])[0].tolist()
    length, outer = 1, len(sizes)
    counts, along = sizes.tolist(), strides.tolist()
    for dim in range(len(sizes) - 1, -1, -1):
        if counts[dim] != 1 and not (along[dim] == length == packed[dim]):
            break
        length *= counts[dim]
        outer = dim
    at, there = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    for dim in range(outer):
        steps = np.arange(counts[dim], dtype=np.int64)
        at = (at[:, None] + steps * packed[dim]).reshape(-1)
        there = (there[:, None] + steps * along[dim]).reshape(-1)
    return at, there, length


def _nbytes(meta: TensorMeta) -> int:
    return meta.dtype.nbytes(int(np.prod(meta.shape, dtype=np.int64)))


def _fit(columns: IntArray, width: int) -> IntArray:
    """Columns of sizes in another width; what is cut off or added has size 1."""
    if columns.shape[1] >= width:
        return columns[:, :width]
    return np.concatenate([columns, np.ones((len(columns), width - columns.shape[1]), dtype=np.int64)], axis=1)


def _padded(rows: Sequence[tuple[int, ...]], width: int, fill: int) -> IntArray:
    padded = np.full((len(rows), width), fill, dtype=np.int64)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    return padded
