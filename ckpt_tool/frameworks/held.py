"""What a rank holds of a state that is to be saved: boxes of its tensors with their memory, and all other values.

Named as DCP names flattened entries: keys of dicts are text, positions in lists stay numbers, a list without tensors or
dicts in it is one value. A state that looks like the one before is taken apart by what is known of that. Knows no
checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ckpt_tool.errors import Unsupported, UsageError
from ckpt_tool.frameworks import dtensor, megatron
from ckpt_tool.frameworks.boxes import Leaf, Part, megatron_leaf, tensor_leaf
from ckpt_tool.frameworks.wrapped import with_memory
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.model import KeyPath
from ckpt_tool.records import dataclass, field

__all__ = ["Held", "HeldStates", "HeldTensor", "HeldValue", "Position", "nested"]

_ATOMS = frozenset({int, float, str, bool, type(None)})
_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})


class Position(int):
    """A place in a list, among keys."""


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """One tensor of a state."""

    path: KeyPath
    keys: tuple[Any, ...]
    """As the state has them."""
    dtype: str
    shape: tuple[int, ...]
    """Global shape."""
    parts: tuple[Part, ...]
    """What is to be saved of it: boxes with elements, or one empty box of a tensor without any."""
    is_named: bool = False
    """Whether its path is the key that a wrapper of Megatron gives it."""


@dataclass(frozen=True, slots=True)
class HeldValue:
    """Anything else."""

    path: KeyPath
    keys: tuple[Any, ...]
    value: Any
    is_named: bool = False


@dataclass(slots=True)
class Held:
    """What a state holds on this rank, in its order."""

    tensors: list[HeldTensor] = field(default_factory=list)
    values: list[HeldValue] = field(default_factory=list)


@dataclass(slots=True)
class _Flat:
    """A state without its containers."""

    leaves: list[Any] = field(default_factory=list)
    keys: list[tuple[Any, ...]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Known:
    """The state before: what it looked like, and which of its leaves are whole local tensors."""

    skeleton: Any
    marks: list[Any]


class HeldStates:
    """Takes states apart, one save after another. Holds no tensor of them."""

    def __init__(self) -> None:
        self._known: _Known | None = None

    def same(self, state: Any) -> tuple[list[torch.Tensor], list[Any]] | None:
        """Memory of all parts and all values, of a state that looks exactly as the last one did; None for another.

        It does where containers, their keys, placements, shapes, strides and types are the same, whatever the values,
        and each tensor is a plain one or a DTensor that is one box.
        """
        known = self._known
        if known is None:
            return None
        flat = _Flat()
        if _flatten(state, flat) != known.skeleton:
            return None
        views: list[torch.Tensor] = []
        values = []
        with torch.no_grad():
            for leaf, mark in zip(flat.leaves, known.marks, strict=True):
                if mark is None:
                    values.append(leaf)
                    continue
                try:
                    found = _mark(leaf)
                except Unsupported:  # said with its name where the state is taken apart
                    return None
                if found is None or found[1] != mark[0]:
                    return None
                if mark[1]:
                    views.append(found[0])
        return views, values

    def held(self, state: Any) -> Held:
        """Tensors and other values of ``state``; no copy and no communication.

        A module stands for its state dict, any other object with ``state_dict`` for what that gives.

        Raises:
            UsageError: the state is no dict, module or stateful object, or two of its entries have one name.
            Unsupported: a tensor without plain memory.
            LayoutError: a local tensor is not of the size that its placement gives.
        """
        self._known = None
        flat = _Flat()
        skeleton = _flatten(state, flat)
        _name((), state, flat)
        held = Held()
        marks: list[Any] = []
        is_simple = True
        known: dtensor.Known = {}
        wrapped: dict[str, list[Any]] = {}
        with torch.no_grad():
            for keys, value in zip(flat.keys, flat.leaves, strict=True):
                path = tuple([key if type(key) is Position else str(key) for key in keys])
                leaf = tensor_leaf(path, value, known)
                if leaf is None:
                    is_simple &= not _take_value(path, keys, value, held, wrapped)
                    marks.append(None)
                    continue
                parts = _saved_parts(leaf)
                held.tensors.append(HeldTensor(path, keys, leaf.dtype.name, leaf.shape, parts))
                found = _mark(value)
                is_simple &= found is not None and (
                    not parts or 0 in leaf.shape or (len(parts) == 1 and parts[0].view.shape == found[0].shape)
                )
                marks.append((None if found is None else found[1], bool(parts)))
            for leaf in map(megatron_leaf, wrapped.values()):
                parts = _saved_parts(leaf)
                held.tensors.append(HeldTensor(leaf.path, (), leaf.dtype.name, leaf.shape, parts, is_named=True))
        _check_names(state, [*(each.path for each in held.tensors), *(each.path for each in held.values)])
        if is_simple:
            self._known = _Known(skeleton, marks)
        return held


def nested(entries: Sequence[tuple[tuple[Any, ...], Any]]) -> Any:
    """Dicts and lists that have each value at its keys; lists where these are positions.

    >>> nested([(("groups", Position(0), "lr"), 0.1), (("state", 0), 7)])
    {'groups': [{'lr': 0.1}], 'state': {0: 7}}

    Raises:
        UsageError: two values have the same keys, or one lies inside of another.
    """
    if len(entries) == 1 and not entries[0][0]:
        return entries[0][1]
    inner: dict[Any, list[tuple[tuple[Any, ...], Any]]] = {}
    for keys, value in entries:
        if not keys:
            raise UsageError("two entries of the state would have one place in an object of this format")
        inner.setdefault(keys[0], []).append((keys[1:], value))
    found = {key: nested(below) for key, below in inner.items()}
    return list(found.values()) if all(type(key) is Position for key in found) else found


def _take_value(path: KeyPath, keys: tuple[Any, ...], value: Any, held: Held, wrapped: dict[str, list[Any]]) -> bool:
    """Take in what is no tensor; whether it is one of Megatron's wrappers, those of tensors by their key."""
    if type(value) in _ATOMS or not megatron.is_wrapper(value):
        held.values.append(HeldValue(path, keys, value))
        return False
    if megatron.is_tensor(value):
        wrapped.setdefault(str(value.key), []).append(value)
    else:
        held.values.append(HeldValue((str(value.unique_key),), (), value.data, is_named=True))
    return True


