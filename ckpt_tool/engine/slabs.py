"""The bytes of a tile as slabs one behind another: one buffer, or what the system keeps of the files that it is in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ckpt_tool.checksum import crc32
from ckpt_tool.records import dataclass

__all__ = ["Slab", "TileBytes", "crc32_of", "cut"]


@dataclass(frozen=True, slots=True, eq=False)
class Slab:
    """A part of a tile that is one run of it: the tile itself, or what is read of it from one place."""

    start: int
    """First byte in the tile."""
    data: npt.NDArray[np.uint8]
    row: int
    """Of the pieces read; -1 for the whole tile."""


class TileBytes:
    """The bytes of one tile, in a buffer for as long as its reader is not asked for another tile."""

    def __init__(self, slabs: Sequence[Slab]) -> None:
        self.slabs = slabs

    def run(self, begin: int, length: int) -> list[memoryview]:
        """``length`` bytes from ``begin`` on, in one part or several that follow each other."""
        return cut([slab.data.data for slab in self.slabs], begin, begin + length)

    def crc32(self, begin: int, length: int) -> int:
        """The CRC-32 of such a run."""
        return crc32_of(self.run(begin, length))


def cut(parts: Sequence[memoryview], begin: int, end: int) -> list[memoryview]:
    """Bytes ``[begin, end)`` of parts that follow each other, in parts.

    >>> [bytes(part) for part in cut([memoryview(b"ab"), memoryview(b"cde"), memoryview(b"f")], 1, 4)]
    [b'b', b'cd']
    """
    found, start = [], 0
    for part in parts:
        if start < end and begin < start + len(part):
            found.append(part[max(begin - start, 0) : end - start])
        start += len(part)
    return found


def crc32_of(parts: Sequence[memoryview]) -> int:
    """The CRC-32 of parts that follow each other."""
    crc = 0
    for part in parts:
        crc = crc32(part, crc)
    return crc
