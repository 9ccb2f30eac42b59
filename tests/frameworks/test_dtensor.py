"""The intervals that a rank holds are those of torch's own arithmetic."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from ckpt_tool.frameworks.dtensor import held_intervals
from ckpt_tool.geometry.grid import PlacementSpec, interval_boxes

SPECS: dict[type, str] = {Shard: "shard", Replicate: "replicate", _StridedShard: "strided"}


def spec(placement: Shard | Replicate | _StridedShard) -> PlacementSpec:
    """A torch placement as a value."""
    if isinstance(placement, _StridedShard):
        return ("strided", placement.dim, placement.split_factor)
    return ("shard", placement.dim) if isinstance(placement, Shard) else ("replicate",)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[Shard | Replicate]]:
    """(shape, mesh, placements) of all kinds but strided, uneven and empty shards included."""
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    one = st.one_of(st.just(Replicate()), st.integers(0, len(shape) - 1).map(Shard))
    return shape, mesh, [draw(one) for _ in mesh]


@given(layouts())
def test_as_torch_computes_it(layout: tuple[tuple[int, ...], tuple[int, ...], list[Shard | Replicate]]) -> None:
    """Sizes and first offsets of every rank are those of ``_compute_local_shape_and_global_offset``."""
    shape, mesh, placements = layout
    for coord in product(*(range(n) for n in mesh)):
        sizes, offsets = _compute_local_shape_and_global_offset(shape, mesh, list(coord), placements)
        held = held_intervals(shape, mesh, coord, tuple(spec(p) for p in placements), local_shape=tuple(sizes))
        assert held is not None
        assert [sum(stop - start for start, stop in each) for each in held] == list(sizes)
        if prod(sizes):
            assert [each[0][0] for each in held] == list(offsets)
            assert all(len(each) == 1 for each in held)


@pytest.mark.parametrize("rows", [16, 13, 5, 3])
@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (4, 2), (2, 4)])
def test_fsdp_over_tensor_parallelism(rows: int, dp: int, tp: int) -> None:
    """Strided shards of FSDP2 over TP: TP cuts the rows first, FSDP what is left, as chunks of chunks."""
    whole = torch.arange(rows)
    for d, t in product(range(dp), range(tp)):
        by_tp = list(torch.chunk(whole, tp)) + [whole[:0]] * tp
        by_dp = list(torch.chunk(by_tp[t], dp)) + [whole[:0]] * dp
        expected = by_dp[d]
        placements = [_StridedShard(0, split_factor=tp), Shard(0)]
        held = held_intervals(
            (rows,), (dp, tp), (d, t), tuple(spec(p) for p in placements), local_shape=(len(expected),)
        )
        assert held is not None
        assert [i for start, stop in held[0] for i in range(start, stop)] == expected.tolist()


def test_strided_alone() -> None:
    """A strided shard that no other axis explains holds several intervals, in the order of the local tensor."""
    local_shape, _ = _compute_local_shape_and_global_offset((8, 3), (2,), [1], [_StridedShard(0, split_factor=2)])
    held = held_intervals((8, 3), (2,), (1,), (("strided", 0, 2),), local_shape=tuple(local_shape))
    assert held == [[(2, 4), (6, 8)], [(0, 3)]]
    whole = torch.arange(24).reshape(8, 3)
    parts, _ = _StridedShard(0, split_factor=2)._split_tensor(whole, 2, with_padding=False)
    joined = torch.empty(4, 3, dtype=torch.int64)
    for box, inside in interval_boxes(held):
        joined[inside.slices] = whole[box.slices]
    assert joined.equal(parts[1])


def test_another_size_is_refused() -> None:
    """A local tensor that is not of the size that the placements give is not explained."""
    assert held_intervals((8,), (2,), (0,), (("shard", 0),), local_shape=(3,)) is None
