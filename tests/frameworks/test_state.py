"""Walking a live state: what is a tensor, what is a value, and what shares memory."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckpt_tool.errors import Unsupported, UsageError
from ckpt_tool.frameworks.held import HeldStates
from ckpt_tool.frameworks.memory import memory_of
from ckpt_tool.frameworks.state import walk_state
from ckpt_tool.geometry.box import Box


def test_paths_and_values() -> None:
    """Dicts and lists with tensors or dicts are walked, other lists are one value."""
    state = {"m": {"a.b": torch.zeros(2)}, "o": [{"lr": 0.1, "betas": (1, 2)}], "seen": [1, 2]}
    live = walk_state(state)
    assert [leaf.fqn for leaf in live.leaves] == ["m.a.b"]
    assert [(slot.fqn, slot.value) for slot in live.slots] == [("o.0.lr", 0.1), ("o.0.betas", (1, 2)), ("seen", [1, 2])]
    live.slots[0].set(0.5)
    live.slots[2].set([])
    assert state["o"] == [{"lr": 0.5, "betas": (1, 2)}]
    assert state["seen"] == []


def test_a_parameter_is_held_whole_and_shares_memory() -> None:
    """Filling the part of a parameter changes the parameter, without autograd noticing."""
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    (part,) = walk_state({"w": parameter}).leaves[0].parts
    memory = memory_of(part.view, "w")
    assert memory.array is not None
    memory.array[...] = 1
    assert part.box == Box((0, 0), (2, 3))
    assert parameter.detach().view(torch.int32).eq(1).all()
    assert parameter.grad_fn is None


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.int64, torch.complex128, torch.float8_e4m3fn])
def test_memory_of_any_strides_and_types(dtype: torch.dtype) -> None:
    """Bits put at an index of a transposed view arrive there, for every width of element."""
    base = torch.zeros(4, 6, dtype=torch.uint8).to(dtype)
    memory = memory_of(base.t()[1:5, ::2], "w")
    assert memory.array is not None
    source = torch.ones(2, 1).to(dtype)
    memory.put((slice(1, 3), slice(0, 1)), _array(source))
    expected = torch.zeros(4, 6, dtype=torch.uint8).to(dtype)
    expected.t()[1:5, ::2][1:3, 0:1] = source
    assert base.view(torch.uint8).equal(expected.view(torch.uint8))


def _array(tensor: torch.Tensor) -> Any:
    array = memory_of(tensor, "w").array
    assert array is not None
    return array


def test_views_that_cannot_be_filled() -> None:
    """Bits put into the memory behind them would not be the bits that they have."""
    wave = torch.zeros(3, dtype=torch.complex64)
    with pytest.raises(Unsupported, match="w: a conjugated view cannot be filled"):
        memory_of(wave.conj(), "w")
    with pytest.raises(Unsupported, match="w: an expanded view, whose elements share memory"):
        memory_of(torch.zeros(3).expand(2, 3), "w")
    assert memory_of(torch.zeros(3).expand(1, 3), "w").array is not None
    with pytest.raises(Unsupported, match="w: a view whose elements overlap in memory"):
        memory_of(torch.zeros(5).as_strided((3, 3), (1, 1)), "w")
    assert memory_of(torch.zeros(30).as_strided((3, 2, 2), (2, 13, 6)), "w").array is not None
    with pytest.raises(Unsupported, match="w: a negated tensor"):
        walk_state({"w": wave.conj().imag})


def test_a_sharded_tensor_is_its_shards() -> None:
    """Local shards of FSDP1's ShardedTensor are parts at their own offsets."""
    shard = SimpleNamespace(
        metadata=SimpleNamespace(shard_offsets=[3, 0], shard_sizes=[2, 4]), tensor=torch.zeros(2, 4)
    )
    properties = SimpleNamespace(dtype=torch.float32)
    sharded = SimpleNamespace(
        local_shards=lambda: [shard],
        metadata=lambda: SimpleNamespace(size=torch.Size([5, 4]), tensor_properties=properties),
    )
    (leaf,) = walk_state({"w": sharded}).leaves
    assert leaf.shape == (5, 4)
    assert [part.box for part in leaf.parts] == [Box((3, 0), (2, 4))]
    assert leaf.parts[0].view.data_ptr() == shard.tensor.data_ptr()


def test_refusals() -> None:
    """What has no memory, no structure or no name of its own is refused with its name."""
    with pytest.raises(Unsupported, match="w: a meta tensor"):
        walk_state({"w": torch.zeros(2, device="meta")})
    with pytest.raises(Unsupported, match="w: a sparse_coo tensor"):
        walk_state({"w": torch.zeros(2).to_sparse()})
    with pytest.raises(UsageError, match="expected a state dict, got int"):
        walk_state(3)
    with pytest.raises(UsageError, match=r"a\.b: two tensors"):
        walk_state({"a": {"b": torch.zeros(1)}, "a.b": torch.zeros(1)})


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "layers.w: a nested tensor has no shape"),
        (lambda: torch.nn.LazyLinear(3).weight, "layers.w: a lazy tensor has no shape"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_what_has_no_shape_is_named(made: Callable[[], torch.Tensor], text: str) -> None:
    """For loads and for saves, whatever torch says of it."""
    for look in (walk_state, HeldStates().held):
        with pytest.raises(Unsupported, match=text):
            look({"layers": {"w": made()}})
