"""Affine maps for fewer tensor-parallel ranks than they were recorded for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ckpt_tool.errors import LayoutError
from ckpt_tool.formats.deepspeed.affine import Pair
from ckpt_tool.formats.deepspeed.fewer_ranks import for_ranks
from ckpt_tool.formats.deepspeed.sharding import Rules
from ckpt_tool.geometry.box import Box

FULL = np.arange(24 * 8).reshape(24, 8)


def record(ranks: dict[int, Any], shape: tuple[int, int] = (24, 8)) -> dict[str, Any]:
    """A record of one parameter."""
    return {"affine_map": {"version": 1, "params": {r"^w$": {"logical_shape": list(shape), "ranks": ranks}}}}


def piece(sizes: tuple[int, int], source: int, dest: int, columns: int = 8) -> dict[str, Any]:
    """Rows, or columns, of the whole tensor in a shard of so many columns."""
    return {"shape": list(sizes), "source": [source, [8, 1]], "dest": [dest, [columns, 1]]}


ROWS = {r: {"shard_shape": [6, 8], "pieces": [piece((6, 8), r * 48, 0)]} for r in range(4)}
COLUMNS = {r: {"shard_shape": [24, 2], "pieces": [piece((24, 2), r * 2, 0, 2)]} for r in range(4)}
FUSED = {
    r: {"shard_shape": [6, 8], "pieces": [piece((4, 8), r * 32, 0), piece((2, 8), 128 + r * 16, 32)]} for r in range(4)
}
EVERYWHERE = {r: {"shard_shape": [24, 8], "pieces": [piece((24, 8), 0, 0)]} for r in range(4)}


def shards(info: dict[str, Any], n_ranks: int) -> list[Any]:
    """The shards of the full tensor, as the target's ranks get them."""
    cuts = Rules.parse(for_ranks(info, n_ranks), "info").cut("w", (24, 8), n_ranks)
    found = []
    for rank in range(n_ranks):
        shard = np.full(cuts[rank].shape, -1)
        for pair in cuts[rank].pairs:
            shard[pair.local.slices] = FULL[pair.whole.slices]
        found.append(shard.tolist())
    return found


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (ROWS, [FULL[:12], FULL[12:]]),
        (COLUMNS, [FULL[:, :4], FULL[:, 4:]]),
        (FUSED, [np.concatenate([FULL[:8], FULL[16:20]]), np.concatenate([FULL[8:16], FULL[20:]])]),
        (EVERYWHERE, [FULL, FULL]),
    ],
    ids=["rows", "columns", "fused", "everywhere"],
)
def test_two_of_four(ranks: dict[int, Any], expected: list[Any]) -> None:
    """Each has what two had, part by part; and what is recorded for them joins to the whole again."""
    info = record(ranks)
    assert shards(info, 2) == [one.tolist() for one in expected]
    again = Rules.parse(for_ranks(info, 2), "info").join("w", {rank: one.shape for rank, one in enumerate(expected)})
    whole = np.full((24, 8), -1)
    for rank, pairs in again.pairs.items():
        for pair in pairs:
            whole[pair.whole.slices] = expected[rank][pair.local.slices]
    assert whole.tolist() == FULL.tolist()
    entry = for_ranks(info, 2)["affine_map"]["params"][r"^w$"]
    holders = [one["locations"] for own in entry["ranks"].values() for one in own["pieces"]]
    assert holders == ([[0, 1]] * 2 if ranks is EVERYWHERE else [[r] for r in (0, 1) for _ in ranks[0]["pieces"]])


@pytest.mark.parametrize(
    ("ranks", "n_ranks"),
    [
        (ROWS, 3),
        (ROWS, 8),
        ({r: {"shard_shape": [n, 8], "pieces": [piece((n, 8), 0, 0)]} for r, n in enumerate((8, 8, 4, 4))}, 2),
        ({r: ROWS[r // 2] for r in range(4)}, 2),
        ({r: ROWS[3 - r] for r in range(4)}, 2),
        ({0: ROWS[0], 1: ROWS[1], 2: ROWS[2], 3: {"shard_shape": [6, 8], "pieces": FUSED[3]["pieces"]}}, 2),
        ({r: {"shard_shape": [6, 8], "pieces": [piece((3, 8), r * 48, 0)]} for r in range(4)}, 2),
    ],
    ids=["no divisor", "more", "uneven", "shared by two", "another order", "other parts", "not filled"],
)
def test_what_does_not_follow(ranks: dict[int, Any], n_ranks: int) -> None:
    """The record stays, and says that it is of other ranks."""
    info = record(ranks)
    assert for_ranks(info, n_ranks) == info
    with pytest.raises(LayoutError, match=f"how 4 tensor-parallel ranks share it, not how {n_ranks} would"):
        Rules.parse(for_ranks(info, n_ranks), "info").cut("w", (24, 8), n_ranks)


def test_other_records() -> None:
    """Without a map there is nothing to change; of as many ranks it stays."""
    assert for_ranks({"x": 1}, 2) == {"x": 1}
    assert for_ranks({"affine_map": {"params": 7}}, 2) == {"affine_map": {"params": 7}}
    assert for_ranks(record(ROWS), 4) == record(ROWS)
    cut = Rules.parse(for_ranks(record(ROWS), 2), "info").cut("w", (24, 8), 2)[1]
    assert cut.pairs == (Pair(Box((0, 0), (12, 8)), Box((12, 0), (12, 8))),)
