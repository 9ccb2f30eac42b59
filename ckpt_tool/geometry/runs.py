"""A byte run is a stretch of adjacent bytes of one chunk; a box of a strided tensor is a loop nest of equal runs.

Bytes count from the chunk's element zero. Knows nothing of files: whoever knows where element zero lies adds that.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from ckpt_tool.errors import LayoutError
from ckpt_tool.geometry.box import Box
from ckpt_tool.geometry.columns import Int64Array
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["ByteRuns", "byte_runs", "contiguous_strides", "contiguous_strides_columns", "merge_runs"]


@dataclass(frozen=True, slots=True)
class ByteRuns:
    """Runs of ``nbytes`` each; run ``i`` starts at ``start`` plus the steps of a loop nest at its ``i``-th iteration.

    Attributes:
        start: first byte of the first run, counted from the chunk's element zero.
        nbytes: length of every run.
        counts: iterations of each loop, outermost first; empty for one single run.
        steps: bytes that one iteration of each loop moves; may be 0 (a broadcast dimension).
    """

    start: int
    nbytes: int
    counts: tuple[int, ...]
    steps: tuple[int, ...]

    @property
    def n_runs(self) -> int:
        """Number of runs; 0 for an empty box."""
        return prod(self.counts)

    @property
    def span(self) -> int:
        """Bytes from the first run's first to one past the last byte of any run; 0 for an empty box."""
        if self.n_runs == 0:
            return 0
        return self.nbytes + sum((n - 1) * step for n, step in zip(self.counts, self.steps, strict=True))

    def starts(self) -> Int64Array:
        """``int64[n_runs]``: first byte of each run; the runs laid end to end are the box in row-major order."""
        starts = np.full(1, self.start, dtype=np.int64)
        for n, step in zip(self.counts, self.steps, strict=True):
            starts = (starts[:, None] + np.arange(n, dtype=np.int64) * step).reshape(-1)
        return starts


