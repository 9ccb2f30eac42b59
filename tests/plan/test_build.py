"""A plan moves every needed byte once, to its place."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.dtypes import DType
from ckpt_tool.errors import CoverageError, LayoutError, Unsupported
from ckpt_tool.geometry.box import Box
from ckpt_tool.plan.build import make_plan
from ckpt_tool.plan.describe import plan_json
from tests.strategies import partitions, shapes
from tests.synthetic import limits, make_source, make_target


def whole(*sizes: int) -> Box:
    """The box of a whole tensor."""
    return Box.whole(sizes)


@given(st.data(), st.integers(4, 64))
def test_full_conversion_reads_each_byte_once(data: st.DataObject, tile: int) -> None:
    """Any cut to any other: bytes read = bytes of the tensor = bytes written, and tiles stay within the buffer."""
    shape = data.draw(shapes(max_ndim=4))
    array = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    source = make_source({"w": array}, {"w": data.draw(partitions(shape))})
    target = make_target(source.manifest, {"w": data.draw(partitions(shape))})
    plan = make_plan(source.manifest, target, limits=limits(tile=tile))
    assert plan.stats.read_nbytes == array.nbytes
    assert plan.stats.needed_nbytes == array.nbytes
    assert plan.stats.written_nbytes == array.nbytes
    assert plan.stats.max_tile_nbytes <= tile
    assert plan.reads.is_contiguous.all()
    assert plan.writes.is_contiguous.all()


@given(st.data())
def test_writes_fill_each_chunk_front_to_back(data: st.DataObject) -> None:
    """Taken in order, the pieces of a target chunk follow each other without gap, so a stream can take them."""
    shape = data.draw(shapes(max_ndim=3))
    array = np.arange(np.prod(shape), dtype=np.int16).reshape(shape)
    source = make_source({"w": array}, {"w": data.draw(partitions(shape))})
    target = make_target(source.manifest, {"w": data.draw(partitions(shape))})
    plan = make_plan(source.manifest, target, limits=limits(tile=10))
    position = target.chunks.offset.copy()
    for chunk, offset, length in zip(plan.writes.chunk, plan.writes.file_offset, plan.writes.length, strict=True):
        assert offset == position[chunk]
        position[chunk] += length
    assert (position == target.chunks.offset + target.chunks.length).all()


def test_replicas_are_read_once() -> None:
    """Where the source holds a box twice, the first copy is read."""
    array = np.arange(6, dtype=np.float32)
    source = make_source({"w": array}, {"w": [whole(6), whole(6)]})
    plan = make_plan(source.manifest, make_target(source.manifest, {"w": [whole(6)]}), limits=limits())
    assert plan.stats.read_nbytes == array.nbytes
    assert plan.reads.chunk.tolist() == [0]


def test_replicated_targets_are_read_once() -> None:
    """A box that several target files hold is read once and written to each."""
    array = np.arange(6, dtype=np.float32)
    source = make_source({"w": array}, {"w": [whole(6)]})
    plan = make_plan(source.manifest, make_target(source.manifest, {"w": [whole(6)] * 2}), limits=limits())
    assert plan.stats.read_nbytes == array.nbytes
    assert plan.stats.written_nbytes == 2 * array.nbytes


def test_part_of_a_tensor_reads_only_that_part() -> None:
    """Two separate rows of a matrix cost the bytes of two rows."""
    array = np.arange(40, dtype=np.float32).reshape(10, 4)
    source = make_source({"w": array}, {"w": [whole(10, 4)]})
    target = make_target(source.manifest, {"w": [Box((0, 0), (1, 4)), Box((9, 0), (1, 4))]})
    plan = make_plan(source.manifest, target, limits=limits())
    assert plan.stats.read_nbytes == 32


def test_hole_in_the_source_is_named() -> None:
    """A box that nothing covers stops the plan, with its coordinates and the tensor."""
    array = np.zeros((4, 2), np.float32)
    source = make_source({"w": array}, {"w": [Box((0, 0), (1, 2)), Box((3, 0), (1, 2))]})
    with pytest.raises(CoverageError, match=r"w: no stored data for \[1:3, 0:2\]"):
        make_plan(source.manifest, make_target(source.manifest, {"w": [whole(4, 2)]}), limits=limits())


def test_overlap_in_the_source_is_named() -> None:
    """Two boxes that share elements without being replicas stop the plan."""
    array = np.zeros((4, 2), np.float32)
    source = make_source({"w": array}, {"w": [Box((0, 0), (3, 2)), Box((2, 0), (2, 2))]})
    with pytest.raises(CoverageError, match=r"boxes \[0:3, 0:2\] and \[2:4, 0:2\] overlap"):
        make_plan(source.manifest, make_target(source.manifest, {"w": [whole(4, 2)]}), limits=limits())


def test_missing_tensor_and_wrong_shape_are_named() -> None:
    """A target tensor without source, or of another shape, is no plan."""
    small = make_source({"w": np.zeros(2, np.float32)}, {"w": [whole(2)]}).manifest
    other = make_source({"v": np.zeros(2, np.float32)}, {"v": [whole(2)]}).manifest
    large = make_source({"w": np.zeros(3, np.float32)}, {"w": [whole(3)]}).manifest
    with pytest.raises(LayoutError, match="1 target tensor has no source: 'w'"):
        make_plan(other, small, limits=limits())
    with pytest.raises(LayoutError, match=r"w: shapes differ, expected \[3\], got \[2\]"):
        make_plan(small, large, limits=limits())


def test_sub_byte_tensors_are_moved_whole_or_not_at_all() -> None:
    """Elements of 6 bits: a whole tensor is copied, a cut one is refused."""
    six = DType("float6_e2m3fn", 6, "float", "F6_E2M3")
    source = make_source({"w": np.zeros(3, np.uint8)}, {"w": [whole(3)]}, kinds={"w": six})
    tensors = source.manifest.tensors
    manifest = source.manifest.replace(
        tensors=type(tensors)(("w",), (six,), np.array([[4]]), tensors.ndim.copy(), tensors.section.copy()),
        chunks=source.manifest.chunks.replace(sizes=np.array([[4]])),
    )
    plan = make_plan(manifest, make_target(manifest, {"w": [whole(4)]}), limits=limits(tile=1))
    assert plan.stats.read_nbytes == 3
    with pytest.raises(Unsupported, match="narrower than a byte"):
        make_plan(manifest, make_target(manifest, {"w": [Box((0,), (2,)), Box((2,), (2,))]}), limits=limits())


def test_fingerprint_changes_with_the_layout_and_nothing_else() -> None:
    """The same plan twice has one fingerprint, another cut has another."""
    array = np.arange(6, dtype=np.float32)
    source = make_source({"w": array}, {"w": [whole(6)]}).manifest
    halves = [Box((0,), (3,)), Box((3,), (3,))]
    one, same = (make_plan(source, make_target(source, {"w": [whole(6)]}), limits=limits()) for _ in range(2))
    other = make_plan(source, make_target(source, {"w": halves}), limits=limits())
    assert one.fingerprint == same.fingerprint
    assert one.fingerprint != other.fingerprint


def test_plan_json_lists_every_byte_range() -> None:
    """The JSON of a plan is one document whose ranges add up to the stats."""
    array = np.arange(12, dtype=np.float32).reshape(6, 2)
    source = make_source({"w": array}, {"w": [Box((0, 0), (3, 2)), Box((3, 0), (3, 2))]}).manifest
    plan = make_plan(source, make_target(source, {"w": [whole(6, 2)]}), limits=limits(tile=16))
    document = json.loads("".join(plan_json(plan)))
    assert document["fingerprint"] == plan.fingerprint
    assert sum(length for tile in document["tiles"] for _, _, length in tile["reads"]) == array.nbytes
    assert sum(length for tile in document["tiles"] for _, _, length in tile["writes"]) == array.nbytes
