"""Mapped files are read where the system keeps them, without a copy.

A file that shrinks under its mapping ends the process that looks at it (SIGBUS), so this is for copies of a process,
which may end alone (see `shares`). Only files of this machine can be mapped.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from ckpt_tool.errors import CkptError
from ckpt_tool.storage.local.store import LocalStore
from ckpt_tool.storage.store import Store
from ckpt_tool.storage.summing import SummingStore
from ckpt_tool.storage.virtual.beside import Beside

__all__ = ["are_local", "mapped"]

_POPULATE_READ = 22
"""MADV_POPULATE_READ of Linux 5.14, which fails where looking at the bytes would end the process."""


def _holder(store: Store, path: str) -> Store:
    while isinstance(store, Beside | SummingStore):
        store = store.holder(path)
    return store


def are_local(store: Store, paths: Iterable[str]) -> bool:
    """Whether all of these files lie on this machine as they are."""
    return all(isinstance(_holder(store, path), LocalStore) for path in paths)


def mapped(store: Store, path: str, start: int, stop: int) -> npt.NDArray[np.uint8] | None:
    """The bytes ``[start, stop)`` of a local file, mapped for as long as a view of them is in use.

    None where they cannot be mapped, for whatever reason: reading them says which. None also for what is not in memory
    yet, as far as its first byte tells: reading fetches it in larger parts, which the system keeps as such.
    """
    holder = _holder(store, path)
    if not isinstance(holder, LocalStore) or stop <= start:
        return None
    page = start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    try:
        with holder.borrow(path) as handle:
            fd = handle.file.fileno()
            if not _is_in_memory(fd, start):
                return None
            window = mmap.mmap(fd, stop - page, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=page)
        window.madvise(_POPULATE_READ)
    except (OSError, ValueError, CkptError):  # ValueError: the file is shorter
        return None
    return np.frombuffer(window, dtype=np.uint8)[start - page :]


def _is_in_memory(fd: int, offset: int) -> bool:
    """Whether a byte of a file is in memory; yes where that cannot be told."""
    try:
        os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
