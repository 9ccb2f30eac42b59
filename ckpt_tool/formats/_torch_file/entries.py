"""An entry is one tensor or one value of a saved object, with the keys that lead to it.

What counts as one value follows torch's flattening (``torch/distributed/checkpoint/_traverse.py``): dicts are always
entered, lists when something in them is a tensor or a dict, other objects only when a tensor is somewhere inside. So a
tuple of betas, a random state and a ``Namespace`` of arguments are one value each. Knows no file and no byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

from ckpt_tool.formats._pickle.nodes import Stub
from ckpt_tool.formats._pickle.tensors import (
    InlineTensorRef,
    MetaTensorRef,
    QuantizedTensorRef,
    SparseTensorRef,
    StorageRef,
    TensorRef,
    WrapperRef,
)
from ckpt_tool.formats._pickle.walk import MAX_VALUES, plain, storages, walk
from ckpt_tool.formats._torch_file.inline import tensor_of_array, tensor_of_storage
from ckpt_tool.manifest.model import KeyPath
from ckpt_tool.records import dataclass, field

__all__ = ["Entries", "Entry", "entries_of"]

_SHOWN = 8
_MODULE_KEYS = ("_parameters", "_buffers", "_modules")
# Parts that are shared are walked once for each way to them: so many times the object's own size at most.
_MAX_SHARING = 8
_MIN_VALUES = 100_000
_PLACED = frozenset({"DTensor", "ShardedTensor"})
_COMPRESSED_PARTS = {
    "sparse_coo": ("indices", "values"),
    "sparse_csr": ("crow_indices", "col_indices", "values"),
    "sparse_bsr": ("crow_indices", "col_indices", "values"),
    "sparse_csc": ("ccol_indices", "row_indices", "values"),
    "sparse_bsc": ("ccol_indices", "row_indices", "values"),
}
_LEAVES = (TensorRef, WrapperRef, InlineTensorRef, MetaTensorRef, StorageRef)
_NESTED_PARTS = ("values", "sizes", "strides", "offsets")


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor or value."""

    fqn: str
    """Keys joined by dots; with ``#2``, ``#3`` ... behind where an earlier entry has that name."""
    path: KeyPath
    value: Any
    """``TensorRef`` or ``WrapperRef`` of a tensor, anything else for a value."""

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor with bytes of its own."""
        return isinstance(self.value, (TensorRef, WrapperRef))


@dataclass(slots=True)
class Entries:
    """All entries of an object, in the pickle's order."""

    items: list[Entry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Tensors that are kept in parts or left out, and names that collide."""
    int_keyed: list[str] = field(default_factory=list)
    """Dotted names of dicts with integer keys, which a path cannot tell from lists."""
    attributes: dict[str | int, None] = field(default_factory=dict)
    """Names of Python attributes of tensors that are left out."""
    unsaved: list[str] = field(default_factory=list)
    """Dotted names of buffers that a pickled module has and its ``state_dict`` does not."""
    relabelled: list[str] = field(default_factory=list)
    """Dotted names of dicts with keys that are neither text nor integers, and stand in paths by their text."""
    without_data: list[str] = field(default_factory=list)
    """Dotted names of meta tensors, which are left out."""


def entries_of(root: Any, *, prefix: KeyPath = ()) -> Entries:
    """Tensors and values of an unpickled object.

    Sparse, quantized and nested tensors, and wrappers other than DTensor and ShardedTensor, become their parts
    (``weight.indices``, ``weight.values``). Objects of unknown classes become their attributes; of a pickled module
    only parameters, submodules and the buffers that are saved (``persistent``) are taken, under the names that its
    ``state_dict`` would give them.
    Python attributes of a tensor are entries where tensors are among them (``weight.quant_state.absmax``).

    Args:
        root: what ``load_pickle`` returned.
        prefix: keys to put in front of all paths.

    Raises:
        FormatError: the object spells out more values than any checkpoint has.
    """
    found = Entries()
    classes: dict[str, None] = {}
    taken: set[str] = set()
    for path, value in _walk(root, prefix, found, classes, ()):
        name = ".".join(map(str, path)) or "value"
        fqn, count = name, 1
        while fqn in taken:
            count += 1
            fqn = f"{name}#{count}"
        taken.add(fqn)
        if fqn != name:
            found.notes.append(f"{name!r} is the name of more than one entry; keys {list(path)} are called {fqn!r}")
        found.items.append(Entry(fqn, path, value))
    if found.attributes:
        names = ", ".join(map(str, list(found.attributes)[:_SHOWN]))
        found.notes.append(f"Python attributes of tensors are left out: {names}")
    if found.relabelled:
        names = ", ".join(found.relabelled[:_SHOWN]) + (" ..." if len(found.relabelled) > _SHOWN else "")
        found.notes.append(f"keys that are neither text nor integers are called by their text, in {names}")
    if found.unsaved:
        names = ", ".join(found.unsaved[:_SHOWN]) + (" ..." if len(found.unsaved) > _SHOWN else "")
        found.notes.append(f"buffers that are in no state dict (persistent=False) are left out: {names}")
    if classes:
        found.notes.append(f"pickled objects of {', '.join(classes)}: their tensors are read, their code is not here")
    return found


def _walk(
    root: Any, prefix: KeyPath, found: Entries, classes: dict[str, None], inside: tuple[int, ...]
) -> Iterator[tuple[KeyPath, Any]]:
    """Entries in order; notes on the way. ``inside`` are tensors whose attributes lead to ``root``."""
    holders, n_edges = _holders(root)
    max_values = min(_MIN_VALUES + _MAX_SHARING * n_edges, MAX_VALUES)

    def parts_of(path: KeyPath, value: Any) -> list[tuple[str | int, Any]] | None:
        if not _is_entered(value, holders):
            return None
        if isinstance(value, dict) and any(type(key) is int for key in value):
            found.int_keyed.append(".".join(map(str, path)))
        if isinstance(value, dict) and any(type(key) is not str and type(key) is not int for key in value):
            found.relabelled.append(".".join(map(str, path)) or "the state dict")
        found.unsaved += [".".join(map(str, (*path, name))) for name in _unsaved(value)]
        note = _note(value, classes)
        if note is not None:
            found.notes.append(f"{'.'.join(map(str, path))!r} {note}")
        return _children(value)

    for path, value in walk(root, parts_of, prefix=prefix, max_values=max_values):
        name = ".".join(map(str, path))
        if isinstance(value, MetaTensorRef):
            found.without_data.append(name)
            found.notes.append(f"{name!r} is a meta tensor {list(value.shape)} without data; it is left out")
        elif isinstance(value, StorageRef):
            found.notes.append(f"{name!r} is a storage, kept as a tensor of one dimension")
            yield path, tensor_of_storage(value)
        elif isinstance(value, InlineTensorRef):
            yield path, tensor_of_array(value) or value
        elif isinstance(value, TensorRef) and value.attributes is not None and id(value) not in inside:
            yield path, replace(value, attributes=None)
            yield from _attributes(path, value, found, classes, inside)
        else:
            yield path, value


def _attributes(
    path: KeyPath, tensor: TensorRef, found: Entries, classes: dict[str, None], inside: tuple[int, ...]
) -> Iterator[tuple[KeyPath, Any]]:
    """Entries of the Python attributes of a tensor, beside it, if tensors are among them; else a note at most."""
    states = tensor.attributes if isinstance(tensor.attributes, tuple) else (tensor.attributes,)
    named = [(_label(key), item) for state in states if isinstance(state, dict) for key, item in state.items()]
    if not named:
        return
    name = ".".join(map(str, path))
    if not storages([item for _, item in named]):
        found.attributes.update((key, None) for key, _ in named)
        return
    found.notes.append(f"{name!r} has attributes with tensors among them, which stand beside it")
    for key, item in named:
        beside = (*path[:-1], f"{path[-1]}.{key}") if path else (f"value.{key}",)
        yield from _walk(item, beside, found, classes, (*inside, id(tensor)))


def _is_entered(value: Any, holders: set[int]) -> bool:
    """Whether the parts of ``value`` are entries, not ``value`` itself."""
    if isinstance(value, dict):
        return bool(value)
    if isinstance(value, list) and any(isinstance(item, dict) and item for item in value):
        return True
    return id(value) in holders


def _children(value: Any) -> list[tuple[str | int, Any]]:
    """Parts with the key that leads to each; empty for what has none."""
    if isinstance(value, dict):
        return [(_label(key), item) for key, item in value.items()]
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(enumerate(value))
    if isinstance(value, Stub):
        return _stub_children(value)
    if isinstance(value, SparseTensorRef):
        return list(zip(_COMPRESSED_PARTS.get(value.layout, ()), value.parts, strict=False))
    if isinstance(value, QuantizedTensorRef):
        return [("values", value.tensor), ("scale", value.scale), ("zero_point", value.zero_point)]
    if isinstance(value, WrapperRef) and value.cls.last not in _PLACED:
        states = value.state if isinstance(value.state, tuple) else (value.state,)
        return [(_label(key), item) for state in states if isinstance(state, dict) for key, item in state.items()]
    return []


def _stub_children(stub: Stub) -> list[tuple[str | int, Any]]:
    if stub.cls.last == "_rebuild_nested_tensor":
        return list(zip(_NESTED_PARTS, stub.args, strict=False))
    state = stub.state
    is_pair = isinstance(state, tuple) and len(state) == 2 and all(part is None or type(part) is dict for part in state)
    states = [part for part in (state if is_pair else (state,)) if isinstance(part, dict)]
    if states and _is_module(states[0]):
        unsaved = set(_unsaved(stub))
        parts = chain.from_iterable(states[0][key].items() for key in _MODULE_KEYS)
        return [(_label(key), item) for key, item in parts if item is not None and key not in unsaved]
    named = [(_label(key), item) for state in states for key, item in state.items()]
    stored = [(_label(key), item) for key, item in stub.entries]
    # A list's own positions are those of what was appended (deque: arguments and items).
    args = [("args", stub.args)] if stub.args and stub.items else list(enumerate(stub.args))
    other = [] if state is None or states or is_pair else [("state", state)]
    return [*args, *named, *other, *stored, *enumerate(stub.items)]


def _is_module(state: dict[Any, Any]) -> bool:
    """Whether these are the attributes of a ``torch.nn.Module``."""
    return all(isinstance(state.get(key), dict) for key in _MODULE_KEYS)


def _unsaved(value: Any) -> list[str]:
    """Names of a pickled module's buffers that its ``state_dict`` leaves out (``Module._save_to_state_dict``, 2.13)."""
    state = value.state if isinstance(value, Stub) else None
    state = state[0] if isinstance(state, tuple) and state else state
    if not isinstance(state, dict) or not _is_module(state):
        return []
    names = state.get("_non_persistent_buffers_set")
    names = names if isinstance(names, (set, frozenset)) else ()
    return [name for name, buffer in state["_buffers"].items() if buffer is not None and name in names]


def _note(value: Any, classes: dict[str, None]) -> str | None:
    """What a person should know about something that is kept in parts."""
    if isinstance(value, SparseTensorRef):
        return f"is a {value.layout} tensor {list(value.shape)}, kept as its index and value tensors"
    if isinstance(value, QuantizedTensorRef):
        axis = "" if value.axis is None else f", axis {value.axis}"
        return f"is quantized ({value.scheme}{axis}): its values are integers, scale and zero point stand beside them"
    if isinstance(value, WrapperRef):
        return f"is a {value.cls.qualified} {list(value.shape)}, kept as the tensors inside it"
    if isinstance(value, Stub) and value.cls.last == "_rebuild_nested_tensor":
        return "is a nested tensor, kept as its values, sizes, strides and offsets"
    if isinstance(value, Stub):
        classes.setdefault(value.cls.qualified)
    return None


def _label(key: Any) -> str | int:
    """A dict's key as part of a path."""
    if type(key) is str or (type(key) is int and key.bit_length() <= 256):
        return key
    return str(plain(key))


def _holders(root: Any) -> tuple[set[int], int]:
    """Identities of everything that has a tensor somewhere inside, and the number of parts of all distinct objects.

    The former are found by climbing up from the tensors.
    """
    parents: dict[int, list[int]] = {id(root): []}
    tensors: list[int] = []
    waiting = [root]
    n_edges = 0
    while waiting:
        value = waiting.pop()
        children = _children(value)
        n_edges += len(children)
        if isinstance(value, _LEAVES) and not children:
            tensors.append(id(value))
        for _, child in children:
            if isinstance(child, (str, bytes, int, float, type(None))):
                continue
            known = parents.get(id(child))
            if known is None:
                parents[id(child)] = [id(value)]
                waiting.append(child)
            else:
                known.append(id(value))
    held: set[int] = set()
    waiting_ids = [parent for tensor in tensors for parent in parents[tensor]]
    while waiting_ids:
        identity = waiting_ids.pop()
        if identity not in held:
            held.add(identity)
            waiting_ids += parents[identity]
    return held, n_edges
