"""An arena is memory that a rank fills and its writer process reads: mapped by both, kept from save to save.

Its pages are there before they are filled: a first touch costs ten times as much as the copy. Knows no torch.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from ckpt_tool.engine.shared_memory import allocate, meet_pages
from ckpt_tool.errors import StorageError
from ckpt_tool.manifest.tables import IntArray
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import format_bytes

__all__ = ["Arena", "StagedBox", "arrange"]

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class StagedBox:
    """Where the elements of a box lie in an arena."""

    offset: int
    nbytes: int
    sizes: tuple[int, ...]
    itemsize: int
    strides: tuple[int, ...] | None
    """In elements, from ``offset``; None for row-major order without gaps."""


def arrange(nbytes: IntArray) -> tuple[IntArray, int]:
    """Offset of each box of ``nbytes``, one after another, and the length of all.

    >>> arrange(np.array([3, 64]))
    (array([ 0, 64]), 128)
    """
    padded = (nbytes + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
    ends = np.cumsum(padded)
    return ends - padded, int(ends[-1]) if len(ends) else 0


class Arena:
    """Shared memory of a fixed size."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self.release: Callable[[], object] | None = None
        """Called before the memory is given back."""
        self._map = mmap.mmap(fd, nbytes, mmap.MAP_SHARED)
        self.memory = memoryview(self._map)

    @classmethod
    def allocated(cls, nbytes: int) -> Arena:
        """New memory of at least ``nbytes``, its pages allocated.

        Raises:
            StorageError: the machine has not that much shared memory.
        """
        nbytes = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        fd = _anonymous_file()
        try:
            allocate(fd, nbytes)
            made = cls(fd, nbytes)
        except OSError as error:
            os.close(fd)
            message = f"no {format_bytes(nbytes)} of shared memory to stage a save in: {error.strerror or error}"
            hint = "a limit of the container or of /dev/shm; state that is staged twice needs twice its size"
            raise StorageError(message, hint=hint) from error
        meet_pages(made._map)
        return made

    def close(self) -> None:
        """Give the memory back, as soon as nothing else has it mapped."""
        if self.release is not None:
            self.release()
            self.release = None
        with suppress(BufferError):  # a tensor still looks into it; the mapping goes with that
            self.memory.release()
            self._map.close()
        os.close(self.fd)


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("ckpt-save", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
