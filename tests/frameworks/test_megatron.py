"""Megatron's wrappers, told by their attributes: places, views, and what is in their place when all is filled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_tool
from ckpt_tool.errors import LayoutError, Unsupported
from ckpt_tool.frameworks.state import walk_state
from ckpt_tool.geometry.box import Box
from tests.frameworks.wrappers import Factory, Held, Local, Sharded


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Stacked layers, a vector, a vocabulary, and an object."""
    state = {
        "layers.w": torch.arange(48.0).reshape(2, 4, 6), "gate": torch.arange(12.0).reshape(6, 2),
        "vocabulary": torch.arange(10.0).reshape(5, 2), "rng/shard_1_2": 3,
    }  # fmt: skip
    torch.save({"model": state}, tmp_path / "state.pt")
    return tmp_path / "state.pt"


def test_one_key_in_many_places() -> None:
    """Wrappers of one key are boxes of one tensor, and views of the memory that they wrap."""
    layers = [torch.zeros(4, 3) for _ in range(2)]
    state = {f"layer{i}": Sharded("layers.w", layers[i], (2, 4, 6), (i, 0, 3), 1) for i in range(2)}
    (leaf,) = walk_state(state).leaves
    assert (leaf.fqn, leaf.shape) == ("layers.w", (2, 4, 6))
    assert [part.box for part in leaf.parts] == [Box((i, 0, 3), (1, 4, 3)) for i in range(2)]
    leaf.parts[1].view.fill_(7)
    assert layers[1].eq(7).all()


def test_loads_in_place(saved: Path) -> None:
    """What was wrapped is in the place of wrappers, filled; a longer vocabulary keeps its end."""
    flat, vocabulary, gate = torch.zeros(7), torch.full((8, 2), -1.0), torch.zeros(6, 2)
    stacked = torch.zeros(4, 6)
    state: dict[str, Any] = {
        "flat": Sharded("layers.w", flat, (2, 4, 6), (1, 0, 0), 1, slice(4, 11), (4, 6)),
        "stacked": Sharded("layers.w", stacked, (2, 4, 6), (0, 0, 0), 1),
        "vocabulary": Sharded("vocabulary", vocabulary, (8, 2), (0, 0), allow_shape_mismatch=True),
        "views": Factory("gate", gate, halves, torch.cat),
        "rng": Held("rng", None),
        "absent": Held("absent", "kept"),
        "local": Local(),
    }
    report = ckpt_tool.load(state, saved)
    assert state["flat"] is flat
    assert flat.tolist() == list(range(28, 35))
    assert state["stacked"].equal(torch.arange(24.0).reshape(4, 6))
    assert state["vocabulary"][:5].equal(torch.arange(10.0).reshape(5, 2))
    assert state["vocabulary"][5:].eq(-1).all()
    assert state["views"] is gate
    assert gate.equal(torch.arange(12.0).reshape(6, 2))
    assert (state["rng"], state["absent"], state["local"]) == (3, "kept", ["mine"])
    assert report.missing == ("absent/shard_1_2",)


def halves(key: str, data: torch.Tensor) -> list[Sharded]:
    """Two views, saved as one tensor."""
    return [Sharded(key, part, (6, 2), (3 * at, 0)) for at, part in enumerate(data.chunk(2))]


def test_a_factory_of_copies_is_merged(saved: Path) -> None:
    """Where what was built shares no memory with the factory's tensor, its own function makes one of it."""
    state: dict[str, Any] = {
        "copies": Factory("gate", torch.zeros(2, 6), lambda key, data: halves(key, data.t().clone()), torch.cat)
    }
    ckpt_tool.load(state, saved, strict=False)
    assert state["copies"].equal(torch.arange(12.0).reshape(6, 2))


def test_refusals() -> None:
    """No data, data of another size, and parts that contradict each other."""
    with pytest.raises(Unsupported, match="w: a ShardedTensor without data"):
        walk_state({"w": Sharded("w", None, (2,), (0,), local_shape=(2,))})
    with pytest.raises(LayoutError, match=r"w: expected a tensor of \[3\], got \[2\]"):
        walk_state({"w": Sharded("w", torch.zeros(2), (2,), (0,), local_shape=(3,))})
    with pytest.raises(LayoutError, match="w: expected 3 elements of a flat range, got 2"):
        walk_state({"w": Sharded("w", torch.zeros(2), (4,), (0,), 0, slice(0, 3), (4,))})
    with pytest.raises(LayoutError, match="two parts of this tensor do not agree"):
        walk_state({"a": Sharded("w", torch.zeros(2), (4,), (0,)), "b": Sharded("w", torch.zeros(2), (6,), (2,))})
