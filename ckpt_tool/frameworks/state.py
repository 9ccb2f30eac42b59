"""A live state is a nesting of dicts and lists with tensors, other values and stateful objects at its leaves.

Walking it finds the tensors as leaves of boxes, and everything else as slots that can be set. Knows no checkpoint.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence
from typing import Any

import torch

from ckpt_tool.errors import UsageError
from ckpt_tool.frameworks import megatron
from ckpt_tool.frameworks.boxes import Leaf, megatron_leaf, tensor_leaf
from ckpt_tool.frameworks.dtensor import Known
from ckpt_tool.frameworks.optimizers import make_state
from ckpt_tool.manifest.model import KeyPath
from ckpt_tool.records import dataclass, field

__all__ = ["LiveState", "MadeEntry", "Slot", "walk_state"]


@dataclass(frozen=True, slots=True)
class Slot:
    """A value that is no tensor."""

    path: KeyPath
    value: Any
    set: Callable[[Any], None]
    """Puts another value in its place."""

    @property
    def fqn(self) -> str:
        """Keys joined by dots."""
        return ".".join(str(key) for key in self.path)


@dataclass(frozen=True, slots=True)
class MadeEntry:
    """What an optimizer had not for one of its parameters until it was asked for its state."""

    path: KeyPath
    """Of the optimizer's whole state, and the parameter's key in it."""
    leaves: range
    drop: Callable[[], object]
    """Leaves it out of what the optimizer is given back."""


@dataclass(frozen=True, slots=True)
class LiveState:
    """What a state holds."""

    leaves: tuple[Leaf, ...]
    slots: tuple[Slot, ...]
    finish: tuple[Callable[[], None], ...]
    """To be called once everything is filled: gives stateful objects back what they handed out."""
    in_tuples: frozenset[KeyPath] = frozenset()
    """Paths of leaves that lie in tuples, which DCP saves as one object."""
    made: tuple[MadeEntry, ...] = ()
    undo: tuple[Callable[[], None], ...] = ()
    """To be called where nothing comes of the load: takes from optimizers the states that they had to make."""


@dataclass(slots=True)
class _Walk:
    leaves: list[Leaf] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    finish: list[Callable[[], None]] = field(default_factory=list)
    known: Known = field(default_factory=dict)
    sharded: dict[str, list[Any]] = field(default_factory=dict)
    """Megatron's wrappers of each key."""
    in_tuples: set[KeyPath] = field(default_factory=set)
    made: list[MadeEntry] = field(default_factory=list)
    undo: list[Callable[[], None]] = field(default_factory=list)

    def visit(self, path: KeyPath, value: Any, set_value: Callable[[Any], None]) -> None:
        if type(value) is dict and value:  # what most containers are, told without asking what else it could be
            self._visit_items(path, value)
            return
        leaf = tensor_leaf(path, value, self.known)
        if leaf is not None:
            self.leaves.append(leaf)
        elif isinstance(value, torch.nn.Module):  # its state dict shares the parameters' memory
            self.visit(path, value.state_dict(), set_value)
        elif megatron.is_wrapper(value):
            self._visit_megatron(path, value, set_value)
        elif _is_stateful(value):
            is_made = make_state(value)
            held, n_before = value.state_dict(), len(self.leaves)
            self.visit(path, held, set_value)
            if is_made:
                self.undo.append(value.state.clear)
                self._note_made((*path, "state"), held["state"], range(n_before, len(self.leaves)))
            self.finish.append(lambda: value.load_state_dict(held))
        elif isinstance(value, MutableMapping) and value:
            self._visit_items(path, value)
        elif isinstance(value, (tuple, deque)) and _has_structure(value):
            self._visit_tuple(path, value, set_value)
        elif isinstance(value, MutableSequence) and _has_structure(value):
            for position, each in enumerate(value):
                self.visit((*path, position), each, _setter(value, position))
        else:
            self.slots.append(Slot(path, value, set_value))

    def _visit_items(self, path: KeyPath, items: MutableMapping[Any, Any]) -> None:
        for key in list(items):
            self.visit((*path, key), items[key], lambda new, key=key: items.__setitem__(key, new))  # type: ignore[misc]

    def _note_made(self, path: KeyPath, states: MutableMapping[Any, Any], leaves: range) -> None:
        by_key: dict[Any, list[int]] = {}
        for number in leaves:
            inner = self.leaves[number].path
            if inner[: len(path)] == path and len(inner) > len(path):
                by_key.setdefault(inner[len(path)], []).append(number)
        for key, numbers in by_key.items():
            numbered = range(numbers[0], numbers[-1] + 1)
            self.made.append(MadeEntry((*path, key), numbered, lambda key=key: states.pop(key, None)))  # type: ignore[misc]

    def _visit_tuple(
        self, path: KeyPath, value: tuple[Any, ...] | deque[Any], set_value: Callable[[Any], None]
    ) -> None:
        """One that has other values now is replaced by one with these; its tensors are filled where they are.

        Deques too: DCP saves them as one object.
        """
        n_before, items = len(self.leaves), list(value)
        for position, each in enumerate(value):
            self.visit((*path, position), each, _setter(items, position))
        self.in_tuples.update(leaf.path for leaf in self.leaves[n_before:])

        def finish() -> None:
            if any(new is not old for new, old in zip(items, value, strict=True)):
                if isinstance(value, deque):
                    set_value(type(value)(items, value.maxlen))
                    return
                make = getattr(type(value), "_make", type(value))  # a named one takes its values one by one
                set_value(make(items))

        self.finish.append(finish)

    def _visit_megatron(self, path: KeyPath, value: Any, set_value: Callable[[Any], None]) -> None:
        """A wrapper is replaced by what it wraps, once that is filled; as Megatron's own loading does."""
        if megatron.is_factory(value):
            built = [value.build()]
            self.visit(path, built[0], lambda new: built.__setitem__(0, new))
            self.finish.append(lambda: set_value(megatron.factory_result(value, built[0])))
        elif megatron.is_object(value):
            found: list[Any] = []
            self.slots.append(Slot((value.unique_key,), value.data, found.append))
            self.finish.append(lambda: set_value(found[0] if found else value.data))
        else:
            if megatron.is_tensor(value):
                self.sharded.setdefault(str(value.key), []).append(value)
            self.finish.append(lambda: set_value(megatron.unwrapped(value)))


