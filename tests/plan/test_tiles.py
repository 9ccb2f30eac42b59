"""Tiles cut a region once, in order, within the buffer, and in one run of memory."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.geometry.box import Box
from ckpt_tool.geometry.columns import boxes_from_columns
from ckpt_tool.geometry.join import Boxes
from ckpt_tool.plan.tiles import cut_tiles
from tests import oracle
from tests.invariants import assert_partition
from tests.strategies import shapes


@given(shapes(max_ndim=4).filter(lambda s: 0 not in s), st.integers(1, 40), st.sampled_from([8, 16, 32, 128]))
def test_tiles_partition_a_tensor_in_order(shape: tuple[int, ...], max_tile_bytes: int, bits: int) -> None:
    """Laid end to end, the tiles of a tensor are its elements in row-major order, none larger than the buffer."""
    whole = Boxes(np.array([0]), *oracle.box_columns([Box.whole(shape)], len(shape)))
    tiles = cut_tiles(whole, bits=np.array([bits]), max_tile_bytes=max_tile_bytes, whole=np.array([0]))
    boxes = boxes_from_columns(tiles.offsets, tiles.sizes)
    assert_partition(shape, boxes)
    elements = oracle.positions(shape)
    in_order = np.concatenate([elements[box.slices].reshape(-1) for box in boxes])
    assert in_order.tolist() == list(range(prod(shape)))
    assert all(box.volume * bits <= max(max_tile_bytes * 8, bits) for box in boxes)


def test_whole_regions_stay_one_tile() -> None:
    """A region that must not be cut is not, and its neighbours are cut as usual; keys are rows of regions."""
    regions = Boxes(np.array([7, 7]), np.array([[0, 0], [0, 0]]), np.array([[4, 4], [4, 4]]))
    tiles = cut_tiles(regions, bits=np.array([8, 8]), max_tile_bytes=4, whole=np.array([1, 0]))
    assert tiles.key.tolist() == [0, 1, 1, 1, 1]
    assert tiles.sizes.tolist() == [[4, 4], [1, 4], [1, 4], [1, 4], [1, 4]]
