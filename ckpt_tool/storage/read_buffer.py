"""Memory that is read into again and again, laid where the system copies to it at full speed.

Some processors (AMD Zen 3 among them) copy five times slower to a place that lies a few bytes further into its page
than where the bytes come from: 2.7 instead of 14 GB/s for 1 to 31 bytes. What numpy allocates begins 16 bytes into a
page, and what begins a page of its file would go there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Allocate", "ReadBuffer", "plain_memory"]

_PAGE_BYTES, _LINE_BYTES = 4096, 64


Allocate: TypeAlias = Callable[[int], npt.NDArray[np.uint8]]
"""Memory of so many bytes, with any content."""


def plain_memory(nbytes: int) -> npt.NDArray[np.uint8]:
    """uint8[nbytes] of numpy's own."""
    return np.empty(nbytes, dtype=np.uint8)


class ReadBuffer:
    """A buffer that grows to the largest size asked for and is reused; for one thread."""

    def __init__(self, allocate: Allocate = plain_memory) -> None:
        self._allocate = allocate
        self._memory: npt.NDArray[np.uint8] = np.empty(0, dtype=np.uint8)

    def take(self, nbytes: int, offset: int = 0, shift: int = 0) -> npt.NDArray[np.uint8]:
        """uint8[nbytes] for bytes from ``offset`` of a file; the content is whatever was there.

        Args:
            nbytes: length.
            offset: where the first byte is to come from; less than 0 where it is none of the file's.
            shift: how far behind a multiple of 64 the first byte lies, 0 to 63.
        """
        if len(self._memory) < nbytes + 2 * _LINE_BYTES:
            memory = self._allocate(nbytes + 2 * _LINE_BYTES + _PAGE_BYTES)
            address: int = memory.__array_interface__["data"][0]
            self._memory = memory[-address % _PAGE_BYTES :]
        start = shift + (_LINE_BYTES if 0 < (shift - offset) % _PAGE_BYTES < _LINE_BYTES else 0)
        return self._memory[start : start + nbytes]