def contiguous_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a dense row-major tensor of these sizes (numpy's, where no size is 0).

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides: list[int] = []
    step = 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def contiguous_strides_columns(sizes: Int64Array) -> Int64Array:
    """``int64[n, D]``: ``contiguous_strides`` of each row."""
    strides = np.ones_like(sizes)
    if sizes.shape[1] > 1:
        strides[:, :-1] = np.cumprod(np.maximum(sizes[:, :0:-1], 1), axis=1)[:, ::-1]
    return strides


def byte_runs(box_local: Box, strides: Sequence[int], bits: int) -> ByteRuns:
    """The fewest equal runs that hold a box of a chunk, in the box's row-major order.

    ``box_local`` is in the chunk's own coordinates, ``strides`` in elements of ``bits`` bits. Dimensions whose bytes
    are adjacent collapse into the run, loops that continue each other into one loop. A whole dense chunk is one run; a
    transposed one has runs of a single element. ``n_runs * nbytes == volume * bits / 8``.

    >>> byte_runs(Box((1, 2), (3, 4)), (10, 1), 16)
    ByteRuns(start=24, nbytes=8, counts=(3,), steps=(20,))

    Raises:
        LayoutError: a run of a type narrower than a byte does not begin and end on a byte, or a stride is negative.
    """
    if len(strides) != box_local.ndim or any(stride < 0 for stride in strides):
        raise LayoutError(
            f"strides {tuple(strides)} do not fit box {box_local}, expected {box_local.ndim} numbers of at least 0"
        )
    if box_local.volume == 0:
        return ByteRuns(0, 0, (0,), (0,))
    start = sum(offset * stride for offset, stride in zip(box_local.offsets, strides, strict=True))
    length = 1
    loops: list[tuple[int, int]] = []  # innermost first
    for size, stride in zip(reversed(box_local.sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if not loops and stride == length:
            length *= size
        elif loops and stride == loops[-1][0] * loops[-1][1]:
            loops[-1] = (loops[-1][0] * size, loops[-1][1])
        else:
            loops.append((size, stride))
    loops.reverse()
    counts = tuple(n for n, _ in loops)
    first, nbytes, *steps = (_whole_bytes(n, bits, box_local) for n in (start, length, *(step for _, step in loops)))
    return ByteRuns(first, nbytes, counts, tuple(steps))


def _whole_bytes(elements: int, bits: int, box: Box) -> int:
    nbytes, rest = divmod(elements * bits, 8)
    if rest:
        raise LayoutError(
            f"box {box} of {bits}-bit elements has a run that does not lie on whole bytes: "
            f"{counted(elements, 'element')} are {counted(elements * bits, 'bit')}",
            hint="cut such tensors where their innermost sizes fill whole bytes",
        )
    return nbytes


def merge_runs(
    starts: Int64Array, lengths: Int64Array, *, max_gap_bytes: int, max_read_bytes: int, split: bool
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """The reads that fetch all runs: ``(read_start int64[k], read_length int64[k], run_to_read int64[n])``. Pure.

    Runs are byte ranges of one file, sorted or not, overlapping or not. Two neighbours share a read when at most
    ``max_gap_bytes`` lie between them and the read stays within ``max_read_bytes``. Laws:

    - every byte of run ``i`` lies in read ``run_to_read[i]``, and a read begins and ends with a byte of some run;
    - no read is longer than ``max_read_bytes``, except for a run that itself is: that one gets a read of its own, or
      with ``split`` several that follow one another, of which ``run_to_read`` names the first;
    - reads are sorted by the first byte of the runs that they serve;
    - an empty run needs no read: its ``run_to_read`` is -1.

    Cost: a sort, and a Python step for each read that the cap (not a gap) ends.
    """
    if max_read_bytes < 1 or max_gap_bytes < 0:
        raise LayoutError(
            f"max_read_bytes must be positive and max_gap_bytes not negative, got {max_read_bytes:,}, {max_gap_bytes:,}"
        )
    run_to_read = np.full(len(starts), -1, dtype=np.int64)
    is_long = lengths > max_read_bytes
    short = np.flatnonzero((lengths > 0) & ~is_long)
    short = short[np.argsort(starts[short], kind="stable")]
    group = _short_groups(starts[short], starts[short] + lengths[short], max_gap_bytes, max_read_bytes)
    heads = np.flatnonzero(np.diff(group, prepend=-1))
    short_start = starts[short][heads]
    short_length = (
        np.maximum.reduceat(starts[short] + lengths[short], heads) - short_start if len(heads) else short_start
    )

    long = np.flatnonzero(is_long)
    pieces = -(-lengths[long] // max_read_bytes) if split else np.ones(len(long), dtype=np.int64)
    first_piece = np.cumsum(pieces) - pieces
    owner = np.repeat(np.arange(len(long)), pieces)
    skipped = (np.arange(len(owner), dtype=np.int64) - first_piece[owner]) * max_read_bytes
    long_start = starts[long][owner] + skipped
    long_length = lengths[long][owner] - skipped
    if split:
        long_length = np.minimum(long_length, max_read_bytes)

    read_start = np.concatenate([short_start, long_start])
    read_length = np.concatenate([short_length, long_length])
    # Pieces of one long run stay neighbours: ties and nested runs are kept apart by the order of first bytes.
    key = np.concatenate([short_start, starts[long][owner]])
    order = np.lexsort((np.arange(len(key)), key))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    run_to_read[short] = place[group]
    run_to_read[long] = place[len(heads) + first_piece]
    return read_start[order], read_length[order], run_to_read


def _short_groups(starts: Int64Array, stops: Int64Array, max_gap_bytes: int, max_read_bytes: int) -> Int64Array:
    """Number of the read of each run, for sorted runs that are not longer than a read."""
    if len(starts) == 0:
        return np.zeros(0, dtype=np.int64)
    reach = np.maximum.accumulate(stops)
    is_head = np.ones(len(starts), dtype=np.bool_)
    is_head[1:] = starts[1:] - reach[:-1] > max_gap_bytes
    heads = np.flatnonzero(is_head)
    ends = np.append(heads[1:], len(starts))
    too_long = np.flatnonzero(reach[ends - 1] - starts[heads] > max_read_bytes)
    for head, end in zip(heads[too_long].tolist(), ends[too_long].tolist(), strict=True):
        # `reach` never falls, so the last run within the cap of a head is found by bisection.
        fits = np.searchsorted(reach[head:end], starts[head:end] + max_read_bytes, side="right") + head
        at = head
        while (at := max(int(fits[at - head]), at + 1)) < end:
            is_head[at] = True
    return np.cumsum(is_head, dtype=np.int64) - 1
