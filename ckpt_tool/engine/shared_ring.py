"""A ring is a few slots of shared memory of each rank of a host, with counters that say what lies in them.

A rank counts the batches that it has put into its slots, and up to which batch it is past the slots of each other rank;
a slot is used again when every rank is past it. Knows neither plans nor what is in a batch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ckpt_tool.engine.shared_memory import Segment

__all__ = ["Ring", "give_up", "ring_bytes"]

_PUBLISHED, _HAS_FAILED, _PASSED = range(3)  # counters of a rank; behind the last, one for each rank
_IS_ORDERED = hasattr(os, "uname") and os.uname().machine in {"x86_64", "i686"}


def ring_bytes(n_ranks: int, n_slots: int, slot_bytes: int) -> int:
    """Size of each rank's segment."""
    return _control_bytes(n_ranks) + n_slots * slot_bytes


def give_up(own: Segment) -> None:
    """Say that the rank of this segment has failed, for one that cannot reach the others' either."""
    _counters(own, 0)[_HAS_FAILED] = 1


class Ring:
    """Counters and slots in the segments of all ranks of a host, for one of them."""

    def __init__(self, segments: Sequence[Segment], rank: int, n_slots: int, slot_bytes: int) -> None:
        n_control = _control_bytes(len(segments))
        self._rank = rank
        self._slot_bytes, self._n_slots = slot_bytes, n_slots
        self._counters = [_counters(segment, len(segments)) for segment in segments]
        self._slots = [segment.bytes[n_control:] for segment in segments]

    def slot(self, rank: int, batch: int) -> npt.NDArray[np.uint8]:
        """The slot that a rank's batch lies in."""
        start = batch % self._n_slots * self._slot_bytes
        return self._slots[rank][start : start + self._slot_bytes]

    def has(self, rank: int, batch: int) -> bool:
        """Whether a rank has filled the slot of a batch; it may be looked at then."""
        if batch >= self._counters[rank][_PUBLISHED]:
            return False
        _fence()
        return True

    def publish(self, n_batches: int) -> None:
        """Say that this rank has filled the slots of so many batches."""
        _fence()
        self._counters[self._rank][_PUBLISHED] = n_batches

    def pass_by(self, rank: int, batch: int) -> None:
        """Say that this rank looks at nothing before ``batch`` of a rank any more."""
        _fence()
        self._counters[self._rank][_PASSED + rank] = batch

    def passed(self, rank: int) -> int:
        """The first batch of this rank that another one still wants to look at."""
        return self._counters[rank][_PASSED + self._rank]

    def n_free(self) -> int:
        """The first batch of this rank that has no slot yet."""
        at = _PASSED + self._rank
        return min([counters[at] for counters in self._counters]) + self._n_slots

    def tell_failure(self) -> None:
        """Say that this rank has failed."""
        self._counters[self._rank][_HAS_FAILED] = 1

    def has_failure(self) -> bool:
        """Whether some rank has failed."""
        return any(counters[_HAS_FAILED] for counters in self._counters)


def _control_bytes(n_ranks: int) -> int:
    return -(-8 * (_PASSED + n_ranks) // 64) * 64


def _counters(segment: Segment, n_ranks: int) -> memoryview:
    return segment.bytes[: _control_bytes(n_ranks)].data.cast("q")


def _fence() -> None:
    """Order memory: bytes first, then the count that tells of them.

    An x86 processor shows stores, and does loads, in their order. Elsewhere the system's scheduler has a full barrier;
    but asked at each of many small steps it hands a crowded processor to another rank, which drives this one's bytes
    out of the cache.
    """
    if not _IS_ORDERED:
        os.sched_yield()
