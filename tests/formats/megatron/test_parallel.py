"""How weights are cut over tensor-parallel ranks: parts put together give the whole, whatever the cut."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.dtypes import dtype
from ckpt_tool.errors import FormatError, LayoutError
from ckpt_tool.formats._pickle.tensors import StorageRef, TensorRef
from ckpt_tool.formats.megatron.parallel import built_in_rules, placed_views, view
from ckpt_tool.geometry.runs import contiguous_strides
from tests.formats.megatron.run import cut

FLOAT = dtype("float32")


def described(shape: tuple[int, ...]) -> TensorRef:
    """A packed tensor of its own storage."""
    numel = int(np.prod(shape, dtype=np.int64))
    return TensorRef(StorageRef(FLOAT, "0", "cpu", numel), 0, shape, contiguous_strides(shape), FLOAT)


@given(st.sampled_from(["column", "row", "gated", "whole"]), st.integers(1, 4), st.integers(1, 3), st.integers(1, 5))
def test_parts_of_all_ranks_are_the_whole(kind: str, n_ranks: int, rows: int, columns: int) -> None:
    """What the ranks hold, put into the boxes that are found for it, is the global weight."""
    whole = np.arange(2 * n_ranks * rows * n_ranks * columns, dtype=np.float32).reshape(2 * n_ranks * rows, -1)
    canvas = np.full(whole.shape, -1, dtype=np.float32)
    for rank in range(n_ranks):
        part = np.ascontiguousarray(cut(whole, kind, rank, n_ranks))
        for box, where in placed_views(described(part.shape), kind, (), rank, n_ranks):
            strides = tuple(stride * 4 for stride in where.strides)
            elements = np.lib.stride_tricks.as_strided(part.ravel()[where.offset :], where.shape, strides)
            canvas[box.slices] = elements
    np.testing.assert_array_equal(canvas, whole)


def test_layer_and_expert_lead() -> None:
    """Layer and expert become leading dimensions of size one."""
    ((box, part),) = placed_views(described((3, 4)), "row", (5, 2), 1, 2)
    assert (str(box), part.shape) == ("[5:6, 2:3, 0:3, 4:8]", (1, 1, 3, 4))


def test_odd_gate_is_refused() -> None:
    """Gate and up have as many rows each."""
    with pytest.raises(LayoutError, match="3 rows, which is odd"):
        placed_views(described((3, 4)), "gated", (), 0, 2)


def test_views_stay_inside() -> None:
    """A part of a flat tensor must lie inside of it."""
    assert view(described((10,)), 4, (2, 3)).offset == 4
    with pytest.raises(FormatError, match="elements 5 to 11"):
        view(described((10,)), 5, (2, 3))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("embedding.word_embeddings.weight", "column"),
        ("self_attention.linear_qkv.bias", "column"),
        ("self_attention.linear_proj.bias", "whole"),
        ("self_attention.linear_q_up_proj.layer_norm_weight", "whole"),
        ("self_attention.linear_kv_up_proj.weight", "column"),
        ("self_attention.linear_kv_down_proj.weight", "whole"),
        ("mlp.linear_fc1.weight", "gated"),
        ("mlp.shared_experts.linear_fc2.weight", "row"),
        ("mlp.experts.experts.linear_fc1.weight", "gated"),
        ("mlp.router.expert_bias", "buffer"),
        ("mixer.in_proj.weight", None),
    ],
)
def test_rules(name: str, expected: str | None) -> None:
    """The built-in rules, by name; what they do not know is None."""
    assert built_in_rules().cut(name) == expected


def test_rules_do_not_overlap() -> None:
    """No name that a rule spells out literally fits two rules, so that their order does not matter."""
    rules = built_in_rules().rules
    for pattern, cut_name in rules:
        literal = re.sub(r"\\(.)", r"\1", re.sub(r"\(([^|)]*)[^)]*\)\??", r"\1", pattern.pattern.replace("\\w+", "x")))
        fitting = {other for tried, other in rules if tried.fullmatch(literal)}
        assert fitting <= {cut_name}, literal
