"""Laws of boxes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tool.errors import LayoutError
from ckpt_tool.geometry.box import Box, difference, intersect
from ckpt_tool.geometry.columns import boxes_from_columns
from tests import oracle
from tests.strategies import boxes, shapes


@st.composite
def two_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box, Box]:
    """A shape and two boxes of it."""
    shape = draw(shapes(4))
    return shape, draw(boxes(shape)), draw(boxes(shape))


@given(two_boxes())
@settings(max_examples=150)
def test_intersect_is_the_common_elements(case: tuple[tuple[int, ...], Box, Box]) -> None:
    """The intersection holds exactly the elements of both boxes, and is None when there are none."""
    shape, a, b = case
    positions = oracle.positions(shape)
    expected = set(positions[a.slices].ravel().tolist()) & set(positions[b.slices].ravel().tolist())
    common = intersect(a, b)
    actual = set() if common is None else set(positions[common.slices].ravel().tolist())
    assert actual == expected
    assert (common is None) == (not expected)
    assert common is None or (a.contains(common) and b.contains(common))


@given(two_boxes())
@settings(max_examples=150)
def test_difference_and_intersection_are_a_partition(case: tuple[tuple[int, ...], Box, Box]) -> None:
    """The pieces of a difference are disjoint, miss the second box and leave nothing of the first out."""
    shape, a, b = case
    pieces = difference(a, b)
    common = intersect(a, b)
    expected = oracle.counts(shape, [a])
    actual = oracle.counts(shape, [*pieces, *([common] if common else [])])
    assert actual.tolist() == expected.tolist()
    assert len(pieces) <= max(2 * a.ndim, 1)
    assert all(piece.volume for piece in pieces)


@given(two_boxes())
@settings(max_examples=50)
def test_columns_and_records_are_the_same_boxes(case: tuple[tuple[int, ...], Box, Box]) -> None:
    """Boxes survive the way into columns and back."""
    shape, a, b = case
    assert boxes_from_columns(*oracle.box_columns([a, b], len(shape))) == [a, b]


def test_relative_to_moves_the_origin() -> None:
    """A box relative to another counts from that one's first element; one that starts before it is refused."""
    a, b = Box((4, 2), (2, 2)), Box((3, 2), (5, 5))
    assert a.relative_to(b) == Box((1, 0), (2, 2))
    assert b.relative_to(b) == Box.whole(b.sizes)
    with pytest.raises(LayoutError, match="must not be negative"):
        b.relative_to(a)


def test_a_box_needs_matching_corners() -> None:
    """Corners of different rank are no box."""
    with pytest.raises(LayoutError, match="differ in their number of dimensions"):
        Box((0,), (1, 2))


def test_an_empty_box_is_inside_everything() -> None:
    """An empty box adds no element, wherever it lies."""
    assert Box((0,), (1,)).contains(Box((7,), (0,)))
    assert difference(Box((7,), (0,)), Box((0,), (1,))) == []
