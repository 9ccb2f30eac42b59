"""Sums of boxes that come in pieces: the CRC-32 of the packed box, and what the box adds to its tensor's digest."""

from __future__ import annotations

from functools import reduce
from operator import xor

import numpy as np
import pytest

from ckpt_tool.checksum import crc32
from ckpt_tool.engine.save.columns import HeldState, Names
from ckpt_tool.engine.save.sums import BoxSums, are_cheap, places_of
from ckpt_tool.manifest.digest import crc32_of_zeros

SHAPE = (6, 35, 9)
BOXES = {
    "whole": [((0, 0, 0), SHAPE)],
    "rows": [((0, 0, 0), (2, 35, 9)), ((2, 0, 0), (4, 35, 9))],
    "columns": [((0, 0, 0), (6, 35, 4)), ((0, 0, 4), (6, 35, 5))],
    "middle": [((0, 0, 0), (6, 17, 9)), ((0, 17, 0), (6, 18, 9))],
    "both": [((0, 0, 0), (5, 35, 2)), ((5, 0, 0), (1, 35, 2)), ((0, 0, 2), (6, 34, 7)), ((0, 34, 2), (6, 1, 7))],
}


@pytest.mark.parametrize("piece_nbytes", [7, 64, 1 << 20])
@pytest.mark.parametrize("cut", BOXES)
def test_any_cut_sums_up(cut: str, piece_nbytes: int) -> None:
    """Whatever the boxes and the pieces, the shares are the tensor's CRC-32, and each box has its own."""
    tensor = np.random.default_rng(3).integers(0, 1 << 16, SHAPE).astype("<u2")
    names = Names((("w",),), ("uint16",), (SHAPE,), ())
    held = HeldState.of(names, [0] * len(BOXES[cut]), BOXES[cut])
    sums = BoxSums(len(held), places_of(held))
    for row, (offsets, sizes) in enumerate(BOXES[cut]):
        box = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
        packed = tensor[box].tobytes()
        for at in range(0, len(packed), piece_nbytes):
            piece = memoryview(packed)[at : at + piece_nbytes]
            sums.add(row, piece, is_last=at + piece_nbytes >= len(packed))
        assert sums.crc32s[row] == crc32(packed)
    shares = np.frombuffer(sums.linear(), dtype="<u4").tolist()
    assert reduce(xor, shares) ^ crc32_of_zeros(tensor.nbytes) == crc32(tensor.tobytes())


@pytest.mark.parametrize(("width", "expected"), [(64, False), (512, True)])
def test_short_runs_are_told(width: int, expected: bool) -> None:
    """Half of the columns of a tensor are cheap where they are wide, and whole tensors always."""
    names = Names((("w",),), ("float32",), ((20_000, width),), ())
    half = HeldState.of(names, [0], [((0, 0), (20_000, width // 2))])
    whole = HeldState.of(names, [0], [((0, 0), (20_000, width))])
    assert are_cheap(places_of(half)) is expected
    assert are_cheap(places_of(whole))
