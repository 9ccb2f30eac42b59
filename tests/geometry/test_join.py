"""The overlap join against all pairs compared one by one."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.geometry.box import Box, intersect
from ckpt_tool.geometry.join import Boxes, is_packed_in, join_boxes
from tests import oracle
from tests.strategies import boxes, partitions, shapes


def columns(keyed: list[tuple[int, Box]], ndim: int) -> Boxes:
    """Columns of boxes with their keys."""
    return Boxes(
        np.array([key for key, _ in keyed], dtype=np.int64), *oracle.box_columns([box for _, box in keyed], ndim)
    )


@given(st.data())
def test_join_finds_exactly_the_pairs_that_share_elements(data: st.DataObject) -> None:
    """Every pair of boxes of one key that intersects is there once, with its common box, by right row, then left."""
    shape = data.draw(shapes(max_ndim=3))
    keyed = st.lists(st.tuples(st.integers(0, 2), boxes(shape)), max_size=8)
    left, right = data.draw(keyed), data.draw(keyed)
    pairs = join_boxes(columns(left, len(shape)), columns(right, len(shape)))
    expected = [
        (i, j, common.offsets, common.sizes)
        for j, (right_key, b) in enumerate(right)
        for i, (left_key, a) in enumerate(left)
        if left_key == right_key and (common := intersect(a, b)) is not None
    ]
    actual = [
        (i, j, tuple(o), tuple(s))
        for i, j, o, s in zip(
            pairs.left.tolist(), pairs.right.tolist(), pairs.offsets.tolist(), pairs.sizes.tolist(), strict=True
        )
    ]
    assert actual == expected


@given(st.data())
def test_partitions_join_to_a_partition(data: st.DataObject) -> None:
    """Two cuts of one shape share each element in exactly one pair."""
    shape = data.draw(shapes(max_ndim=4, max_size=4))
    left, right = data.draw(partitions(shape)), data.draw(partitions(shape))
    pairs = join_boxes(
        columns([(0, box) for box in left], len(shape)), columns([(0, box) for box in right], len(shape))
    )
    seen: npt.NDArray[np.int64] = np.zeros(shape, dtype=np.int64)
    for offsets, sizes in zip(pairs.offsets.tolist(), pairs.sizes.tolist(), strict=True):
        seen[Box(tuple(offsets), tuple(sizes)).slices] += 1
    assert (seen == 1).all()


@given(st.data())
def test_packed_means_one_run_of_memory(data: st.DataObject) -> None:
    """A part of a packed array is one run exactly when its elements are consecutive."""
    shape = data.draw(shapes(max_ndim=4, max_size=4, min_ndim=1).filter(lambda s: 0 not in s))
    box = data.draw(boxes(shape).filter(lambda b: b.volume > 0))
    elements = np.arange(np.prod(shape)).reshape(shape)[box.slices].reshape(-1)
    expected = bool((np.diff(elements) == 1).all())
    assert is_packed_in(np.array([box.sizes]), np.array([shape])).tolist() == [expected]
