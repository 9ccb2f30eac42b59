"""Records of which a pickle holds very many, made as rows of equal length: constant bytes and columns of numbers.

A column's numbers all get the narrowest opcode that holds the largest of them. What is smaller could do with less, but
rows of one length are put together by numpy, a few nanoseconds a number. Knows no record in particular.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt_tool.manifest.tables import IntArray
from ckpt_tool.records import dataclass

__all__ = ["Recalled", "Rows"]

_ROWS_AT_ONCE = 2048
"""What is made at once stays in the caches while its columns are filled in."""


@dataclass(frozen=True, slots=True, eq=False)
class Recalled:
    """A column of values that the pickle remembers, by their numbers."""

    number: IntArray


@dataclass(frozen=True, eq=False)
class Rows:
    """Equally long records; ``parts`` are constant bytes, columns of whole numbers from 0, and `Recalled` columns."""

    n: int
    parts: Sequence[bytes | IntArray | Recalled]

    @cached_property
    def _pieces(self) -> list[tuple[bytes, npt.NDArray[Any] | None]]:
        """Constant bytes, each with the column (as little-endian numbers) that follows it, if any."""
        pieces: list[tuple[bytes, npt.NDArray[Any] | None]] = []
        for part in self.parts:
            if isinstance(part, bytes):
                pieces.append((part, None))
            else:
                pieces.append(_column(part))
        return pieces

    @cached_property
    def row_nbytes(self) -> int:
        """Length of one record."""
        return sum(len(opcode) + (0 if column is None else column.itemsize) for opcode, column in self._pieces)

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
        return _Blocks(self.n, self.row_nbytes, self._pieces)


class _Blocks:
    """Blocks of records, each in the place of the one before it."""

    def __init__(self, n: int, row_nbytes: int, pieces: Sequence[tuple[bytes, npt.NDArray[Any] | None]]) -> None:
        template = b"".join(opcode + bytes(0 if column is None else column.itemsize) for opcode, column in pieces)
        self._pieces = pieces
        self._block = np.empty((min(n, _ROWS_AT_ONCE), row_nbytes), dtype=np.uint8)
        self._block[:] = np.frombuffer(template, dtype=np.uint8)
        self._number = -1

    def made(self, number: int) -> npt.NDArray[np.uint8]:
        """uint8[n, row_nbytes]: the block of that number."""
        if number != self._number:
            first, at = number * _ROWS_AT_ONCE, 0
            for opcode, column in self._pieces:
                at += len(opcode)
                if column is not None:
                    numbers = column[first : first + _ROWS_AT_ONCE]
                    rows = self._block[: len(numbers), at : at + column.itemsize]
                    rows[:] = numbers.view(np.uint8).reshape(len(numbers), -1)
                    at += column.itemsize
            self._number = number
        return self._block


def _column(part: IntArray | Recalled) -> tuple[bytes, npt.NDArray[Any]]:
    if isinstance(part, Recalled):
        is_short = part.number.max(initial=0) < 1 << 8
        return (b"h", part.number.astype("<u1")) if is_short else (b"j", part.number.astype("<u4"))
    largest = int(part.max(initial=0))
    for limit, opcode, kind in ((1 << 8, b"K", "<u1"), (1 << 16, b"M", "<u2"), (1 << 31, b"J", "<i4")):
        if largest < limit:
            return opcode, part.astype(kind)
    return b"\x8a\x08", part.astype("<i8")
