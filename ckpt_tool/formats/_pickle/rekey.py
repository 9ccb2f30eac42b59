"""Values of one file for another file: the same values, with storages under the numbers that they have there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpt_tool.formats._pickle.nodes import OrderedMap
from ckpt_tool.formats._pickle.tensors import TensorRef

__all__ = ["with_storages"]


def with_storages(value: Any, keys: Mapping[str, str]) -> Any:
    """A copy of ``value`` whose tensors lie in the storages that ``keys`` names, by the keys that they have now.

    Dicts, lists and tuples are entered, other objects taken over as they are.

    Raises:
        KeyError: a tensor lies in a storage that ``keys`` lacks.
    """
    if isinstance(value, TensorRef):
        return replace(value, storage=replace(value.storage, key=keys[value.storage.key], location="cpu"))
    if type(value) in (dict, OrderedMap):
        copy = type(value)()
        copy.update((key, with_storages(entry, keys)) for key, entry in value.items())
        return copy
    if type(value) in (list, tuple):
        return type(value)(with_storages(entry, keys) for entry in value)
    return value
