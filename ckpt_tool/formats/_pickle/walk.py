"""Walks over what a pickle described: its tensors, its other values, and a preview of it as plain data.

A pickle may share parts and contain itself, so that a few bytes spell out without end. Walks are iterative, enter
nothing that they are inside of, and stop at a stated number of values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from ckpt_tool.dtypes import DType
from ckpt_tool.errors import FormatError
from ckpt_tool.formats._pickle.nodes import Fields, Global, Stub
from ckpt_tool.formats._pickle.numpy_values import NumpyDType
from ckpt_tool.formats._pickle.readable import readable
from ckpt_tool.formats._pickle.tensors import (
    TENSOR_RECORDS,
    StorageRef,
    TensorNode,
    TensorRef,
    tensor_text,
)
from ckpt_tool.sizes import counted

__all__ = ["leaves", "plain", "storages", "tensor_leaves", "walk"]

Path = tuple[str | int, ...]

MAX_VALUES = 20_000_000
_MAX_DEPTH = 64
_MAX_PATH = 1_000
_MAX_TEXT = 2_000


def walk(
    root: Any,
    parts_of: Callable[[Path, Any], Iterable[tuple[str | int, Any]] | None],
    *,
    prefix: Path = (),
    max_values: int = MAX_VALUES,
) -> Iterator[tuple[Path, Any]]:
    """Each value below ``root`` that is not entered, with its path, in order.

    A container that is reached by two paths is walked twice, one that contains itself is not entered again.

    Args:
        root: where to start; itself the only value when it is not entered.
        parts_of: called once for each path with the path and the value there: its parts, each behind its key; None
            where the value is not entered.
        prefix: stands before all paths.
        max_values: bound of the values looked at.

    Raises:
        FormatError: more than ``max_values`` values, or containers nested more than 1,000 deep.
    """
    inside: set[int] = set()
    # A container waits as (path, container, iterator over its children).
    stack: list[tuple[Path, int, Iterator[tuple[str | int, Any]]]] = []
    pending: tuple[Path, Any] | None = (prefix, root)
    n_values = 0
    while pending is not None or stack:
        if pending is None:
            path, identity, children = stack[-1]
            following = next(children, None)
            if following is None:
                stack.pop()
                inside.discard(identity)
                continue
            pending = ((*path, following[0]), following[1])
        path, value = pending
        pending = None
        n_values += 1
        if n_values > max_values:
            raise FormatError(
                f"the pickle spells out more than {counted(max_values, 'value')}: its parts contain each other"
            )
        if id(value) in inside:
            continue
        entered = parts_of(path, value)
        if entered is None:
            yield path, value
        else:
            if len(stack) >= _MAX_PATH:  # paths are tuples: much deeper ones would fill the memory
                raise FormatError(f"the pickle is nested more than {counted(_MAX_PATH, 'level')} deep")
            inside.add(id(value))
            stack.append((path, id(value), iter(entered)))


def leaves(root: Any, *, max_values: int = MAX_VALUES) -> Iterator[tuple[Path, Any]]:
    """Each leaf below ``root`` with its path, in the pickle's order: tensors, atoms and empty containers.

    A path holds a dict's keys (``int`` stays ``int``; keys of other kinds as text) and a sequence's positions. An
    object of an unknown class contributes the attributes of its state, ``args``, entries and items.

    Raises:
        FormatError: see `walk`.
    """
    return walk(root, lambda _, value: _children(value), max_values=max_values)


def tensor_leaves(root: Any) -> Iterator[tuple[Path, TensorNode]]:
    """The tensors among ``leaves``."""
    for path, value in leaves(root):
        if isinstance(value, TENSOR_RECORDS):
            yield path, value


def storages(root: Any) -> list[StorageRef]:
    """The distinct storages below ``root``, in the order of first use, each object entered once."""
    found: dict[StorageRef, None] = {}
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, StorageRef):
            found.setdefault(value)
            continue
        if value is None or isinstance(value, (str, int, float)) or id(value) in seen:
            continue
        seen.add(id(value))
        parts = _parts(value)
        waiting.extend(reversed(parts))
    return list(found)


def plain(value: Any, *, max_items: int = 100, max_values: int = 10_000) -> Any:
    """``value`` as data that ``json.dumps`` takes: a preview of ``max_items`` a container and ``max_values`` in all.

    Tensors, arrays, and objects of unknown classes become text; keys become text; what was left out is counted.
    """
    return _Preview(max_items, max_values).of(value, 0, ())


class _Preview:
    """The budget of one preview."""

    def __init__(self, max_items: int, max_values: int) -> None:
        self._max_items = max_items
        self._left = max_values

    def of(self, value: Any, depth: int, inside: tuple[int, ...]) -> Any:
        self._left -= 1
        atom = _atom(value)
        if atom is not _NO_ATOM:
            return atom
        if self._left < 0 or depth > _MAX_DEPTH:
            return "..."
        if id(value) in inside:
            return "<itself>"
        within = (*inside, id(value))
        if isinstance(value, dict):
            return self._pairs(value.items(), len(value), depth, within)
        if isinstance(value, Fields):
            return self.of(value[0] if value else {}, depth + 1, within)
        if isinstance(value, Stub):
            shown: dict[str, Any] = {"class": value.cls.qualified}
            parts = {"args": value.args, "kwargs": value.kwargs, "state": value.state, "items": value.items}
            shown.update({name: self.of(part, depth + 1, within) for name, part in parts.items() if part})
            if value.entries:
                shown["entries"] = self._pairs(value.entries, len(value.entries), depth, within)
            return shown
        items: list[Any] = []
        for item in value:
            if len(items) == self._max_items:
                items.append(f"... {len(value) - self._max_items:,} more")
                break
            items.append(self.of(item, depth + 1, within))
        return items

    def _pairs(self, pairs: Iterable[tuple[Any, Any]], n_pairs: int, depth: int, inside: tuple[int, ...]) -> Any:
        shown: dict[str, Any] = {}
        for n_shown, (key, item) in enumerate(pairs):
            if n_shown == self._max_items:
                shown["..."] = f"{n_pairs - n_shown:,} more"
                break
            label = str(_label(key))
            shown[label if label not in shown else f"{label} ({type(key).__name__})"] = self.of(item, depth + 1, inside)
        return shown


_NO_ATOM = object()


def _atom(value: Any) -> Any:
    """The JSON value of something without parts, ``_NO_ATOM`` for containers."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        text = str(value)
        return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}... {len(text) - _MAX_TEXT:,} more"
    if isinstance(value, int):
        return value if value.bit_length() <= 256 else f"<int of {counted(value.bit_length(), 'bit')}>"
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        return _NO_ATOM
    if isinstance(value, Stub):
        usual = readable(value)
        if usual is not None:
            return usual
        bare = not (value.args or value.kwargs or value.state or value.entries or value.items)
        return repr(value) if bare or _is_short(value) else _NO_ATOM
    return _text(value)


