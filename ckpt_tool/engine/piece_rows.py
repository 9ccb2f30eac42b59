"""Pieces of tiles as rows of plain numbers, some tiles at a time: out of an array each costs ten times as much."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ckpt_tool.plan.model import Pieces

__all__ = ["PieceRow", "PieceRows"]

_MAX_TILES = 64
_MAX_ROWS = 4096

PieceRow = tuple[int, bool, int, int, int, int]
"""Row of the pieces, whether it is plain, row of the file, first byte there and in the tile, length in bytes."""


class PieceRows:
    """The pieces of each tile; quick where tiles are asked for in their order. For one thread.

    Args:
        pieces: of all tiles.
        are_plain: bool[n] for a slice of rows: pieces that are bytes of the tile's buffer as they stand.
    """

    def __init__(self, pieces: Pieces, are_plain: Callable[[slice], npt.NDArray[np.bool_]]) -> None:
        self._pieces = pieces
        self._are_plain = are_plain
        self._first = 0
        self._loaded: list[list[PieceRow]] = []

    def of(self, tile: int) -> list[PieceRow]:
        """Pieces of one tile, in their order."""
        at = tile - self._first
        if not 0 <= at < len(self._loaded):
            self._load(tile)
            at = 0
        return self._loaded[at]

    def _load(self, tile: int) -> None:
        """Take in as many tiles from this one on as are few rows together, and one at least."""
        pieces = self._pieces
        starts = pieces.starts[tile : tile + _MAX_TILES + 1]
        n_tiles = max(int(np.searchsorted(starts, starts[0] + _MAX_ROWS, side="right")) - 1, 1)
        bounds = starts[: n_tiles + 1].tolist()
        rows = slice(bounds[0], bounds[-1])
        columns = (pieces.file, pieces.file_offset, pieces.tile_offset, pieces.length)
        numbers = (column[rows].tolist() for column in columns)
        loaded = list(zip(range(rows.start, rows.stop), self._are_plain(rows).tolist(), *numbers, strict=True))
        self._first = tile
        self._loaded = [loaded[low - rows.start : high - rows.start] for low, high in pairwise(bounds)]
