"""A zero run is a long stretch of elements that are exactly zero, as a saver leaves when it writes to wrong offsets.

Runs are found block by block, put together per chunk, and judged where another tensor of the same parameter is not
zero. Knows no file; runs count elements of packed chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt_tool.geometry.box import Box, intersect
from ckpt_tool.geometry.flat import flat_boxes
from ckpt_tool.records import dataclass

__all__ = ["Run", "ZeroBox", "joined_runs", "judge_zeros", "run_boxes", "shortest_run", "zero_runs"]

GRANULE = 1024
_LONG_RUN = 4 * GRANULE
"""Of a run this long, cut in two by a block's end, one part fills a granule."""
_MIN_RUN = 128
MIN_SHARE = 0.01
"""Fewer zeros than this share of a tensor are not remarkable."""
_MAX_BOXES = 256

Run = tuple[int, int]
"""First element and one past the last."""


@dataclass(frozen=True, slots=True)
class ZeroBox:
    """A box of zeros, in global coordinates, with the chunk that it was found in."""

    box: Box
    chunk: int


def shortest_run(numel: int, chunk_numel: int) -> int:
    """Elements of the shortest run that is looked for in a chunk of a tensor."""
    return max(_MIN_RUN, min(int(numel * MIN_SHARE), chunk_numel // 4))


def zero_runs(bits: npt.NDArray[Any], min_run: int) -> list[Run]:
    """``(start, stop)`` of runs of zero bits of at least ``min_run``; those that touch an end may be shorter.

    A run as long as that covers an element whose number is a multiple of its length, so that few are looked at where
    there is none.

    >>> zero_runs(np.array([0, 1, 0, 0, 0, 1], dtype="u4"), 3)
    [(0, 1), (2, 5)]
    """
    if not len(bits) or (bits[0] and bits[-1] and bits[::min_run].all()):
        return []
    bounds = _suspects(bits) if min_run >= _LONG_RUN else [(0, len(bits))]
    runs = [(low + a, low + b) for low, high in bounds for a, b in _exact_runs(bits[low:high])]
    return [(a, b) for a, b in joined_runs(runs) if b - a >= min_run or a == 0 or b == len(bits)]


def _exact_runs(bits: npt.NDArray[Any]) -> list[Run]:
    if bits.all():
        return []
    is_zero = np.zeros(len(bits) + 2, dtype=np.int8)
    is_zero[1:-1] = bits == 0
    edges = np.flatnonzero(np.diff(is_zero))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _suspects(bits: npt.NDArray[Any]) -> list[Run]:
    """Parts that hold every run of two granules, and the runs at both ends."""
    n_whole = len(bits) // GRANULE * GRANULE
    is_suspect = np.bitwise_or.reduce(bits[:n_whole].reshape(-1, GRANULE), axis=-1) == 0
    if n_whole < len(bits):
        is_suspect = np.append(is_suspect, not bits[n_whole:].any())
    is_suspect[0] |= bits[0] == 0
    is_suspect[-2:] |= bits[-1] == 0
    if not is_suspect.any():
        return []
    grown = is_suspect.copy()  # a run begins and ends in the granules beside its full ones
    grown[1:] |= is_suspect[:-1]
    grown[:-1] |= is_suspect[1:]
    edges = np.flatnonzero(np.diff(np.concatenate([[0], grown.astype(np.int8), [0]])))
    return [
        (low * GRANULE, min(high * GRANULE, len(bits)))
        for low, high in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
    ]


def joined_runs(runs: Sequence[Run]) -> list[Run]:
    """Runs that touch put together, sorted.

    >>> joined_runs([(4, 8), (0, 4), (9, 10)])
    [(0, 8), (9, 10)]
    """
    joined: list[Run] = []
    for start, stop in sorted(runs):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined


def run_boxes(runs: Sequence[Run], chunk: int, box: Box) -> list[ZeroBox]:
    """Runs of one packed chunk as global boxes, the first few hundred."""
    found = []
    for start, stop in runs[:_MAX_BOXES]:
        for local in flat_boxes(start, stop, box.sizes):
            offsets = tuple(a + b for a, b in zip(local.offsets, box.offsets, strict=True))
            found.append(ZeroBox(Box(offsets, local.sizes), chunk))
    return found


def judge_zeros(
    shape: tuple[int, ...], zeros: Sequence[ZeroBox], others: Mapping[str, Sequence[ZeroBox]]
) -> tuple[str, str, int] | None:
    """``(kind, reason, number of zero elements)``; None where zeros are few, or natural.

    Args:
        shape: of the tensor.
        zeros: its zero boxes, disjoint.
        others: zero boxes of the other tensors of the parameter, ``weight`` or the name of a state.
    """
    n = sum(zero.box.volume for zero in zeros)
    if not n or n < MIN_SHARE * prod(shape):
        return None
    share = {name: _common(zeros, theirs) / n for name, theirs in others.items()}
    if share.get("weight", 0.0) > 0.5:  # padding: nothing there, and nothing to be had
        return None
    alive = [name for name, part in share.items() if part < 0.5 and name != "weight"]
    if alive:
        return "zero-run", f"while {' and '.join(alive)} is not zero there", n
    if all(_is_rows(zero.box, shape) for zero in zeros):
        return "zero-rows", "and so is all other state there: no gradient reached these rows", n
    return "zero-run", "and so is all other state there, across rows" if share else "across rows", n


def _common(left: Sequence[ZeroBox], right: Sequence[ZeroBox]) -> int:
    return sum(both.volume for a in left for b in right if (both := intersect(a.box, b.box)) is not None)


def _is_rows(box: Box, shape: tuple[int, ...]) -> bool:
    """Whether a box is whole along all dimensions but the first."""
    return len(shape) > 1 and box.sizes[1:] == shape[1:]
