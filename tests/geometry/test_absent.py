"""Absent places of a grid, against a plain loop; sizes may be absurd."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.geometry.absent import absent_numbers, absent_places

SIZES = st.lists(st.integers(0, 4), min_size=0, max_size=3)
PLACES = st.lists(st.integers(-1, 4), min_size=3, max_size=3).map(tuple)


@given(SIZES, st.sets(PLACES, max_size=20), st.integers(0, 10))
def test_is_what_a_loop_finds(sizes: list[int], places: set[tuple[int, ...]], at_most: int) -> None:
    """All that the product of the ranges holds and ``present`` does not, in its order, the first ones listed."""
    present = {place[: len(sizes)] for place in places}
    expected = [place for place in product(*map(range, sizes)) if place not in present]
    found = absent_places(present, sizes, at_most=at_most)
    assert found.n == len(expected)
    assert found.first == expected[:at_most]


def test_absurd_sizes_cost_nothing() -> None:
    """More places than memory has bytes, and numbers that no column holds, are counted."""
    found = absent_places([(0, 1), (1 << 80, 0)], (1 << 100, 3), at_most=2)
    assert found.n == 3 * (1 << 100) - 2
    assert found.first == [(0, 0), (0, 2)]
    assert absent_numbers([0, 2, 1 << 70], 1 << 90, at_most=3) == [1, 3, 4]
