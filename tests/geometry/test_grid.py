"""Laws of grids, and agreement with torch where the rule is torch's."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import _utils as torch_utils
from torch.distributed.tensor.placement_types import _StridedShard

from ckpt_tool.errors import LayoutError
from ckpt_tool.geometry.box import Box
from ckpt_tool.geometry.columns import boxes_from_columns
from ckpt_tool.geometry.grid import (
    PlacementSpec,
    chunk_bounds,
    cut_order,
    interval_boxes,
    placement_intervals,
)
from tests import oracle
from tests.invariants import assert_bounds, assert_partition
from tests.strategies import mesh_boxes, mesh_sizes, shapes


@given(st.integers(0, 40), st.integers(1, 12))
@settings(max_examples=100)
def test_chunk_bounds_are_those_of_torch(length: int, parts: int) -> None:
    """Pieces are torch.chunk's, the ones that torch leaves out are empty and lie at the end."""
    bounds = chunk_bounds(length, parts)
    assert_bounds(bounds, length)
    pieces = [list(range(low, high)) for low, high in pairwise(bounds)]
    torch_pieces = [piece.tolist() for piece in torch.arange(length).chunk(parts)] if length else []
    assert pieces == torch_pieces + [[]] * (parts - len(torch_pieces))
    assert pieces == oracle.chunk_pieces(length, parts)


@pytest.mark.parametrize("length", [-1, 4])
def test_parts_must_be_positive(length: int) -> None:
    """No part, or a negative length, cannot be cut."""
    with pytest.raises(LayoutError, match="cannot cut"):
        chunk_bounds(length, 0 if length > 0 else 2)


def strided_intervals(length: int, parts: int, split_factor: int) -> list[list[tuple[int, int]]]:
    """What each part of a strided shard over one axis holds."""
    placements: list[PlacementSpec] = [("strided", 0, split_factor)]
    return [placement_intervals((length,), (parts,), (part,), placements)[0] for part in range(parts)]


@given(st.integers(0, 30), st.integers(1, 5), st.integers(1, 6))
@settings(max_examples=120)
def test_strided_intervals_are_those_of_torch(length: int, parts: int, split_factor: int) -> None:
    """Each part holds the indices that torch's own _StridedShard splits off for it."""
    torch_parts, _ = _StridedShard(0, split_factor=split_factor)._split_tensor(
        torch.arange(length), parts, with_padding=False
    )
    parts_held = strided_intervals(length, parts, split_factor)
    assert [[i for low, high in held for i in range(low, high)] for held in parts_held] == [
        part.tolist() for part in torch_parts
    ]
    for held in parts_held:
        assert all(low < high for low, high in held)
        assert all(a[1] < b[0] for a, b in pairwise(held))  # merged and ascending


@given(st.integers(0, 30), st.integers(1, 5))
@settings(max_examples=30)
def test_split_factor_one_is_a_plain_shard(length: int, parts: int) -> None:
    """A strided shard with split factor 1 is torch.chunk."""
    bounds = chunk_bounds(length, parts).tolist()
    expected = [[(low, high)] if low < high else [] for low, high in pairwise(bounds)]
    assert strided_intervals(length, parts, 1) == expected


@given(shapes(3, 9, min_ndim=1), mesh_sizes(), st.data())
@settings(max_examples=100)
def test_mesh_boxes_cover_once(shape: tuple[int, ...], axes: tuple[int, ...], data: st.DataObject) -> None:
    """Boxes of ranks with the same place on the axes that don't split are a partition; those axes replicate."""
    order = data.draw(st.permutations(range(len(axes))))[: data.draw(st.integers(0, len(axes)))]
    splits = [(axis, data.draw(st.integers(0, len(shape) - 1))) for axis in order]
    boxes = boxes_from_columns(*mesh_boxes(shape, axes, splits))
    coords = list(np.ndindex(*axes))
    idle = [axis for axis in range(len(axes)) if axis not in order]
    groups: dict[tuple[int, ...], list[Box]] = {}
    for coord, box in zip(coords, boxes, strict=True):
        groups.setdefault(tuple(coord[axis] for axis in idle), []).append(box)
    for group in groups.values():
        assert_partition(shape, group)
        assert group == next(iter(groups.values()))


