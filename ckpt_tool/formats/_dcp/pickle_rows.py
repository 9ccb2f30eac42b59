"""Records of which a pickle holds very many, made as rows of equal length: constant bytes and columns of numbers.

A column's numbers all get the narrowest opcode that holds the largest of them. What is smaller could do with less, but
rows of one length are put together by numpy, a few nanoseconds a number. Knows no record in particular.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ckpt_tool.records import dataclass

__all__ = ["Column", "Recalled", "Rows"]

Column: TypeAlias = npt.NDArray[np.integer[Any]]

_ROWS_AT_ONCE = 2048
"""What is made at once stays in the caches while its columns are filled in."""


@dataclass(frozen=True, slots=True, eq=False)
class Recalled:
    """A column of values that the pickle remembers, by their numbers."""

    number: Column


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """Constant bytes and the column (as little-endian numbers of ``kind``) that follows them, if any."""

    opcode: bytes
    column: Column | None = None
    kind: np.dtype[Any] | None = None

    @property
    def nbytes(self) -> int:
        return len(self.opcode) + (0 if self.kind is None else self.kind.itemsize)


@dataclass(frozen=True, eq=False)
class Rows:
    """Equally long records; ``parts`` are constant bytes, columns of whole numbers from 0, and `Recalled` columns.

    ``rows`` are those of the columns that have a record, None for all ``n``; nothing of a column is copied.
    """

    n: int
    parts: Sequence[bytes | Column | Recalled]
    rows: npt.NDArray[np.int32] | None = None

    @cached_property
    def _pieces(self) -> list[_Piece]:
        return [_Piece(part) if isinstance(part, bytes) else _piece(part, self.rows) for part in self.parts]

    @cached_property
    def row_nbytes(self) -> int:
        """Length of one record."""
        return sum(piece.nbytes for piece in self._pieces)

    def written(self, first: int, stop: int) -> Iterator[memoryview]:
        """The records ``first:stop``, a part at a time, which is good until the next one is asked for.

        Cost: each block of records is made once where ranges follow each other.
        """
        while first < stop:
            number, at = divmod(first, _ROWS_AT_ONCE)
            end = min(at + stop - first, _ROWS_AT_ONCE)
            yield self._blocks.made(number)[at:end].reshape(-1).data
            first += end - at

    @cached_property
    def _blocks(self) -> _Blocks:
        return _Blocks(self._pieces, self.rows, self.n)


class _Blocks:
    """Blocks of records, each in the place of the one before it."""

    def __init__(self, pieces: Sequence[_Piece], rows: npt.NDArray[np.int32] | None, n: int) -> None:
        self._pieces, self._rows, self._n = pieces, rows, n
        template = b"".join(piece.opcode.ljust(piece.nbytes, b"\0") for piece in pieces)
        self._block = np.empty((min(n, _ROWS_AT_ONCE), len(template)), dtype=np.uint8)
        self._block[:] = np.frombuffer(template, dtype=np.uint8)
        self._number = -1

    def made(self, number: int) -> npt.NDArray[np.uint8]:
        """uint8[n, row_nbytes]: the block of that number."""
        if number != self._number:
            own: slice | npt.NDArray[np.int32] = slice(number * _ROWS_AT_ONCE, (number + 1) * _ROWS_AT_ONCE)
            count = min(self._n - number * _ROWS_AT_ONCE, _ROWS_AT_ONCE)
            own = own if self._rows is None else self._rows[own]
            at = 0
            for piece in self._pieces:
                if piece.column is not None:
                    numbers = piece.column[own].astype(piece.kind).view(np.uint8)
                    self._block[:count, at + len(piece.opcode) : at + piece.nbytes] = numbers.reshape(count, -1)
                at += piece.nbytes
            self._number = number
        return self._block


def _piece(part: Column | Recalled, rows: npt.NDArray[np.int32] | None) -> _Piece:
    column = part.number if isinstance(part, Recalled) else part
    largest = int((column if rows is None else column[rows]).max(initial=0))
    if isinstance(part, Recalled):
        opcode, kind = (b"h", "<u1") if largest < 1 << 8 else (b"j", "<u4")
        return _Piece(opcode, column, np.dtype(kind))
    for limit, opcode, kind in ((1 << 8, b"K", "<u1"), (1 << 16, b"M", "<u2"), (1 << 31, b"J", "<i4")):
        if largest < limit:
            return _Piece(opcode, column, np.dtype(kind))
    return _Piece(b"\x8a\x08", column, np.dtype("<i8"))
