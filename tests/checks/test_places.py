"""Places of elements in chunks, against numpy."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.checks.places import global_indices
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.model import FileRange
from tests.checks.synthetic import chunk, make, tensor
from tests.strategies import shapes


@given(st.data())
def test_every_element_of_a_permuted_view(data: st.DataObject) -> None:
    """The view of a transposed, padded array: each of its elements is found, and the padding is none of them."""
    sizes = data.draw(shapes(max_ndim=4, max_size=4).filter(lambda s: prod(s) > 0))
    order = data.draw(st.permutations(range(len(sizes))))
    padded = [sizes[dim] + data.draw(st.integers(0, 2)) for dim in order]
    base = np.arange(prod(padded)).reshape(padded)
    view = base[tuple(slice(0, sizes[dim]) for dim in order)].transpose(np.argsort(order) if order else None)
    assert view.shape == sizes
    strides = tuple(step // 8 for step in view.strides)
    offsets = tuple(data.draw(st.integers(0, 5)) for _ in sizes)
    shape = tuple(o + s for o, s in zip(offsets, sizes, strict=True))
    manifest = make([tensor("w", shape)], [chunk("w", Box(offsets, sizes), FileRange("a", 0, 4), strides=strides)])
    positions = np.arange(int(view.max()) + 1)
    index, is_element = global_indices(manifest.chunks, 0, len(sizes), positions)
    assert set(positions[is_element].tolist()) == set(view.reshape(-1).tolist())
    for position in positions[is_element].tolist():
        local = tuple(index[position] - np.array(offsets, dtype=np.int64))
        assert view[local] == position


def test_broadcast_dimension_is_at_its_first_index() -> None:
    """A stride of zero: one element stands for all indices, and is told by the first."""
    box = Box((0, 0), (3, 2))
    manifest = make([tensor("w", (3, 2))], [chunk("w", box, FileRange("a", 0, 8), strides=(0, 1))])
    index, is_element = global_indices(manifest.chunks, 0, 2, np.array([0, 1]))
    assert index.tolist() == [[0, 0], [0, 1]]
    assert is_element.tolist() == [True, True]