def test_fsdp_over_tp_on_one_dimension() -> None:
    """FSDP2 cuts what TP left: rank (dp, tp) of 16 rows holds rows from tp * 8 + dp * 4."""
    offsets, sizes = mesh_boxes((16, 4), (2, 2), [(1, 0), (0, 0)])
    assert offsets[:, 0].tolist() == [tp * 8 + dp * 4 for dp in range(2) for tp in range(2)]
    assert sizes.tolist() == [[4, 4]] * 4


@given(st.integers(0, 40), st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=80)
def test_mesh_boxes_agree_with_strided_placements(length: int, dp: int, tp: int) -> None:
    """(_StridedShard(sf=tp), Shard) over (dp, tp) is splitting by tp, then by dp, where both divide evenly."""
    length -= length % (dp * tp)
    boxes = boxes_from_columns(*mesh_boxes((length,), (dp, tp), [(1, 0), (0, 0)]))
    for coord, box in zip(product(range(dp), range(tp)), boxes, strict=True):
        held = placement_intervals((length,), (dp, tp), coord, [("strided", 0, tp), ("shard", 0)])[0]
        assert held == ([(box.offsets[0], box.ends[0])] if length else [])


@st.composite
def placed(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[PlacementSpec]]:
    """A shape, the sizes of a mesh, and a placement for each of its axes."""
    shape = draw(shapes(3, 14, min_ndim=1))
    axes = draw(mesh_sizes())
    placements: list[PlacementSpec] = []
    for _ in axes:
        dim = draw(st.integers(0, len(shape) - 1))
        choices: list[PlacementSpec] = [("shard", dim), ("strided", dim, draw(st.integers(1, 4))), ("replicate",)]
        placements.append(draw(st.sampled_from(choices)))
    return shape, axes, placements


def torch_placement(spec: PlacementSpec) -> Shard | Replicate | _StridedShard:
    """The torch object that a spec names."""
    if spec[0] == "shard":
        return Shard(spec[1])
    if spec[0] == "strided":
        return _StridedShard(spec[1], split_factor=spec[2])
    return Replicate()


@given(placed())
@settings(max_examples=80)
def test_placements_hold_what_torch_says(case: tuple[tuple[int, ...], tuple[int, ...], list[PlacementSpec]]) -> None:
    """Local shape and first offset of every rank are torch's; the boxes of all ranks map the whole tensor."""
    shape, axes, placements = case
    positions = oracle.positions(shape)
    held_count = np.zeros(shape, dtype=np.int64)
    for coord in np.ndindex(*axes):
        intervals = placement_intervals(shape, axes, coord, placements)
        local_shape, offset = torch_utils._compute_local_shape_and_global_offset(
            shape, axes, list(coord), [torch_placement(spec) for spec in placements]
        )
        assert tuple(sum(high - low for low, high in held) for held in intervals) == tuple(local_shape)
        if 0 not in local_shape:
            assert tuple(held[0][0] for held in intervals) == tuple(offset)
        local = positions
        for axis, spec in enumerate(placements):
            if spec[0] != "replicate":
                local = split_by_torch(local, spec, axes[axis], coord[axis])
        pairs = interval_boxes(intervals)
        assert_partition(tuple(local.shape), [part for _, part in pairs])
        for box, part in pairs:
            assert positions[box.slices].tolist() == local[part.slices].tolist()
            held_count[box.slices] += 1
    copies = prod(n for n, spec in zip(axes, placements, strict=True) if spec[0] == "replicate")
    assert held_count.tolist() == np.full(shape, copies).tolist()


