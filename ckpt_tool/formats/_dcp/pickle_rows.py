"""Records of which a pickle holds very many, made as rows of equal length: constant bytes and columns of numbers.

A column's numbers all get the narrowest opcode that holds the largest of them. What is smaller could do with less, but
rows of one length are put together by numpy, a few nanoseconds a number. Knows no record in particular.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    @cached_property
    def table(self) -> npt.NDArray[np.uint8]:
        """uint8[n, row_nbytes]: the records."""
        template = b"".join(opcode + bytes(0 if column is None else column.itemsize) for opcode, column in self._pieces)
        table = np.empty((self.n, self.row_nbytes), dtype=np.uint8)
        for first in range(0, self.n, _ROWS_AT_ONCE):
            block = table[first : first + _ROWS_AT_ONCE]
            block[:] = np.frombuffer(template, dtype=np.uint8)
            at = 0
            for opcode, column in self._pieces:
                at += len(opcode)
                if column is not None:
                    numbers = column[first : first + _ROWS_AT_ONCE]
                    block[:, at : at + column.itemsize] = numbers.view(np.uint8).reshape(len(block), -1)
                    at += column.itemsize
        return table


def _column(part: IntArray | Recalled) -> tuple[bytes, npt.NDArray[Any]]:
    if isinstance(part, Recalled):
        is_short = part.number.max(initial=0) < 1 << 8
        return (b"h", part.number.astype("<u1")) if is_short else (b"j", part.number.astype("<u4"))
    largest = int(part.max(initial=0))
    for limit, opcode, kind in ((1 << 8, b"K", "<u1"), (1 << 16, b"M", "<u2"), (1 << 31, b"J", "<i4")):
        if largest < limit:
            return opcode, part.astype(kind)
    return b"\x8a\x08", part.astype("<i8")
