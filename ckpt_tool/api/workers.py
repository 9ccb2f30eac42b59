"""How many threads are worth having."""

from __future__ import annotations

import os

__all__ = ["available_cores", "moving_workers", "reading_workers"]

_MOVING_AT_MOST = 8
"""More threads that copy bytes wait for memory and for the interpreter, not for the cores."""


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def moving_workers(asked: int | None = None) -> int:
    """Threads that move bytes: as asked for, else one for each core, up to 8."""
    return asked or min(available_cores(), _MOVING_AT_MOST)


def reading_workers(asked: int | None, concurrency: int) -> int:
    """Threads that read and look at bytes: as asked for, else by the cores and by what the storage takes at once."""
    if asked is not None:
        return max(asked, 1)
    n_cores = available_cores()
    # Where requests wait for a network, more of them than cores are worth having under way.
    return max(n_cores, concurrency) if concurrency > 8 else min(n_cores, concurrency * 2)
