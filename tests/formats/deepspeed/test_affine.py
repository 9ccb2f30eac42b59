"""Affine pieces: the boxes hold what ``as_strided`` holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.errors import FormatError, Unsupported
from ckpt_tool.formats.deepspeed.affine import View, box_pairs, clipped
from ckpt_tool.geometry.box import Box


def copied(shape: tuple[int, ...], shard: View, whole: View) -> tuple[list[float], list[float]]:
    """The whole tensor filled through the views, and through the boxes."""
    source = np.arange(1, np.prod(shard.of_shape) + 1, dtype=np.float32)
    by_views = np.zeros(int(np.prod(whole.of_shape)), dtype=np.float32)
    taken = np.lib.stride_tricks.as_strided(source[shard.offset :], shape, [4 * s for s in shard.strides])
    np.lib.stride_tricks.as_strided(by_views[whole.offset :], shape, [4 * s for s in whole.strides])[...] = taken
    by_boxes = np.zeros(whole.of_shape, dtype=np.float32)
    for pair in box_pairs(shape, shard, whole):
        by_boxes[pair.whole.slices] = source.reshape(shard.of_shape)[pair.local.slices]
    return by_views.tolist(), by_boxes.flatten().tolist()


@given(st.data())
def test_boxes_hold_what_the_views_do(data: st.DataObject) -> None:
    """Rows or columns of a matrix, cut in parts that are interleaved with other ranks' parts."""
    n_ranks, n_parts, width, rest = (data.draw(st.integers(1, 4)) for _ in range(4))
    rank = data.draw(st.integers(0, n_ranks - 1))
    rows = n_parts * n_ranks * width
    if data.draw(st.booleans()):  # parts of rows: part p of rank r is rows (p * ranks + r) * width
        shard = View(0, (width * rest, rest, 1), (n_parts * width, rest))
        whole = View(rank * width * rest, (n_ranks * width * rest, rest, 1), (rows, rest))
        shape = (n_parts, width, rest)
    else:  # the same along columns
        shard = View(0, (n_parts * width, width, 1), (rest, n_parts * width))
        whole = View(rank * width, (rows, n_ranks * width, 1), (rest, rows))
        shape = (rest, n_parts, width)
    by_views, by_boxes = copied(shape, shard, whole)
    assert by_boxes == by_views


@pytest.mark.parametrize(
    ("shape", "shard", "whole", "n_boxes"),
    [
        ((4, 6), View(0, (6, 1), (4, 6)), View(24, (6, 1), (8, 6)), 1),  # rows
        ((24,), View(0, (1,), (4, 6)), View(24, (1,), (8, 6)), 1),  # the same, written flat
        ((8, 3), View(0, (3, 1), (8, 3)), View(3, (6, 1), (8, 6)), 1),  # columns
        ((2, 2, 6), View(0, (12, 6, 1), (4, 6)), View(12, (24, 6, 1), (8, 6)), 2),  # two parts of rows
        ((5,), View(3, (1,), (4, 6)), View(3, (1,), (4, 6)), 5),  # across a row's end: element by element
        ((6, 4), View(0, (1, 6), (4, 6)), View(0, (4, 1), (6, 4)), 24),  # transposed: element by element
        ((), View(0, (), ()), View(0, (), ()), 1),
        ((0, 6), View(0, (6, 1), (0, 6)), View(0, (6, 1), (8, 6)), 0),
    ],
)
def test_examples(shape: tuple[int, ...], shard: View, whole: View, n_boxes: int) -> None:
    """As few boxes as the piece allows, and the right elements."""
    assert len(box_pairs(shape, shard, whole)) == n_boxes
    if shape and 0 not in shape:
        by_views, by_boxes = copied(shape, shard, whole)
        assert by_boxes == by_views


@pytest.mark.parametrize(
    ("shape", "shard", "whole", "error"),
    [
        ((4, 6), View(0, (6, 1), (4, 6)), View(25, (6, 1), (8, 6)), FormatError),  # beyond the end
        ((4, 6), View(0, (6, 1), (4, 6)), View(0, (6,), (8, 6)), FormatError),  # strides do not fit
        ((60, 70), View(0, (1, 60), (70, 60)), View(0, (70, 1), (60, 70)), Unsupported),  # transposed, and not small
        ((4, 6), View(0, (6, 1), (4, 6)), View(0, (6, 1), (2, 4, 6)), Unsupported),  # other dimensions
        ((5000, 2), View(0, (3, 2), (10000, 3)), View(0, (2, 1), (5000, 2)), Unsupported),  # too many boxes
    ],
)
def test_refusals(shape: tuple[int, ...], shard: View, whole: View, error: type[Exception]) -> None:
    """What is no piece, or no boxes, is refused and never guessed."""
    with pytest.raises(error):
        box_pairs(shape, shard, whole)


def test_clipped() -> None:
    """A pair is cut in both coordinates alike."""
    (pair,) = box_pairs((4, 6), View(0, (6, 1), (4, 6)), View(24, (6, 1), (8, 6)))
    cut = clipped(pair, Box.whole((6, 6)))
    assert cut is not None
    assert (str(cut.local), str(cut.whole)) == ("[0:2, 0:6]", "[4:6, 0:6]")
    assert clipped(pair, Box.whole((4, 6))) is None
