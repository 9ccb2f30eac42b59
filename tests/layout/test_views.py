"""Views give the values that numpy's own reshaping gives, and copy nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.engine.memory import read_boxes
from ckpt_tool.errors import LayoutError
from ckpt_tool.geometry.box import Box
from ckpt_tool.layout.views import Part, View, apply_views
from ckpt_tool.storage.memory import MemoryStore
from tests.strategies import partitions
from tests.synthetic import Synthetic, limits, make_source


def read(source: Synthetic, views: list[View], tile: int = 64) -> list[object]:
    """Whole targets of the views as lists."""
    manifest = apply_views(source.manifest, views)
    boxes = [(view.fqn, Box.whole(view.shape)) for view in views]
    return [array.tolist() for array in read_boxes(manifest, MemoryStore(source.files), boxes, limits=limits(tile))]


@given(st.data(), st.integers(16, 300))
def test_split_join_unstack_and_transpose(data: st.DataObject, tile: int) -> None:
    """Rows split off, columns taken, layers unstacked, parts joined anew, axes swapped: any cut, any tile."""
    fused = np.arange(12 * 6, dtype=np.int32).reshape(12, 6)
    stack = np.arange(3 * 4 * 5, dtype=np.int32).reshape(3, 4, 5) + 1000
    arrays = {"fused": fused, "stack": stack}
    source = make_source(arrays, {fqn: data.draw(partitions(a.shape)) for fqn, a in arrays.items()})
    views = [
        View("q", (8, 6), (Part("fused", Box((0, 0), (8, 6)), (0, 0), (0, 1)),)),
        View("columns", (12, 2), (Part("fused", Box((0, 3), (12, 2)), (0, 0), (0, 1)),)),
        View("swapped", (12, 6), (
            Part("fused", Box((6, 0), (6, 6)), (0, 0), (0, 1)), Part("fused", Box((0, 0), (6, 6)), (6, 0), (0, 1)),
        )),
        View("layer1", (4, 5), (Part("stack", Box((1, 0, 0), (1, 4, 5)), (0, 0), (1, 2)),)),
        View("layer2.T", (5, 4), (Part("stack", Box((2, 0, 0), (1, 4, 5)), (0, 0), (2, 1)),)),
    ]  # fmt: skip
    expected = [fused[:8], fused[:, 3:5], np.roll(fused, 6, axis=0), stack[1], stack[2].T]
    assert read(source, views, tile) == [array.tolist() for array in expected]


def test_view_and_its_inverse_restore_the_tensor() -> None:
    """Unstacking and stacking again is the identity."""
    stack = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    source = make_source({"stack": stack}, {"stack": [Box.whole((2, 3, 4))]})
    apart = [View(f"l{i}", (3, 4), (Part("stack", Box((i, 0, 0), (1, 3, 4)), (0, 0), (1, 2)),)) for i in range(2)]
    unstacked = apply_views(source.manifest, apart)
    with pytest.raises(LayoutError, match="axes"):
        apply_views(unstacked, [View("s", (2, 3, 4), (Part("l0", Box.whole((3, 4)), (0, 0, 0), (0, 0, 1)),))])
    again = [View("s", (2, 3, 4), tuple(Part(f"l{i}", Box.whole((3, 4)), (i, 0, 0), (-1, 0, 1)) for i in range(2)))]
    (result,) = read_boxes(
        apply_views(unstacked, again), MemoryStore(source.files), [("s", Box.whole((2, 3, 4)))], limits=limits()
    )
    assert result.tolist() == stack.tolist()


def test_views_that_do_not_fill_their_target_are_refused() -> None:
    """Too few elements, boxes outside the source, mixed dtypes: an error that names the view."""
    source = make_source(
        {"a": np.zeros((4, 2), np.float32), "b": np.zeros((4, 2), np.int32)},
        {"a": [Box.whole((4, 2))], "b": [Box.whole((4, 2))]},
    ).manifest
    half = Part("a", Box((0, 0), (2, 2)), (0, 0), (0, 1))
    with pytest.raises(LayoutError, match="v: parts have 4 elements, the target 8"):
        apply_views(source, [View("v", (4, 2), (half,))])
    with pytest.raises(LayoutError, match="leaves"):
        apply_views(source, [View("v", (4, 2), (Part("a", Box((2, 0), (4, 2)), (0, 0), (0, 1)),))])
    with pytest.raises(LayoutError, match="dtypes float32"):
        apply_views(source, [View("v", (4, 2), (half, Part("b", Box((2, 0), (2, 2)), (2, 0), (0, 1))))])


@given(st.data(), st.integers(16, 300))
def test_every_nth_row_and_column(data: st.DataObject, tile: int) -> None:
    """Steps in both dimensions, from any element on, over any cut: numpy's own strided slices."""
    array = np.arange(14 * 9, dtype=np.int32).reshape(14, 9)
    source = make_source({"a": array}, {"a": data.draw(partitions(array.shape))})
    starts, steps, counts = [], [], []
    for size in array.shape:
        start, step = data.draw(st.integers(0, size - 1)), data.draw(st.integers(1, 4))
        starts.append(start)
        steps.append(step)
        counts.append(data.draw(st.integers(1, (size - 1 - start) // step + 1)))
    box, taken_steps = Box(tuple(starts), tuple(counts)), (steps[0], steps[1])
    views = [
        View("taken", box.sizes, (Part("a", box, (0, 0), (0, 1), taken_steps),)),
        View("taken.T", box.sizes[::-1], (Part("a", box, (0, 0), (1, 0), taken_steps),)),
    ]
    rows, columns = (slice(o, o + (n - 1) * s + 1, s) for o, n, s in zip(starts, counts, steps, strict=True))
    taken = array[rows, columns]
    assert read(source, views, tile) == [taken.tolist(), taken.T.tolist()]


@given(st.data(), st.integers(1, 4), st.integers(1, 3))
def test_pairs_become_halves_and_pairs_again(data: st.DataObject, n_heads: int, half: int) -> None:
    """Rotary pairs of each head become two halves, as a reshape and a transpose do, and the inverse undoes it."""
    rows = n_heads * 2 * half
    array = np.arange(rows * 3, dtype=np.int32).reshape(rows, 3)
    source = make_source({"pairs": array}, {"pairs": data.draw(partitions(array.shape))})
    parts = tuple(
        Part("pairs", Box((head * 2 * half + odd, 0), (half, 3)), ((head * 2 + odd) * half, 0), (0, 1), (2, 1))
        for head in range(n_heads)
        for odd in range(2)
    )
    halves = array.reshape(n_heads, half, 2, 3).transpose(0, 2, 1, 3).reshape(rows, 3)
    assert read(source, [View("halves", array.shape, parts)]) == [halves.tolist()]
    back = tuple(
        Part("halves", Box((head * 2 * half + i, 0), (2, 3)), (head * 2 * half + 2 * i, 0), (0, 1), (half, 1))
        for head in range(n_heads)
        for i in range(half)
    )
    again = apply_views(apply_views(source.manifest, [View("halves", array.shape, parts)]), [
        View("pairs", array.shape, back),
    ])  # fmt: skip
    (result,) = read_boxes(again, MemoryStore(source.files), [("pairs", Box.whole(array.shape))], limits=limits())
    assert result.tolist() == array.tolist()


def test_steps_that_leave_the_source_are_refused() -> None:
    """A step too far, or a step of nothing."""
    source = make_source({"a": np.zeros((4, 2), np.float32)}, {"a": [Box.whole((4, 2))]}).manifest
    with pytest.raises(LayoutError, match=r"box \[1:6, 0:2\] of a \[4, 2\] .* leaves"):
        apply_views(source, [View("v", (3, 2), (Part("a", Box((1, 0), (3, 2)), (0, 0), (0, 1), (2, 1)),))])
    with pytest.raises(LayoutError, match=r"steps \(0, 1\) do not fit"):
        apply_views(source, [View("v", (2, 2), (Part("a", Box((0, 0), (2, 2)), (0, 0), (0, 1), (0, 1)),))])