def _saved_parts(leaf: Leaf) -> tuple[Part, ...]:
    if 0 in leaf.shape:  # the same box on all ranks, whatever part of nothing each has, so that one of them writes it
        nothing = torch.empty(leaf.shape, dtype=getattr(torch, leaf.dtype.name), device="cpu")
        return (Part(Box.whole(leaf.shape), nothing),)
    return tuple(part for part in leaf.parts if part.box.volume)


def _flatten(value: Any, flat: _Flat) -> Any:
    """Append the leaves of ``value``, in order; returns containers and keys, comparable."""
    if isinstance(value, torch.Tensor):
        flat.leaves.append(value)
        return 1
    if isinstance(value, Mapping):
        return (tuple(value), tuple([_flatten(each, flat) for each in value.values()]))
    if isinstance(value, list) and _has_structure(value):
        return [_flatten(each, flat) for each in value]
    if type(value) not in _ATOMS and megatron.is_local_object(value):
        return 2
    if type(value) not in _ATOMS and megatron.is_factory(value):
        return ("built", _flatten(value.build(), flat))
    if _is_stateful(value):
        return ("", _flatten(value.state_dict(), flat))
    flat.leaves.append(value)
    return 0


def _name(keys: tuple[Any, ...], value: Any, flat: _Flat) -> None:
    """Append the keys of the leaves of ``value``, in the order of `_flatten`."""
    if isinstance(value, torch.Tensor):
        flat.keys.append(keys)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            _name((*keys, key), each, flat)
    elif isinstance(value, list) and _has_structure(value):
        for position, each in enumerate(value):
            _name((*keys, Position(position)), each, flat)
    elif type(value) not in _ATOMS and megatron.is_local_object(value):
        return
    elif type(value) not in _ATOMS and megatron.is_factory(value):
        _name(keys, value.build(), flat)
    elif _is_stateful(value):
        _name(keys, value.state_dict(), flat)
    else:
        flat.keys.append(keys)


def _mark(value: Any) -> tuple[torch.Tensor, tuple[Any, ...]] | None:
    """The local memory of a plain tensor or a DTensor, and all that its boxes and its order of memory come from."""
    if type(value) in _PLAIN_TYPES:
        value = with_memory(value, "")
        return value, (value.shape, value.stride(), value.dtype, value.layout, value.device)
    if not dtensor.is_dtensor(value):
        return None
    local = with_memory(value.to_local(), "")
    return local, (
        value.device_mesh,
        value.placements,
        value.shape,
        local.shape,
        local.stride(),
        local.dtype,
        local.device,
    )


def _check_names(state: Any, paths: list[KeyPath]) -> None:
    seen: set[str] = set()
    for path in paths:
        name = ".".join(map(str, path))
        if not path:
            raise UsageError(f"expected a state dict, got {type(state).__name__}")
        if name in seen:
            raise UsageError("two entries of the state have this name", where=name)
        seen.add(name)


def _is_stateful(value: object) -> bool:
    """Whether ``value`` hands out its state."""
    return callable(getattr(value, "state_dict", None)) and not isinstance(value, type)


def _has_structure(values: list[Any]) -> bool:
    return any(
        type(each) not in _ATOMS
        and (
            isinstance(each, (torch.Tensor, Mapping))
            or (isinstance(each, list) and _has_structure(each))
            or megatron.is_wrapper(each)
            or _is_stateful(each)
        )
        for each in values
    )
