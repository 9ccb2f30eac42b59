"""Regions are put into an order in which files without seek can be written, whatever the files hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.engine.base import EngineOptions
from ckpt_tool.engine.run import run_plan
from ckpt_tool.plan.build import make_plan
from ckpt_tool.plan.limits import PlanLimits
from ckpt_tool.plan.sequence import in_file_order
from ckpt_tool.storage.memory import MemoryStore
from ckpt_tool.storage.target import open_target
from tests.strategies import partitions, shapes
from tests.synthetic import layout_of, make_source, make_target


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), max_size=24))
def test_every_file_is_filled_front_to_back(chunks: list[tuple[int, int]]) -> None:
    """In order of turns the chunks of each file come in order of their offsets; only equal labels share a turn."""
    label, file = (np.array([chunk[i] for chunk in chunks], dtype=np.int64) for i in (0, 1))
    offset = np.arange(len(chunks))
    found, turn = in_file_order(label, file, offset)
    for number in range(4):
        turns = turn[file == number].tolist()
        assert turns == sorted(set(turns))
    assert [len(set(label[found == one].tolist())) for one in set(found.tolist())] == [1] * len(set(found.tolist()))
    assert len(set(turn.tolist())) == len(set(found.tolist()))


def test_regions_stay_whole_where_they_can() -> None:
    """Files that hold the same regions in one order share them; only those in a cycle are taken apart."""
    label = np.array([0, 1, 0, 1, 2, 3, 3, 2])
    file = np.array([0, 0, 1, 1, 2, 2, 3, 3])
    found, turn = in_file_order(label, file, np.array([0, 1, 0, 1, 0, 1, 0, 1]))
    assert found[:4].tolist() == [0, 1, 0, 1]
    assert turn[:4].tolist() == [0, 1, 0, 1]
    assert len(set(found[4:].tolist())) == 4


@given(st.data())
def test_any_cut_can_be_written_without_seek(data: st.DataObject) -> None:
    """A run into storage that takes only the next byte ends with what numpy says, whatever is cut across the files."""
    import fsspec

    arrays = {
        fqn: np.arange(np.prod(shape), dtype=np.int16).reshape(shape)
        for fqn in "abc"
        for shape in [data.draw(shapes(max_ndim=2))]
    }
    source = make_source(arrays, {fqn: data.draw(partitions(array.shape)) for fqn, array in arrays.items()})
    order = data.draw(st.permutations(list(arrays)))
    target = make_target(source.manifest, {fqn: data.draw(partitions(arrays[fqn].shape)) for fqn in order}, n_files=3)
    limits = PlanLimits(max_tile_bytes=8, max_odd_tile_bytes=64, unit_bytes=64, in_file_order=True)
    plan = make_plan(source.manifest, target, limits=limits)
    url = "memory://sequence/out"
    out = open_target(url, overwrite=True, resume=False, durable=False, single_file=False)
    list(run_plan(plan, layout_of(target), MemoryStore(source.files), out, EngineOptions(1 << 20, 2, durable=False)))
    for row in range(len(target.chunks)):
        chunk = target.chunks.record(row, target.tensors, target.files)
        content = fsspec.filesystem("memory").cat(f"/sequence/out/{chunk.where.path}")
        assert content[chunk.where.offset : chunk.where.end] == arrays[chunk.fqn][chunk.box.slices].tobytes()


@pytest.mark.parametrize("n", [0, 1])
def test_nothing_to_order(n: int) -> None:
    """No chunk, and one chunk."""
    label, turn = in_file_order(np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64))
    assert (label.tolist(), turn.tolist()) == ([0] * n, [0] * n)
