"""Flat parameters against a slow reference: every element of a parameter is where the flat vector has it."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.dtypes import dtype
from ckpt_tool.errors import Unsupported
from ckpt_tool.formats.bytecheckpoint.flat import flat_parameters, unflattened_section
from ckpt_tool.manifest.model import TensorMeta
from ckpt_tool.manifest.tables import ChunkTable, TensorTable

SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=4)


def recorded(shapes: list[tuple[int, ...]], padding: list[int]) -> dict[str, object]:
    """``user_defined_dict`` of one flat parameter ``m._flat_param``."""
    numels, mask = [], []
    for shape, pad in zip(shapes, padding, strict=True):
        numels += [prod(shape), pad]
        mask += [False, True]
    return {
        "fsdp_flat_param_to_fqns": {"m._flat_param": [f"p{i}" for i in range(len(shapes))]},
        "fsdp_is_padding_mask": {"m._flat_param": mask},
        "fsdp_numels_with_padding": {"m._flat_param": tuple(numels)},
        "fsdp_shapes": {"m._flat_param": shapes},
    }


def flat_chunks(numel: int, cuts: list[int]) -> ChunkTable:
    """A vector of int32 cut at ``cuts``, stored in order from byte 100."""
    bounds = [0, *sorted(cut for cut in cuts if 0 < cut < numel), numel]
    starts = np.array(bounds[:-1])
    sizes = np.diff(bounds)
    kept = sizes > 0
    starts, sizes = starts[kept], sizes[kept]
    n = len(starts)
    return ChunkTable.from_columns(
        tensor=np.zeros(n),
        offsets=starts[:, None],
        sizes=sizes[:, None],
        file=np.zeros(n),
        offset=100 + 4 * starts,
        length=4 * sizes,
    )


@given(SHAPES, st.lists(st.integers(0, 3), min_size=4, max_size=4), st.lists(st.integers(1, 60), max_size=5))
def test_every_element_is_found(shapes: list[tuple[int, ...]], padding: list[int], cuts: list[int]) -> None:
    """Boxes of a parameter hold, in order, the flat elements between its first and its last; padding is in none."""
    flat = flat_parameters(recorded(shapes, padding[: len(shapes)]), "x")
    numel = flat["m._flat_param"].numel
    meta = TensorMeta("m._flat_param", dtype("int32"), (numel,), "model", ("m._flat_param",))
    tensors, chunks = unflattened_section(TensorTable.from_records([meta]), flat_chunks(numel, cuts), flat, "x")
    assert tensors.fqns == tuple(f"m.p{i}" for i in range(len(shapes)))
    for row, segment in enumerate(flat["m._flat_param"].segments):
        expected = np.arange(segment.start, segment.stop).reshape(segment.shape)
        actual = np.full(segment.shape, -1)
        for chunk in chunks.rows_of(row):
            box = chunks.box(int(chunk), len(segment.shape))
            first = (int(chunks.offset[chunk]) - 100) // 4
            assert int(chunks.length[chunk]) == 4 * box.volume
            actual[box.slices] = np.arange(first, first + box.volume).reshape(box.sizes)
        assert actual.tolist() == expected.tolist()


def test_several_models() -> None:
    """``model_dict_keys`` names models of one checkpoint, each with a record of its own."""
    flat = flat_parameters({"model_dict_keys": ["actor"], "actor": recorded([(2, 2)], [0])}, "x")
    assert [segment.fqn for segment in flat["actor.m._flat_param"].segments] == ["actor.m.p0"]


def test_state_and_counters() -> None:
    """State of a flat parameter is cut like it; a counter of it stays, state of one parameter gets two keys."""
    flat = flat_parameters(recorded([(2, 2), (3,)], [1, 0]), "x")
    metas = [
        TensorMeta(
            "state.m._flat_param.exp_avg", dtype("int32"), (8,), "optimizer", ("state", "m._flat_param.exp_avg")
        ),
        TensorMeta("state.m._flat_param.count", dtype("int32"), (), "optimizer", ("state", "m._flat_param.count")),
        TensorMeta("state.m.p0.step", dtype("int32"), (), "optimizer", ("state", "m.p0.step")),
    ]
    tensors, _ = unflattened_section(TensorTable.from_records(metas), flat_chunks(8, []), flat, "x")
    assert [(meta.fqn, meta.shape, meta.path) for meta in tensors] == [
        ("state.m.p0.exp_avg", (2, 2), ("state", "m.p0", "exp_avg")),
        ("state.m.p1.exp_avg", (3,), ("state", "m.p1", "exp_avg")),
        ("state.m._flat_param.count", (), ("state", "m._flat_param.count")),
        ("state.m.p0.step", (), ("state", "m.p0", "step")),
    ]


def test_a_flat_parameter_with_gaps_is_refused() -> None:
    """Every second element of a storage cannot be cut into packed boxes."""
    flat = flat_parameters(recorded([(2, 2)], [0]), "x")
    meta = TensorMeta("m._flat_param", dtype("int32"), (4,), "model", ("m._flat_param",))
    chunks = flat_chunks(4, []).replace(strides=np.array([[2]]))
    with pytest.raises(Unsupported, match="not contiguous"):
        unflattened_section(TensorTable.from_records([meta]), chunks, flat, "x")
