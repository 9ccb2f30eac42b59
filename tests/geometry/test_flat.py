"""Laws of flat ranges."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tool.errors import LayoutError
from ckpt_tool.geometry.box import Box
from ckpt_tool.geometry.columns import boxes_from_columns
from ckpt_tool.geometry.flat import flat_boxes, flat_boxes_columns
from tests import oracle
from tests.strategies import shapes


@st.composite
def flat_ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """A shape and a flat range of it."""
    shape = draw(shapes())
    start, stop = sorted((draw(st.integers(0, prod(shape))), draw(st.integers(0, prod(shape)))))
    return shape, start, stop


@given(flat_ranges())
@settings(max_examples=200)
def test_flat_boxes_are_the_range(case: tuple[tuple[int, ...], int, int]) -> None:
    """A flat range becomes at most 2n-1 boxes whose elements, laid end to end, are the range."""
    shape, start, stop = case
    boxes = flat_boxes(start, stop, shape)
    positions = oracle.positions(shape)
    held = [element for box in boxes for element in positions[box.slices].ravel().tolist()]
    assert held == list(range(start, stop))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)
    assert all(box.volume for box in boxes)


@given(st.lists(flat_ranges(), max_size=6))
@settings(max_examples=60)
def test_columns_are_the_boxes_of_each_row(cases: list[tuple[tuple[int, ...], int, int]]) -> None:
    """Many ranges at once, of tensors padded to one number of dimensions, give what each gives alone."""
    ndim = max((len(shape) for shape, _, _ in cases), default=0)
    padded = [shape + (1,) * (ndim - len(shape)) for shape, _, _ in cases]
    rows, offsets, sizes, flat_start = flat_boxes_columns(
        np.array([start for _, start, _ in cases], dtype=np.int64),
        np.array([stop for _, _, stop in cases], dtype=np.int64),
        np.array(padded, dtype=np.int64).reshape(len(cases), ndim),
    )
    boxes = boxes_from_columns(offsets, sizes)
    assert rows.tolist() == sorted(rows.tolist())
    for row, (shape, start, stop) in enumerate(cases):
        pad = (ndim - len(shape), len(shape))
        expected = [Box(b.offsets + (0,) * pad[0], b.sizes + (1,) * pad[0]) for b in flat_boxes(start, stop, shape)]
        mine = np.flatnonzero(rows == row)
        assert [boxes[i] for i in mine] == expected
        firsts = [int(oracle.positions(padded[row])[box.offsets]) for box in expected]
        assert flat_start[mine].tolist() == firsts


def test_a_whole_tensor_is_one_box() -> None:
    """The range of all elements is the whole box; an empty range has none."""
    assert flat_boxes(0, 24, (2, 3, 4)) == [Box.whole((2, 3, 4))]
    assert flat_boxes(0, 1, ()) == [Box((), ())]
    assert flat_boxes(5, 5, (2, 3, 4)) == []
    assert flat_boxes(0, 0, (2, 0, 4)) == []


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 13)])
def test_a_range_outside_is_refused(start: int, stop: int) -> None:
    """A range that leaves its tensor is an error that shows both."""
    with pytest.raises(LayoutError, match=rf"{start}:{stop} does not lie in a tensor of shape \(3, 4\) with 12"):
        flat_boxes(start, stop, (3, 4))
