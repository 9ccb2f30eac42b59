"""A probe is what is kept of a pair of tensors while their tiles pass by: enough to guess why they differ.

Of each row a number made from a few of its elements, a grid of elements, and the first elements. Rows are those of the
tensor as a matrix of ``prod(shape[:-1])`` rows. Guesses from probes are to be confirmed with the bytes.
"""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_left
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt_tool.geometry.columns import Int64Array, distinct

__all__ = ["HEAD", "Numbers", "Probe", "as_numbers", "probe_positions"]

HEAD = 512
"""First elements kept of each side."""
_MAX_ROWS = 1 << 18
_N_POSITIONS = 16
# Odd multipliers: powers of one odd number modulo 2**64, so that no two columns weigh the same.
_WEIGHTS = np.cumprod(np.full(_N_POSITIONS, 0x9E3779B97F4A7C15, dtype=np.uint64))

Numbers = npt.NDArray[np.uint64]


@lru_cache(maxsize=1024)
def probe_positions(size: int) -> Int64Array:
    """Up to 16 positions spread over a dimension, both ends included; a function of its size alone. Read-only.

    >>> probe_positions(3).tolist(), probe_positions(1000).tolist()[:3]
    ([0, 1, 2], [0, 66, 133])
    """
    positions = distinct(np.linspace(0, max(size - 1, 0), min(size, _N_POSITIONS)).astype(np.int64))
    positions.flags.writeable = False
    return positions


def as_numbers(bits: npt.NDArray[Any]) -> Numbers | None:
    """Raw elements as 64-bit numbers that differ where they do; None for widths that have none.

    The two halves of a 16-byte element are mixed.
    """
    if bits.dtype.kind == "u":
        return bits.astype(np.uint64)
    if bits.dtype.itemsize == 16:
        halves = np.ascontiguousarray(bits).view(np.uint64).reshape(*bits.shape, 2)
        mixed: Numbers = halves[..., 0] + halves[..., 1] * _WEIGHTS[1]
        return mixed
    return None


class Probe:
    """Samples of both sides of a pair of one shape and type; safe to use from several threads."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.n_rows = prod(shape[:-1]) if len(shape) > 1 else prod(shape)
        self.n_columns = shape[-1] if len(shape) > 1 else 1
        self._leading = shape[:-1] if len(shape) > 1 else shape
        self._columns = probe_positions(self.n_columns)
        self._rows = probe_positions(self.n_rows)
        self._row_list, self._column_list = self._rows.tolist(), self._columns.tolist()
        self._n_signed = self.n_rows if self.n_rows <= _MAX_ROWS else 0
        self.signatures: list[Numbers] = [np.zeros(0, np.uint64) for _ in range(2)]
        """uint64[n_rows] of A and of B, once a part was signed; empty where there are too many rows."""
        self.grids: list[Numbers] = [np.zeros((len(self._rows), len(self._columns)), np.uint64) for _ in range(2)]
        """uint64[<= 16, <= 16]: elements at `probe_positions` of both dimensions."""
        self.heads: list[Numbers] = [np.zeros(min(HEAD, prod(shape)), np.uint64) for _ in range(2)]
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes that are kept when all is signed."""
        return 16 * self._n_signed + sum(array.nbytes for arrays in (self.grids, self.heads) for array in arrays)

    def add(
        self, a: npt.NDArray[Any], b: npt.NDArray[Any], offsets: tuple[int, ...], sizes: tuple[int, ...], *, same: bool
    ) -> None:
        """Take elements of a tile, a slab in global coordinates; ``same`` says that both sides hold equal bits."""
        width, start, first_row = self._place(offsets, sizes)
        n_rows = a.size // width
        inside = slice(bisect_left(self._row_list, first_row), bisect_left(self._row_list, first_row + n_rows))
        low, high = bisect_left(self._column_list, start), bisect_left(self._column_list, start + width)
        head = first_row * self.n_columns + start
        n_head = len(self.heads[0]) - head
        if inside.start == inside.stop and n_head <= 0:
            return
        rows, columns = self._rows[inside, None] - first_row, self._columns[low:high] - start
        for side, array in enumerate((a,) if same else (a, b)):
            numbers = as_numbers(array.reshape(-1, width)[rows, columns])
            if numbers is None:
                return
            for grid in self.grids if same else (self.grids[side],):
                grid[inside, low:high] = numbers
            elements = as_numbers(array.reshape(-1)[:n_head]) if n_head > 0 else None
            if elements is not None:
                for kept in self.heads if same else (self.heads[side],):
                    kept[head : head + len(elements)] = elements

    def sign(self, a: npt.NDArray[Any], b: npt.NDArray[Any], offsets: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        """Take the numbers of a tile's rows; ``b`` may be ``a`` itself."""
        if not self._n_signed:
            return
        width, start, first_row = self._place(offsets, sizes)
        low, high = bisect_left(self._column_list, start), bisect_left(self._column_list, start + width)
        columns = self._columns[low:high] - start
        for side, array in enumerate((a,) if a is b else (a, b)):
            numbers = as_numbers(array.reshape(-1, width)[:, columns])
            if numbers is None:
                return
            weighed = (numbers * _WEIGHTS[low:high]).sum(axis=1, dtype=np.uint64)
            with self._lock:
                if not len(self.signatures[0]):
                    self.signatures = [np.zeros(self._n_signed, np.uint64) for _ in range(2)]
                for signature in self.signatures if a is b else (self.signatures[side],):
                    signature[first_row : first_row + len(weighed)] += weighed

    def _place(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, int, int]:
        """Width of a slab's rows, the column that they begin at, and the first row."""
        row = 0
        for offset, size in zip(offsets[: len(self._leading)], self._leading, strict=True):
            row = row * size + offset
        return (sizes[-1], offsets[-1], row) if len(sizes) > 1 else (1, 0, row)

    def may_hold_same_columns(self) -> bool:
        """Whether the first rows hold the same elements in any order, as far as they are kept."""
        n, (one, other) = self.n_columns, self.heads
        return n > HEAD or np.array_equal(np.sort(one[:n]), np.sort(other[:n]))

    def digest(self, side: int) -> bytes:
        """A short value that is equal for tensors of equal elements at the places that are looked at."""
        digest = hashlib.blake2b(np.ascontiguousarray(self.grids[side]).tobytes(), digest_size=16)
        digest.update(self.heads[side].tobytes())
        return digest.digest()
