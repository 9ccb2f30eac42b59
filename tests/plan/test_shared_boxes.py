"""Replicated boxes of any shapes are stored once and evenly, in parts where whole ones cannot be."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tool.geometry.cover import coverage
from ckpt_tool.manifest.tables import IntArray
from ckpt_tool.plan.shared_boxes import shared_boxes

PAGE = 4 << 10


def loads(shapes: list[tuple[int, ...]], n_ranks: int, itemsize: int) -> IntArray:
    """Bytes that each rank stores of tensors that all of them hold; every element is stored once."""
    width = max(map(len, shapes))
    sizes = np.array([(*shape, *[1] * (width - len(shape))) for shape in shapes], dtype=np.int64)
    group = np.tile(np.arange(len(shapes)), n_ranks)
    rank = np.repeat(np.arange(n_ranks), len(shapes))
    nbytes = np.prod(sizes, axis=1)[group] * itemsize
    may_cut = np.ones(len(group), dtype=np.bool_)
    stored = shared_boxes(group, rank, np.zeros_like(sizes[group]), sizes[group], nbytes, may_cut, n_ranks)
    for number, size in enumerate(sizes):
        mine = group[stored.row] == number
        assert coverage(tuple(size.tolist()), stored.offsets[mine], stored.sizes[mine]).is_exact
    load: IntArray = np.zeros(n_ranks, dtype=np.int64)
    np.add.at(load, rank[stored.row], np.prod(stored.sizes, axis=1) * itemsize)
    return load


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.integers(32 * 9, 4_000), st.lists(st.integers(1, 60), max_size=3), st.integers(0, 3)),
        min_size=1, max_size=12,
    ),
    st.integers(2, 9), st.sampled_from([1, 2, 4, 8]),
)  # fmt: skip
def test_any_shapes_are_even(drawn: list[tuple[int, list[int], int]], n_ranks: int, itemsize: int) -> None:
    """With one long dimension anywhere, nobody stores 5 % more than the mean, or a page where all is tiny."""
    shapes = [(*short[:place], long, *short[place:]) for long, short, place in drawn]
    load = loads(shapes, n_ranks, itemsize)
    assert load.sum() == itemsize * sum(map(prod, shapes))
    assert load.max() <= max(1.05 * load.mean(), load.mean() + PAGE)


@pytest.mark.parametrize("n_ranks", [2, 4, 8, 70])
@pytest.mark.parametrize(
    "shapes",
    [[(4096, 4096)], [(64, 1_000_000)], [(3, 5_000_000)], [(50_000, 512), (512,), (512,)], [(8192, 1024)] * 5],
)
def test_few_large_tensors(shapes: list[tuple[int, ...]], n_ranks: int) -> None:
    """An embedding, five equal layers, a tensor that is long in its last dimension only."""
    load = loads(shapes, n_ranks, 2)
    assert load.max() <= 1.05 * load.mean()
