"""What a rank holds of a state that is to be saved: boxes of its tensors with their memory, and all other values.

Named as DCP names flattened entries: keys of dicts are text, positions in lists stay numbers, a list without tensors or
dicts in it is one value. Knows no checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt_tool.errors import UsageError
from ckpt_tool.frameworks.boxes import Part, tensor_leaf
from ckpt_tool.frameworks.dtensor import Known
from ckpt_tool.manifest.model import KeyPath

__all__ = ["Held", "HeldTensor", "held_values"]


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """One tensor of a state."""

    path: KeyPath
    dtype: str
    shape: tuple[int, ...]
    """Global shape."""
    parts: tuple[Part, ...]
    """What is to be saved of it: boxes with elements, or one empty box of a tensor without any."""


@dataclass(slots=True)
class Held:
    """What a state holds on this rank, in its order."""

    tensors: list[HeldTensor] = field(default_factory=list)
    values: list[tuple[KeyPath, Any]] = field(default_factory=list)


def held_values(state: Any) -> Held:
    """Tensors and other values of ``state``; no copy and no communication.

    A module stands for its state dict, any other object with ``state_dict`` for what that gives.

    Raises:
        UsageError: the state is no dict, module or stateful object, or two of its entries have one name.
        Unsupported: a tensor without plain memory.
        LayoutError: a local tensor is not of the size that its placement gives.
    """
    held = Held()
    with torch.no_grad():
        _visit((), state, held, {})
    seen: set[str] = set()
    for path in [*(tensor.path for tensor in held.tensors), *(path for path, _ in held.values)]:
        name = ".".join(map(str, path))
        if not path:
            raise UsageError(f"expected a state dict, got {type(state).__name__}")
        if name in seen:
            raise UsageError("two entries of the state have this name", where=name)
        seen.add(name)
    return held


def _visit(path: KeyPath, value: Any, held: Held, known: Known) -> None:
    leaf = tensor_leaf(path, value, known)
    if leaf is not None:
        is_empty = 0 in leaf.shape
        parts = tuple(part for part in leaf.parts if part.box.volume or (is_empty and part is leaf.parts[0]))
        held.tensors.append(HeldTensor(path, leaf.dtype.name, leaf.shape, parts))
    elif isinstance(value, Mapping):
        for key, each in value.items():
            _visit((*path, str(key)), each, held, known)
    elif callable(getattr(value, "state_dict", None)) and not isinstance(value, type):
        _visit(path, value.state_dict(), held, known)
    elif isinstance(value, list) and _has_structure(value):
        for position, each in enumerate(value):
            _visit((*path, position), each, held, known)
    else:
        held.values.append((path, value))


def _has_structure(values: list[Any]) -> bool:
    return any(
        isinstance(each, (torch.Tensor, Mapping)) or (isinstance(each, list) and _has_structure(each))
        for each in values
    )
