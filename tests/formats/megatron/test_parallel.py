"""How weights are cut over tensor-parallel ranks: parts put together give the whole, whatever the cut."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.dtypes import dtype
from ckpt_tool.errors import FormatError, LayoutError
from ckpt_tool.formats._pickle.tensors import StorageRef, TensorRef
from ckpt_tool.formats.megatron.parallel import built_in_rules, part_rows, placed_parts, placed_views, view
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
        ("mixer.in_proj.weight", "fused"),
        ("mixer.conv1d.bias", "fused"),
        ("mixer.D", "column"),
        ("final_norm.weight", "whole"),
        ("mixer.other.weight", None),
    ],
)
def test_rules(name: str, expected: str | None) -> None:
    """The built-in rules, by name; what they do not know is None."""
    assert built_in_rules().cut(name) == expected


def test_rules_do_not_overlap() -> None:
    """No name that a rule spells out literally fits two rules, so that their order does not matter."""
    rules = built_in_rules().rules
    for pattern, rule in rules:
        literal = re.sub(r"\\(.)", r"\1", re.sub(r"\(([^|)]*)[^)]*\)\??", r"\1", pattern.pattern.replace("\\w+", "x")))
        fitting = {other for tried, other in rules if tried.fullmatch(literal)}
        assert fitting <= {rule}, literal


@pytest.mark.parametrize(
    ("entry", "match"),
    [
        ('names = "a"\ncut = "row"', "rule 1: names = 'a', cut = 'row', expected a list of names and a cut"),
        ('names = ["a"]', r"names = \['a'\], cut = None, expected a list of names and a cut"),
        ('names = ["a"]\ncut = "row"\ndim = 1', "rule 1: 'dim' is not known here"),
        ('names = ["a"]\ncut = "row"\n[[rules]]', "ckpt-megatron.toml: 'rules' is not known here"),
        ('names = ["("]\ncut = "row"', "no file of parallel rules: missing"),
        ('names = ["a"]\ncut = "rows"', "cut 'rows', expected one of column, row, gated, fused, whole, buffer"),
        ('names = ["a"]\ncut = "fused"', r"parts = \[\], expected parts = \[4, 2, 6\]"),
        ('names = ["a"]\ncut = "row"\nparts = [1, 2]', 'expected parts for cut = "fused" alone'),
        ('names = ["a"]\ncut = "fused"\nparts = [1, "rest"]', "expected positive numbers, or names"),
        ('names = ["a"]\ncut = "fused"\nparts = [1, 0]', "expected positive numbers"),
        ('names = ["a"]\ncut = "fused"\nparts = ["w"]', "expected positive numbers, or names with a dimension"),
        ('names = ["a"]\ncut = "fused"\nparts = [1, 2]\nkeys = ["x"]', "expected a name for each of 2 parts"),
    ],
)
def test_own_rules_that_are_none(entry: str, match: str) -> None:
    """What is wrong with a rule of the user's, and what is expected in its place."""
    with pytest.raises(FormatError, match=match):
        built_in_rules().with_own(f"[[rule]]\n{entry}", "ckpt-megatron.toml")


@pytest.mark.parametrize(
    ("parts", "match"),
    [
        ((4, 2, 6), "8 rows are no parts of 4 : 2 : 6"),
        (("w[1]", "rest", "rest"), r"8 rows do not consist of w\[1\] = 3, rest, rest"),
        (("w[1]", "w[1]"), r"8 rows do not consist of w\[1\] = 3, w\[1\] = 3"),
        (("w[2]", "rest"), r"rows of a part are those of w\[2\], and the layer has no such tensor"),
        (("v[0]", "rest"), r"those of v\[0\], and the layer has no such tensor"),
    ],
)
def test_rows_that_are_no_such_parts(parts: tuple[int | str, ...], match: str) -> None:
    """Rows that do not come out are refused with the numbers."""
    with pytest.raises(LayoutError, match=match):
        part_rows(parts, 8, {"w": (2, 3)})


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(1, 4), st.booleans())
def test_unequal_parts_of_all_ranks_are_the_whole(sizes: list[int], n_ranks: int, is_apart: bool) -> None:
    """Each part is cut by itself: joined, they are the weight, or with keys of their own the parts one by one."""
    whole = np.arange(sum(sizes) * n_ranks * 3, dtype=np.float32).reshape(-1, 3)
    ends = np.cumsum([0, *sizes]) * n_ranks
    canvas = np.full(whole.shape, -1, dtype=np.float32)
    for rank in range(n_ranks):
        own = [np.split(whole[a:b], n_ranks)[rank] for a, b in itertools.pairwise(ends)]
        part = np.concatenate(own)
        if is_apart:
            found = placed_parts(described(part.shape), (), rank, n_ranks, sizes)
            starts = [start for start, views in zip(ends, found, strict=False) for _ in views]
            views = [view for views in found for view in views]
        else:
            views = placed_views(described(part.shape), "fused", (), rank, n_ranks, sizes)
            views = views if n_ranks > 1 else placed_views(described(part.shape), "whole", (), 0, 1)
            starts = [0] * len(views)
        for start, (box, where) in zip(starts, views, strict=True):
            strides = tuple(stride * 4 for stride in where.strides)
            elements = np.lib.stride_tricks.as_strided(part.ravel()[where.offset :], where.shape, strides)
            canvas[start:][box.slices] = elements
    np.testing.assert_array_equal(canvas, whole)


@pytest.mark.parametrize(("text", "match"), [("rule = [3]", "rule 1: '3' is not known"), ("rule = 3", "no file of")])
def test_own_rules_that_are_no_tables(text: str, match: str) -> None:
    """Values in place of tables are no rules either."""
    with pytest.raises(FormatError, match=match):
        built_in_rules().with_own(text, "ckpt-megatron.toml")
