"""What is no tensor of its own in a state: tuples and their tensors, numbers of numpy, and nothing but such."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt_tool
from ckpt_tool.api.job.saver import Saver
from ckpt_tool.errors import LayoutError
from tests.job.test_save_alone import save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Pair(NamedTuple):
    """A tuple of its own class."""

    left: Any
    right: Any


@pytest.fixture(scope="module")
def saver() -> Iterator[Saver]:
    """One for all tests."""
    made = Saver()
    yield made
    made.close()


STATES: dict[str, Any] = {
    "tuple": {"w": torch.ones(2), "h": (torch.arange(3.0), 3, "text")},
    "no tensor of its own": {"h": (torch.arange(3.0), 3)},
    "list of tuples": {"h": [(torch.ones(2), torch.zeros(1)), (torch.ones(1), 5)]},
    "dict in a tuple": {"h": ({"x": torch.ones(2), "n": 1}, (torch.full((2, 2), 4.0),))},
    "nothing but values": {"n": 3, "text": "abc"},
    "ordered": {"h": OrderedDict(a=(torch.ones(2), 1))},
    "window": {"w": torch.ones(2), "h": deque([1.0, 2.5], maxlen=4)},
    "window of tensors": {"h": deque([torch.ones(2), torch.zeros(1)], maxlen=4)},
    "window in a tuple": {"h": (torch.ones(2), deque([(1, 2), (3, 4)]))},
    "bounds": {"w": torch.ones(2), "r": range(2, 9, 3), "s": slice(1, None)},
}


@pytest.mark.parametrize("writer", ["ours", "torch"])
@pytest.mark.parametrize("name", STATES)
def test_tuples_come_back(saver: Saver, tmp_path: Path, name: str, writer: str) -> None:
    """As one object, which is how DCP saves them; tensors are filled where they are."""
    state = STATES[name]
    if writer == "ours":
        save(saver, state, tmp_path / "s").wait()
    else:
        dcp.save(state, checkpoint_id=tmp_path / "s", no_dist=True)
    found = blank(state)
    before = [id(tensor) for tensor in tensors(found)]
    report = ckpt_tool.load(found, tmp_path / "s")
    assert report.missing == ()
    assert str(found) == str(state)
    assert [id(tensor) for tensor in tensors(found)] == before


def blank(value: Any) -> Any:
    """The same with zeros."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return type(value)((key, blank(each)) for key, each in value.items())
    if isinstance(value, deque):
        return deque(map(blank, value), value.maxlen)
    if isinstance(value, (list, tuple)):
        return type(value)(map(blank, value))
    return None


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """All of a state."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple, deque)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from tensors(each)


def test_tuples_of_a_file(tmp_path: Path) -> None:
    """Tensors in tuples that a file lists as tensors are read as such; a tuple of another class stays one."""
    torch.save({"h": (torch.arange(3.0), 3)}, tmp_path / "s.pt")
    state = {"h": Pair(torch.zeros(3), 0)}
    ckpt_tool.load(state, tmp_path / "s.pt")
    assert type(state["h"]) is Pair
    assert state["h"].left.tolist() == [0, 1, 2]
    assert state["h"].right == 3


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.zeros(4), r"shape: h\.0: expected \[4\], got \[3\]"),
        (torch.zeros(3, dtype=torch.int64), r"dtype: h\.0: expected int64, got float32"),
    ],
)
def test_tensors_in_tuples_that_do_not_fit(saver: Saver, tmp_path: Path, tensor: torch.Tensor, text: str) -> None:
    """An error as for any other tensor; a cast where that is asked for."""
    save(saver, {"h": (torch.arange(3.0), 3)}, tmp_path / "s").wait()
    with pytest.raises(LayoutError, match=text):
        ckpt_tool.load({"h": (tensor, 0)}, tmp_path / "s", strict=False)
    if tensor.shape == (3,):
        ckpt_tool.load({"h": (tensor, 0)}, tmp_path / "s", cast=True)
        assert tensor.tolist() == [0, 1, 2]


def test_tensors_in_tuples_that_are_not_there(saver: Saver, tmp_path: Path) -> None:
    """Missing, whether or not there is an object in whose place they would be."""
    save(saver, {"h": (torch.arange(3.0), 3)}, tmp_path / "s").wait()
    for name in ("h", "other"):
        state = {name: (torch.ones(3), 0, torch.ones(2))}
        with pytest.raises(LayoutError, match=rf"missing: {name}\.2"):
            ckpt_tool.load(state, tmp_path / "s")
        assert f"{name}.2" in ckpt_tool.load(state, tmp_path / "s", strict=False).missing
        assert state[name][2].tolist() == [1, 1]


def test_a_checkpoint_without_tensors(saver: Saver, tmp_path: Path) -> None:
    """What a state has is missing from it."""
    save(saver, {"n": 3}, tmp_path / "s").wait()
    with pytest.raises(LayoutError, match="missing: w: not in the checkpoint"):
        ckpt_tool.load({"w": torch.ones(2)}, tmp_path / "s")
    assert ckpt_tool.load({"w": torch.ones(2)}, tmp_path / "s", strict=False).missing == ("w",)


def test_random_states_of_every_save(saver: Saver, tmp_path: Path) -> None:
    """Arrays of numpy come back as numpy's own, so that what is saved next is read like what was saved first."""
    numbers: Any = ("MT19937", np.arange(4, dtype=np.uint32), 2, 0, 0.5)  # as numpy.random.get_state gives them
    state: dict[str, Any] = {"python": random.getstate(), "numpy": numbers, "a": np.arange(3, dtype=np.uint32)}
    first = str(state)
    for number in range(3):
        save(saver, state, tmp_path / str(number)).wait()
        state = {"python": None, "numpy": None, "a": None}
        assert ckpt_tool.load(state, tmp_path / str(number)).missing == ()
        assert str(state) == first
        assert {type(state["a"]), type(state["numpy"][1])} == {np.ndarray}