def walk_state(state: Any) -> LiveState:
    """Tensors and other values of ``state``, in its order; no copy and no communication.

    Lists without tensors or dicts in them (``betas``, lists of numbers) are one value. A module stands for its state
    dict, any other object with ``state_dict`` and ``load_state_dict`` for what it hands out. Megatron's wrappers are
    replaced by what they wrap, when ``finish`` is called. An optimizer that has taken no step makes its state.

    Raises:
        UsageError: the state is no dict, list, module or stateful object, or two of its tensors have one name.
        Unsupported: see `tensor_leaf`.
    """

    def refuse(_new: Any) -> None:
        raise UsageError("the state itself cannot be replaced, only what is in it")

    walk = _Walk()
    if isinstance(state, Mapping) and not state:  # a rank that holds nothing
        return LiveState((), (), ())
    with torch.no_grad():
        walk.visit((), state, refuse)
        walk.leaves += [megatron_leaf(values) for values in walk.sharded.values()]
    if any(not slot.path for slot in walk.slots) or any(not leaf.path for leaf in walk.leaves):
        raise UsageError(f"expected a state dict, got {type(state).__name__}")
    seen: set[str] = set()
    for leaf in walk.leaves:
        if leaf.fqn in seen:
            raise UsageError("two tensors of the state have this name", where=leaf.fqn)
        seen.add(leaf.fqn)
    return LiveState(
        tuple(walk.leaves),
        tuple(walk.slots),
        tuple(walk.finish),
        frozenset(walk.in_tuples),
        tuple(walk.made),
        tuple(walk.undo),
    )


def _is_stateful(value: object) -> bool:
    """Whether ``value`` hands out its state, and takes it."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _has_structure(values: Any) -> bool:
    return any(
        isinstance(each, (torch.Tensor, MutableMapping))
        or megatron.is_wrapper(each)
        or _is_stateful(each)
        or (isinstance(each, (MutableSequence, tuple, deque)) and _has_structure(each))
        for each in values
    )


def _setter(values: MutableSequence[Any], position: int) -> Callable[[Any], None]:
    return lambda new: values.__setitem__(position, new)