def split_by_torch(array: np.ndarray, spec: PlacementSpec, parts: int, part: int) -> np.ndarray:
    """One rank's piece of an array as torch's own placement cuts it."""
    pieces, _ = torch_placement(spec)._split_tensor(torch.from_numpy(array), parts, with_padding=False)
    return np.asarray(pieces[part])


def test_not_every_local_tensor_is_one_box() -> None:
    """(_StridedShard, Replicate) leaves a rank with rows 0, 1, 4 and 5: two boxes, mapped to halves of its tensor."""
    intervals = placement_intervals((8, 2), (2, 2), (0, 0), [("strided", 0, 2), ("replicate",)])
    assert interval_boxes(intervals) == [
        (Box((0, 0), (2, 2)), Box((0, 0), (2, 2))),
        (Box((4, 0), (2, 2)), Box((2, 0), (2, 2))),
    ]


@pytest.mark.parametrize(
    ("coord", "placements", "message"),
    [
        ((0,), [("shard", 0)], "expected as many of each"),
        ((0, 2), [("shard", 0), ("replicate",)], "outside a mesh"),
        ((0, 0), [("shard", 2), ("replicate",)], "no dimension 2"),
    ],
)
def test_placements_that_do_not_fit_are_refused(
    coord: tuple[int, ...], placements: list[PlacementSpec], message: str
) -> None:
    """A wrong number of axes, a coordinate off the mesh and a missing dimension are errors."""
    with pytest.raises(LayoutError, match=message):
        placement_intervals((4, 4), (2, 2), coord, placements)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5))
def test_resolved_strided_shards_cut_where_they_did(outer: int, inner: int, rows: int) -> None:
    """Where sizes divide evenly, the order of cuts gives the intervals of the placements as they are."""
    shape, axes = (outer * inner * rows, 3), (outer, inner)
    placements: list[PlacementSpec] = [("strided", 0, inner), ("shard", 0)]
    order = cut_order(axes, placements)
    assert all(placement == ("shard", 0) for _, placement in order)
    for coord in product(range(outer), range(inner)):
        cut = placement_intervals(
            shape, [axes[a] for a, _ in order], [coord[a] for a, _ in order], [placement for _, placement in order]
        )
        assert cut == placement_intervals(shape, axes, coord, placements)


def test_uneven_rows_lie_where_fsdp2_puts_them() -> None:
    """9 rows over tensor parallelism 2, then FSDP2 over 4 (seen with torch 2.13): rank (3, 1) has the last row."""
    order = cut_order((4, 2), [("strided", 0, 2), ("shard", 0)])
    held = [
        placement_intervals((9,), [(4, 2)[a] for a, _ in order], [coord[a] for a, _ in order], [p for _, p in order])
        for coord in product(range(4), range(2))
    ]
    rows = [[(0, 2)], [(5, 6)], [(2, 4)], [(6, 7)], [(4, 5)], [(7, 8)], [], [(8, 9)]]
    assert held == [[intervals] for intervals in rows]


@pytest.mark.parametrize(
    ("axes", "placements", "expected"),
    [
        ((2, 2, 2), [("strided", 0, 4), ("strided", 0, 2), ("shard", 0)], [(2, "shard"), (1, "shard"), (0, "shard")]),
        ((2, 3), [("strided", 0, 2), ("shard", 1)], [(0, "strided"), (1, "shard")]),
        ((2, 3), [("strided", 0, 2), ("shard", 0)], [(0, "strided"), (1, "shard")]),
        ((2, 3), [("strided", 0, 1), ("shard", 0)], [(0, "shard"), (1, "shard")]),
        ((2, 2), [("replicate",), ("shard", 0)], [(0, "replicate"), (1, "shard")]),
    ],
)
def test_strided_shards_are_explained_by_later_axes(
    axes: tuple[int, ...], placements: list[PlacementSpec], expected: list[tuple[int, str]]
) -> None:
    """Axes of the same dimension behind it whose sizes multiply to the factor; else the strided shard stays."""
    assert [(axis, placement[0]) for axis, placement in cut_order(axes, placements)] == expected
