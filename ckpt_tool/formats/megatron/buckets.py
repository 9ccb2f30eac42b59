"""A bucket is a stretch of a gradient buffer: parameters one after another, each start at a multiple of 64 elements.

The distributed optimizer stores its state in the form of such buffers, in elements, with the padding at the ends of
buckets left out (``numel_unpadded``). Where a parameter lies follows from the order and sizes of all; here that is
reckoned, and refused where the sizes leave a doubt. Source: mcore 0.8 to 0.19,
``distributed/param_and_grad_buffer.py``; ``optimizer/distrib_optimizer.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate
from math import lcm

from ckpt_tool.errors import LayoutError
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["BucketEnds", "coalesced_starts", "starts_in_buckets", "stored_starts"]

ALIGNMENT = 64
"""Elements that a parameter's start is a multiple of."""
_BUCKET_END = 128
_MAX_STEPS = 200_000


@dataclass(frozen=True, slots=True)
class BucketEnds:
    """What is known of where the buckets of a buffer end."""

    n_data_parallel: int
    """Ranks that share a bucket: its end is padded to a multiple of this and of 128."""
    bucket_numel: int | None
    """Elements after which a bucket is closed, None when the run did not split buffers."""
    is_stated: bool = True
    """Whether the run's arguments say so."""


