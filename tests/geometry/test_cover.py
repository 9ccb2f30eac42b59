"""Laws of coverage: told from corners alone, it must agree with counting every element."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tool.geometry.box import Box, intersect
from ckpt_tool.geometry.columns import Int64Array, boxes_from_columns
from ckpt_tool.geometry.cover import coverage, exact_duplicates, gaps, overlapping_pairs, volumes_match
from ckpt_tool.geometry.overlaps import have_common_element
from tests import oracle
from tests.invariants import assert_partition
from tests.strategies import boxes, mesh_boxes, partitions, shapes


@st.composite
def partitioned(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape and its elements, each in one of the boxes."""
    shape = draw(shapes())
    return shape, draw(partitions(shape))


@st.composite
def scattered(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape and boxes of it that may overlap, be equal or leave gaps."""
    shape = draw(shapes(4))
    return shape, draw(st.lists(boxes(shape), max_size=12))


@given(partitioned())
@settings(max_examples=150)
def test_a_partition_is_exact(case: tuple[tuple[int, ...], list[Box]]) -> None:
    """Boxes of any partition are found exact, and nothing is reported."""
    shape, parts = case
    assert_partition(shape, parts)
    result = coverage(shape, *oracle.box_columns(parts, len(shape)))
    assert result.is_exact
    assert (result.gaps, result.overlapping, result.missing_elements) == ((), (), 0)
    assert result.n_boxes + result.n_empty == len(parts)


@given(partitioned(), st.data())
@settings(max_examples=120)
def test_removed_boxes_are_the_gaps(case: tuple[tuple[int, ...], list[Box]], data: st.DataObject) -> None:
    """Without some of its boxes a partition misses just these, and they are what the gaps hold."""
    shape, parts = case
    removed = {i for i in range(len(parts)) if data.draw(st.booleans())}
    kept = [part for i, part in enumerate(parts) if i not in removed]
    result = coverage(shape, *oracle.box_columns(kept, len(shape)), limit=1000)
    assert result.missing_elements == sum(parts[i].volume for i in removed)
    assert_partition(shape, [*kept, *result.gaps])
    assert result.is_exact == (result.missing_elements == 0)


@given(partitioned())
@settings(max_examples=50)
def test_replicas_are_counted_and_nothing_else(case: tuple[tuple[int, ...], list[Box]]) -> None:
    """A second copy of every box leaves the coverage exact."""
    shape, parts = case
    result = coverage(shape, *oracle.box_columns([*parts, *parts], len(shape)))
    assert result.is_exact
    assert result.n_replicas == sum(1 for part in parts if part.volume)


@given(scattered())
@settings(max_examples=150)
def test_overlaps_are_all_pairs_that_meet(case: tuple[tuple[int, ...], list[Box]]) -> None:
    """The pairs are those that intersecting every two boxes finds."""
    shape, found = case
    expected = [[i, j] for j in range(len(found)) for i in range(j) if intersect(found[i], found[j])]
    assert overlapping_pairs(*oracle.box_columns(found, len(shape))).tolist() == sorted(expected)
    limited = overlapping_pairs(*oracle.box_columns(found, len(shape)), limit=2).tolist()
    assert len(limited) == min(2, len(expected))
    assert all(pair in expected for pair in limited)


@given(scattered(), st.data())
@settings(max_examples=60)
def test_groups_do_not_meet(case: tuple[tuple[int, ...], list[Box]], data: st.DataObject) -> None:
    """Boxes of different groups are never a pair, nor duplicates."""
    shape, found = case
    group = [data.draw(st.integers(-1, 1)) for _ in found]
    columns = (*oracle.box_columns(found, len(shape)), np.array(group, dtype=np.int64))
    expected = [
        [i, j]
        for i in range(len(found))
        for j in range(i + 1, len(found))
        if group[i] == group[j] and intersect(found[i], found[j])
    ]
    assert overlapping_pairs(*columns).tolist() == expected
    first = [next(j for j in range(i + 1) if (group[j], found[j]) == (group[i], found[i])) for i in range(len(found))]
    assert exact_duplicates(*columns).tolist() == first


@given(scattered())
@settings(max_examples=150)
def test_gaps_are_what_no_box_holds(case: tuple[tuple[int, ...], list[Box]]) -> None:
    """Gaps are disjoint and hold exactly the elements that are in no box, however the boxes overlap."""
    shape, found = case
    columns = oracle.box_columns(found, len(shape))
    expected = (oracle.counts(shape, found) == 0).astype(np.int64)
    assert oracle.counts(shape, gaps(shape, *columns, 10_000)).tolist() == expected.tolist()
    assert coverage(shape, *columns, limit=10_000).missing_elements == expected.sum()
    few = gaps(shape, *columns, 2)
    assert len(few) == min(2, len(gaps(shape, *columns, 2)))
    assert np.all(oracle.counts(shape, few) <= expected)


def test_neighbouring_slabs_make_one_gap() -> None:
    """A hole that several slabs share is one box."""
    offsets, sizes = mesh_boxes((8, 8), (4, 4), [(0, 0), (1, 1)])
    kept = [i for i in range(16) if i not in (6, 10)]
    assert gaps((8, 8), offsets[kept], sizes[kept], 16) == [Box((2, 4), (4, 2))]


def test_no_boxes_leave_the_whole() -> None:
    """Nothing at all is one gap; a shape without elements has none."""
    none = np.zeros((0, 2), dtype=np.int64)
    assert coverage((3, 4), none, none).gaps == (Box.whole((3, 4)),)
    assert coverage((3, 0), none, none).is_exact
    assert coverage((), none[:, :0], none[:, :0]).gaps == (Box((), ()),)


def test_boxes_outside_are_named() -> None:
    """A box that reaches beyond the shape is named, and still covers what it can."""
    offsets, sizes = np.array([[0], [3]]), np.array([[3], [4]])
    result = coverage((5,), offsets, sizes)
    assert (result.outside, result.missing_elements, result.is_exact) == ((1,), 0, False)


def test_trailing_empty_shards_are_ignored() -> None:
    """6 elements on 5 ranks are chunks of 2, 2, 2 and two empty ones: nothing is missing."""
    result = coverage((6,), *mesh_boxes((6,), (5,), [(0, 0)]))
    assert (result.is_exact, result.n_boxes, result.n_empty) == (True, 3, 2)


def test_irregular_chunks_in_any_order() -> None:
    """Chunks of 7, 1 and 2 elements, listed out of order, are exact; two swapped sizes are a gap and an overlap."""
    assert coverage((10,), np.array([[1], [0], [8]]), np.array([[7], [1], [2]])).is_exact
    broken = coverage((10,), np.array([[1], [0], [8]]), np.array([[1], [7], [2]]))
    assert broken.overlapping == ((0, 1),)
    assert broken.gaps == (Box((7,), (1,)),)


def test_boxes_that_no_plane_separates() -> None:
    """Four boxes in a pinwheel around a fifth are a partition though every plane cuts one of them."""
    pinwheel = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1)), Box((1, 1), (1, 1))]
    assert_partition((3, 3), pinwheel)
    assert coverage((3, 3), *oracle.box_columns(pinwheel, 2)).is_exact
    assert coverage((3, 3), *oracle.box_columns(pinwheel[:-1], 2)).gaps == (pinwheel[-1],)


def test_volumes_match_per_tensor() -> None:
    """Only tensors whose volumes add up pass, including those without a box and without elements."""
    tensor, volumes = np.array([0, 0, 1, 3]), np.array([2, 4, 5, 2])
    assert volumes_match(tensor, volumes, np.array([6, 6, 0, 2])).tolist() == [True, False, True, True]


@pytest.mark.parametrize("grid", [(100_000,), (250, 400), (50, 40, 50)])
def test_large_grids_are_told_exactly(grid: tuple[int, ...]) -> None:
    """100,000 boxes of a grid are found exact, and one lost box is found among them."""
    shape = tuple(3 * n for n in grid)
    offsets, sizes = mesh_boxes(shape, grid, [(axis, axis) for axis in range(len(grid))])
    shuffled: Int64Array = np.random.default_rng(3).permutation(len(offsets))
    assert coverage(shape, offsets[shuffled], sizes[shuffled]).is_exact
    lost = boxes_from_columns(offsets[shuffled[:1]], sizes[shuffled[:1]])
    result = coverage(shape, offsets[shuffled[1:]], sizes[shuffled[1:]])
    assert result.gaps == tuple(lost)
    assert result.missing_elements == prod(lost[0].sizes)


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=3),
    st.integers(-40, 40),
)
def test_strided_boxes_meet_where_an_element_is_in_both(dims: list[tuple[int, int, int]], distance: int) -> None:
    """Told from strides and sizes alone, as by listing every element of both."""
    strides, sizes, others = zip(*dims, strict=True)

    def elements(start: int, counts: tuple[int, ...]) -> set[int]:
        return set((start + np.indices(counts).reshape(len(counts), -1).T @ np.array(strides)).tolist())

    expected = bool(elements(0, sizes) & elements(distance, others))
    assert have_common_element(distance, strides, sizes, others) == expected