def _is_short(value: Stub) -> bool:
    """True for enum members and other calls on a few atoms, which read best on one line."""
    plain_args = len(value.args) <= 4 and all(isinstance(item, (str, int, float, type(None))) for item in value.args)
    return plain_args and not (value.kwargs or value.state or value.entries or value.items)


def _text(value: Any) -> Any:
    if isinstance(value, DType):
        return f"torch.{value.name}"
    if isinstance(value, np.generic):
        return _atom(value.item()) if isinstance(value.item(), (bool, int, float, str)) else str(value)[:_MAX_TEXT]
    if isinstance(value, np.ndarray):
        return f"<numpy {value.dtype} {list(value.shape)}>"
    if isinstance(value, (bytes, bytearray)):
        return f"<{counted(len(value), 'byte')}>" if len(value) > 64 else repr(bytes(value))
    if isinstance(value, TENSOR_RECORDS):
        return tensor_text(value)
    if isinstance(value, (Global, NumpyDType, slice, range, complex)):
        is_short = isinstance(value, (Global, NumpyDType, complex))
        return repr(value)[:_MAX_TEXT] if is_short else f"<{type(value).__name__}>"
    return f"<{type(value).__name__}>"


def _label(key: Any) -> str | int:
    """A dict's key as a path component."""
    if type(key) is str or (type(key) is int and key.bit_length() <= 256):
        return key
    if isinstance(key, tuple):
        return f"({', '.join(str(_atom(part)) if _atom(part) is not _NO_ATOM else '...' for part in key[:8])})"
    if isinstance(key, bool):
        return str(key)
    atom = _atom(key)
    return str(atom) if atom is not _NO_ATOM else f"<{type(key).__name__}>"


def _children(value: Any) -> Iterator[tuple[str | int, Any]] | None:
    """The children of a container with parts, None for a leaf (an empty container is one)."""
    if isinstance(value, dict):
        return ((_label(key), item) for key, item in list(value.items())) if value else None
    if isinstance(value, Fields):
        return _children(value[0]) if value else None
    if isinstance(value, (list, tuple)):
        return iter(enumerate(value)) if value else None
    if isinstance(value, (set, frozenset)):
        return iter(list(enumerate(value))) if value else None
    if isinstance(value, Stub):
        return _stub_children(value) if value.args or value.state or value.entries or value.items else None
    return None


def _stub_children(stub: Stub) -> Iterator[tuple[str | int, Any]]:
    if stub.args:
        yield "args", stub.args
    states = stub.state if isinstance(stub.state, tuple) and len(stub.state) == 2 else (stub.state,)
    for state in states:
        if isinstance(state, dict):
            yield from ((_label(key), item) for key, item in list(state.items()))
        elif state is not None:
            yield "state", state
    yield from ((_label(key), item) for key, item in stub.entries)
    yield from enumerate(stub.items)


def _parts(value: Any) -> list[Any]:
    """Everything that ``value`` refers to directly, inside of tensors too."""
    if isinstance(value, dict):
        return [part for pair in value.items() for part in pair]
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, Stub):
        return [value.args, value.kwargs, value.state, *(part for pair in value.entries for part in pair), *value.items]
    if isinstance(value, TensorRef):
        return [value.storage] if value.attributes is None else [value.storage, value.attributes]
    if isinstance(value, TENSOR_RECORDS):
        return [getattr(value, name) for name in value.__dataclass_fields__]
    return []
