"""Tensors of classes of their own: what wraps one tensor is that one, what computes its elements is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.masked import masked_tensor

import ckpt_tool
from ckpt_tool.errors import Unsupported
from ckpt_tool.frameworks.held import HeldStates
from ckpt_tool.frameworks.state import walk_state
from ckpt_tool.frameworks.wrapped import with_memory


class Wrapping(torch.Tensor):  # type: ignore[misc]
    """As classes for float8 training and for quantized optimizers are made: no memory, but tensors inside."""

    inner: dict[str, torch.Tensor]

    @staticmethod
    def __new__(cls: Any, like: torch.Tensor, **_: torch.Tensor) -> Any:
        """A tensor of the form of ``like``."""
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, strides=like.stride(), dtype=like.dtype)

    def __init__(self, _: torch.Tensor, **inner: torch.Tensor) -> None:
        """With ``inner`` as its attributes."""
        self.inner = inner
        for name, each in inner.items():
            setattr(self, name, each)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """Names of the tensors inside."""
        return list(self.inner), None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Nothing that a test needs."""
        raise NotImplementedError(func)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_what_is_wrapped_is_saved_and_filled(tmp_path: Any) -> None:
    """A wrapper of one tensor of its own form stands for it, however deep that lies."""
    whole = torch.randn(4, 6)
    deep = Wrapping(whole, outer=Wrapping(whole, weight=whole.clone()))
    ckpt_tool.save({"w": deep}, tmp_path / "s", async_=False)
    found = torch.zeros(4, 6)
    ckpt_tool.load({"w": Wrapping(found, weight=found)}, tmp_path / "s")
    assert found.equal(whole)


def test_what_computes_its_elements_is_refused() -> None:
    """Filling the tensors inside of a quantized one by its elements cannot be right, nor can saving these."""
    codes = Wrapping(torch.zeros(4), codes=torch.zeros(4, dtype=torch.uint8), scale=torch.ones(1))
    for take in (walk_state, HeldStates().held):
        with pytest.raises(Unsupported, match=r"w: a Wrapping computes its elements from others \(codes, scale\)"):
            take({"w": codes})
    with pytest.raises(Unsupported, match=r"computes its elements from others \(codes\)"):
        walk_state({"w": Wrapping(torch.zeros(4), codes=torch.zeros(4, dtype=torch.uint8))})


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors:UserWarning")
def test_no_memory_at_all() -> None:
    """A storage that was freed, and a wrapper that does not say what it wraps, end no process."""
    freed = torch.randn(4)
    states = HeldStates()
    states.held({"w": freed})
    assert states.same({"w": freed}) is not None
    freed.untyped_storage().resize_(0)
    assert states.same({"w": freed}) is None
    masked = masked_tensor(torch.randn(4), torch.ones(4, dtype=torch.bool))
    for tensor in (freed, masked):
        for take in (walk_state, HeldStates().held):
            with pytest.raises(Unsupported, match=r"w: a .*Tensor whose memory was freed, or is not its own"):
                take({"w": tensor})
    assert with_memory(torch.zeros(0, 3), "w").shape == (0, 3)


def test_what_is_still_to_come_is_waited_for() -> None:
    """A tensor that a collective brings is the one that has come."""
    coming = AsyncCollectiveTensor(torch.ones(3))
    assert type(with_memory(coming, "w")) is torch.Tensor
    assert coming.completed
