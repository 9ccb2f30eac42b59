"""Hypothesis strategies: shapes, boxes, ways to cut a shape into boxes, and meshes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import numpy as np
from hypothesis import strategies as st

from ckpt_tool.geometry.box import Box
from ckpt_tool.geometry.columns import Int64Array, boxes_from_columns
from ckpt_tool.geometry.flat import flat_boxes
from ckpt_tool.geometry.grid import split_columns

__all__ = ["boxes", "cuts", "mesh_boxes", "mesh_sizes", "nested_cuts", "partitions", "shapes"]


def shapes(max_ndim: int = 5, max_size: int = 5, min_ndim: int = 0) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of 0 to 5 dimensions, with sizes of 0 and 1 among them."""
    return st.lists(st.integers(0, max_size), min_size=min_ndim, max_size=max_ndim).map(tuple)


def mesh_sizes(max_axes: int = 3, max_size: int = 4) -> st.SearchStrategy[tuple[int, ...]]:
    """Sizes of the axes of a mesh."""
    return st.lists(st.integers(1, max_size), max_size=max_axes).map(tuple)


def mesh_boxes(
    shape: tuple[int, ...], axes: tuple[int, ...], splits: Sequence[tuple[int, int]]
) -> tuple[Int64Array, Int64Array]:
    """``(offsets, sizes)``, both ``int64[world, ndim]``: the box of each rank in global coordinates.

    Each split ``(axis, dim)`` cuts what the earlier ones left, by the rule of `chunk_bounds`; axes that are not named
    replicate. FSDP2 over TP on one dimension is ``[(tp, 0), (dp, 0)]``: TP cuts first. Without splits every rank holds
    ``Box.whole(shape)``. Boxes of ranks that differ along a splitting axis are disjoint, and together they cover.

    >>> offsets, sizes = mesh_boxes((8,), (2, 2), [(1, 0), (0, 0)])  # dp 2 x tp 2
    >>> offsets[:, 0].tolist(), sizes[:, 0].tolist()
    ([0, 4, 2, 6], [2, 2, 2, 2])
    """
    world_size = prod(axes)
    sizes = np.tile(np.array(shape, dtype=np.int64).reshape(1, -1), (world_size, 1))
    offsets = np.zeros_like(sizes)
    for axis, dim in splits:
        coord = np.arange(world_size, dtype=np.int64) // prod(axes[axis + 1 :]) % axes[axis]
        split_columns(offsets, sizes, dim, coord, axes[axis])
    return offsets, sizes


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """A box inside a shape, possibly empty."""
    bounds = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds))


def cuts(length: int, max_pieces: int = 4) -> st.SearchStrategy[list[int]]:
    """Sorted cut positions of ``0:length``; equal ones make empty pieces."""
    return st.lists(st.integers(0, length), max_size=max_pieces - 1).map(sorted)


@st.composite
def nested_cuts(draw: st.DrawFn, whole: Box, depth: int = 3) -> list[Box]:
    """A box cut in two along some dimension, and its pieces again."""
    if depth == 0 or not whole.sizes or draw(st.booleans()):
        return [whole]
    dim = draw(st.integers(0, whole.ndim - 1))
    at = draw(st.integers(0, whole.sizes[dim]))
    low = Box(whole.offsets, (*whole.sizes[:dim], at, *whole.sizes[dim + 1 :]))
    offsets = (*whole.offsets[:dim], whole.offsets[dim] + at, *whole.offsets[dim + 1 :])
    high = Box(offsets, (*whole.sizes[:dim], whole.sizes[dim] - at, *whole.sizes[dim + 1 :]))
    return [*draw(nested_cuts(low, depth - 1)), *draw(nested_cuts(high, depth - 1))]


@st.composite
def partitions(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """Boxes that hold every element of a shape once, in some order: a mesh's grid, flat ranges, or nested cuts."""
    kind = draw(st.sampled_from(["grid", "flat", "nested"]))
    if kind == "grid" and shape:
        axes = draw(mesh_sizes())
        splits = [(axis, draw(st.integers(0, len(shape) - 1))) for axis in range(len(axes))]
        found = boxes_from_columns(*mesh_boxes(shape, axes, splits))
    elif kind == "flat":
        bounds = [0, *draw(cuts(prod(shape))), prod(shape)]
        found = [box for low, high in pairwise(bounds) for box in flat_boxes(low, high, shape)]
    else:
        found = draw(nested_cuts(Box.whole(shape)))
    return draw(st.permutations(found))