def _aligned(position: int, to: int = ALIGNMENT) -> int:
    return -(-position // to) * to


def starts_in_buckets(numels: Sequence[int], bucket_numels: Sequence[int]) -> list[tuple[int, int]] | None:
    """``(bucket, start)`` of each parameter, when buckets of these unpadded sizes hold exactly these parameters.

    ``numels`` are in the buffer's order, which is the reverse of registration.

    >>> starts_in_buckets([100, 64, 10], [192, 10])
    [(0, 0), (0, 128), (1, 0)]
    >>> starts_in_buckets([100, 64, 10], [192, 11]) is None
    True
    """
    found: list[tuple[int, int]] = []
    bucket = position = 0
    for numel in numels:
        if bucket < len(bucket_numels) and position and bucket_numels[bucket] in (position, _aligned(position)):
            bucket, position = bucket + 1, 0
        position = _aligned(position)
        if bucket >= len(bucket_numels) or position + numel > bucket_numels[bucket]:
            return None
        found.append((bucket, position))
        position += numel
    is_full = bucket + 1 == len(bucket_numels) and position == bucket_numels[bucket]
    return found if is_full or not (numels or bucket_numels) else None


def coalesced_starts(
    numels: Sequence[int],
    total_numel: int,
    ends: BucketEnds,
    buffer_starts: Sequence[int] | None = None,
    apart: Collection[int] = (),
) -> list[int] | None:
    """Start of each parameter where buckets are stored end to end, without the padding between them; None if none fit.

    Args:
        numels: elements of each parameter, in the buffer's order.
        total_numel: elements that are stored (``numel_unpadded``).
        ends: what the run's arguments say about buckets.
        buffer_starts: where each parameter begins in the buffer in memory, paddings included; None when unknown. It
            has the last word over the arguments, which a program that sets up buffers itself may not have filled in.
        apart: numbers of parameters that have a bucket of their own (tied embeddings).

    Raises:
        LayoutError: several ways to split the buffer give these sizes, and place parameters differently.

    >>> coalesced_starts([64, 100, 30], 222, BucketEnds(1, None))
    [0, 64, 192]
    """
    if all(numel % ALIGNMENT == 0 for numel in numels):  # no gaps: all splits are the same
        return list(accumulate(numels, initial=0))[:-1] if sum(numels) == total_numel else None
    search = _Search(numels, total_numel, lcm(ends.n_data_parallel, _BUCKET_END), buffer_starts, apart)
    stated = search.with_bucket_numel(ends.bucket_numel) if ends.is_stated else None
    if stated is not None or (ends.is_stated and buffer_starts is None):
        return stated
    found = search.all_starts()
    if len(found) < 2:
        return [*next(iter(found))] if found else None
    size = (
        f"{counted(total_numel, 'element')} of {counted(len(numels), 'parameter')} ({sum(numels):,} without alignment)"
    )
    raise LayoutError(
        f"{len(found):,} ways to split the gradient buffer into buckets give the {size} that are stored: "
        "the bucket size (args.ddp_bucket_size) is not known"
    )


def stored_starts(numels: Sequence[int], ends: BucketEnds, apart: Collection[int] = ()) -> tuple[list[int], int]:
    """Start of each parameter in a buffer that is to be stored, and the elements of all of it.

    Args:
        numels: elements of each parameter, in the buffer's order.
        ends: where the run closes buckets.
        apart: numbers of parameters that have a bucket of their own.

    >>> stored_starts([64, 100, 30], BucketEnds(1, None))
    ([0, 64, 192], 222)
    """
    alignment = lcm(ends.n_data_parallel, _BUCKET_END)
    places, numel = _filled(numels, alignment, ends.bucket_numel, frozenset(apart))
    return [start for start, _ in places], numel


def _filled(
    numels: Sequence[int], end_alignment: int, bucket_numel: int | None, apart: Collection[int]
) -> tuple[list[tuple[int, int]], int]:
    """Start of each parameter, stored and in memory, when buckets are closed after so many elements; and the end."""
    places: list[tuple[int, int]] = []
    stored = memory = opened = 0
    for number, numel in enumerate(numels):
        if number in apart and memory > opened:
            stored += _aligned(memory) - memory  # the bucket ends where this one could have begun
            memory = opened = _aligned(_aligned(memory), end_alignment)
        gap = _aligned(memory) - memory
        stored, memory = stored + gap, memory + gap
        places.append((stored, memory))
        stored, memory = stored + numel, memory + numel
        if number in apart or (bucket_numel is not None and memory - opened >= bucket_numel):
            memory = opened = _aligned(memory, end_alignment)
    return places, stored


class _Search:
    """Ways to close buckets, as far as sizes and places allow them."""

    def __init__(
        self,
        numels: Sequence[int],
        total_numel: int,
        end_alignment: int,
        buffer_starts: Sequence[int] | None,
        apart: Collection[int],
    ) -> None:
        self._numels = numels
        self._total = total_numel
        self._end_alignment = end_alignment
        self._given = buffer_starts
        self._apart = frozenset(apart)

    def with_bucket_numel(self, bucket_numel: int | None) -> list[int] | None:
        """Starts when buckets are closed after ``bucket_numel`` elements, None when that does not fit."""
        places, stored = _filled(self._numels, self._end_alignment, bucket_numel, self._apart)
        is_fitting = all(self._fits(number, memory) for number, (_, memory) in enumerate(places))
        return [start for start, _ in places] if is_fitting and stored == self._total else None

    def all_starts(self) -> set[tuple[int, ...]]:
        """Every distinct outcome over all bucket sizes."""
        found: set[tuple[int, ...]] = set()
        # (next parameter, stored, memory, where the bucket began, smallest and largest bucket size, starts so far)
        waiting: list[tuple[int, int, int, int, int, int | None, tuple[int, ...]]] = [(0, 0, 0, 0, 1, None, ())]
        n_steps = 0
        while waiting:
            number, stored, memory, opened, low, high, starts = waiting.pop()
            n_steps += 1
            if n_steps > _MAX_STEPS:
                raise LayoutError(
                    f"{counted(len(self._numels), 'parameter')} can be split into buckets in too many ways"
                )
            if number == len(self._numels):
                if stored == self._total:
                    found.add(starts)
                continue
            if number in self._apart and memory > opened:
                stored += _aligned(memory) - memory
                memory = opened = _aligned(_aligned(memory), self._end_alignment)
            gap = _aligned(memory) - memory
            if not self._fits(number, memory + gap):
                continue
            end = memory + gap + self._numels[number]
            after = (*starts, stored + gap)
            filled = end - opened
            stored_end = stored + gap + self._numels[number]
            closed = _aligned(end, self._end_alignment)
            if number in self._apart:
                waiting.append((number + 1, stored_end, closed, closed, low, high, after))
                continue
            if high is None or high > filled:  # it may stay open: buckets are larger than what is in it
                waiting.append((number + 1, stored_end, end, opened, max(low, filled + 1), high, after))
            if low <= filled:
                smaller = filled if high is None else min(high, filled)
                waiting.append((number + 1, stored_end, closed, closed, low, smaller, after))
        return found

    def _fits(self, number: int, memory: int) -> bool:
        return self._given is None or self._given[number] == memory
