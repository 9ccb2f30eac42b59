"""The reference: whole arrays in numpy, sliced and compared. Slow and obvious, and it shares no code with the package.

Elements are told apart by their flat position, so ``positions(shape)[box.slices]`` *is* the content of a box.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from ckpt_tool.geometry.box import Box
from ckpt_tool.geometry.columns import Int64Array


def positions(shape: tuple[int, ...]) -> Int64Array:
    """An array of ``shape`` whose elements are their own flat positions."""
    return np.arange(prod(shape), dtype=np.int64).reshape(shape)


def counts(shape: tuple[int, ...], boxes: list[Box]) -> Int64Array:
    """How many of the boxes hold each element."""
    held = np.zeros(shape, dtype=np.int64)
    for box in boxes:
        held[box.slices] += 1
    return held


def chunk_pieces(length: int, parts: int) -> list[list[int]]:
    """Indices of each part by the words of torch.chunk: pieces of the ceiled size until nothing is left."""
    indices, size = list(range(length)), max(-(-length // parts), 1)
    pieces = [indices[start : start + size] for start in range(0, length, size)]
    return pieces + [[]] * (parts - len(pieces))


def gather_bytes(buffer: bytes, starts: Int64Array, nbytes: int) -> bytes:
    """The runs of a buffer, laid end to end."""
    return b"".join(buffer[start : start + nbytes] for start in starts.tolist())


def box_columns(boxes: Sequence[Box], ndim: int) -> tuple[Int64Array, Int64Array]:
    """``(offsets int64[n, ndim], sizes int64[n, ndim])`` of boxes of ``ndim`` dimensions, in their own coordinates.

    ``boxes_from_columns(*box_columns(boxes, ndim)) == list(boxes)``.
    """
    offsets = np.array([b.offsets for b in boxes], dtype=np.int64).reshape(len(boxes), ndim)
    sizes = np.array([b.sizes for b in boxes], dtype=np.int64).reshape(len(boxes), ndim)
    return offsets, sizes
