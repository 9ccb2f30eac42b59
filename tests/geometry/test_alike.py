"""Keys with equal boxes on both sides share one join, and the pairs are those of joining every key."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.geometry import join
from ckpt_tool.geometry.alike import Side, alike_keys
from ckpt_tool.geometry.join import Boxes, Pairs, join_boxes

Look = list[tuple[int, int, int, int]]
INTERVAL = st.tuples(st.integers(0, 6), st.integers(0, 4))
LOOK = st.lists(st.tuples(INTERVAL, INTERVAL).map(lambda b: (b[0][0], b[1][0], b[0][1], b[1][1])), max_size=5)


@pytest.fixture(autouse=True)
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of a few boxes are looked at as large ones are."""
    monkeypatch.setattr(join, "_MIN_ROWS", 0)


def table(looks: list[Look], of_key: list[int], order: np.ndarray | None = None) -> Boxes:
    """Boxes of keys, each with one of the looks."""
    rows = [(key * 3, *box) for key, look in enumerate(of_key) for box in looks[look]]
    columns = np.array(rows, dtype=np.int64).reshape(-1, 5)
    if order is not None:
        columns = columns[order[: len(columns)].argsort(kind="stable")]
    return Boxes(columns[:, 0], columns[:, 1:3], columns[:, 3:])


def brute(left: Boxes, right: Boxes) -> list[tuple[int, int, tuple[int, ...], tuple[int, ...]]]:
    """Every pair, compared one by one."""
    found = []
    for j in range(len(right)):
        for i in range(len(left)):
            low = np.maximum(left.offsets[i], right.offsets[j])
            size = np.minimum(left.offsets[i] + left.sizes[i], right.offsets[j] + right.sizes[j]) - low
            if left.key[i] == right.key[j] and (size > 0).all():
                found.append((i, j, tuple(low.tolist()), tuple(size.tolist())))
    return found


@given(
    st.lists(LOOK, min_size=1, max_size=3),
    st.lists(LOOK, min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=14),
    st.integers(0, 2**32 - 1),
)
def test_the_pairs_are_those_of_all_keys(
    lefts: list[Look], rights: list[Look], keys: list[tuple[int, int]], seed: int
) -> None:
    """However rows are mixed, the join by looks gives every pair once, by right row, then left row."""
    order = np.random.default_rng(seed).permutation(200)
    left = table(lefts, [a % len(lefts) for a, _ in keys], order)
    right = table(rights, [b % len(rights) for _, b in keys], order[::-1])
    pairs = join_boxes(left, right)
    found = list(
        zip(
            pairs.left.tolist(),
            pairs.right.tolist(),
            map(tuple, pairs.offsets.tolist()),
            map(tuple, pairs.sizes.tolist()),
            strict=True,
        )
    )
    assert found == brute(left, right)


def test_layers_are_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand layers that are cut alike cost the join of one."""
    joined: list[int] = []
    once = join._join

    def counted(left: Boxes, right: Boxes, n_keys: int) -> Pairs:
        joined.append(len(left) + len(right))
        return once(left, right, n_keys)

    monkeypatch.setattr(join, "_join", counted)
    rows, columns = [(i, 0, 1, 8) for i in range(8)], [(0, i, 8, 1) for i in range(8)]
    pairs = join_boxes(table([rows], [0] * 1000), table([columns], [0] * 1000))
    assert (len(pairs), joined) == (64_000, [16])


def test_a_digest_is_not_believed() -> None:
    """Keys of one digest are alike only where their numbers are."""
    key = np.array([0, 1, 2])
    side = Side.of(key, 3, np.array([[1], [2], [1]]), np.array([[1], [1], [1]]))

    class Blind(Side):
        def digests(self) -> np.ndarray:
            return np.zeros(3, dtype=np.uint64)

    blind = Blind(side.order, side.starts, side.columns)
    assert alike_keys(blind, blind).like.tolist() == [0, 1, 0]
