"""How many threads are worth having."""

from __future__ import annotations

import os

__all__ = ["available_cores", "reading_workers"]


def available_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def reading_workers(asked: int | None, concurrency: int) -> int:
    """Threads that read and look at bytes: as asked for, else by the cores and by what the storage takes at once."""
    if asked is not None:
        return max(asked, 1)
    n_cores = available_cores()
    # Where requests wait for a network, more of them than cores are worth having under way.
    return max(n_cores, concurrency) if concurrency > 8 else min(n_cores, concurrency * 2)
