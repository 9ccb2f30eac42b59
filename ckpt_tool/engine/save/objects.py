"""Objects that are no tensors, as torch.save writes them: the bytes that ``dcp.load`` hands to ``torch.load``."""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import numpy as np
import torch

from ckpt_tool.errors import UnsafePickle
from ckpt_tool.manifest.model import KeyPath

__all__ = ["ObjectBytes", "object_of"]

_ATOMS = (int, float, str, bool, type(None))
_MAX_KEPT = 10_000
_ALLOWED: Callable[[list[Any]], AbstractContextManager[Any]] = getattr(torch.serialization, "safe_globals", nullcontext)
"""torch 2.4 has none: numpy's arrays are refused there."""


class ObjectBytes:
    """Bytes of objects; those of plain numbers and texts are kept, for most states have the same ones at each save."""

    def __init__(self) -> None:
        self._kept: dict[tuple[type, Any], bytes] = {}

    def of(self, value: Any) -> bytes:
        """A torch.save zip of ``value``."""
        is_atom = type(value) in _ATOMS
        key = (type(value), repr(value) if type(value) is float else value) if is_atom else None
        if key is not None and key in self._kept:
            return self._kept[key]
        buffer = io.BytesIO()
        torch.save(value, buffer)
        data = buffer.getvalue()
        if key is not None and len(self._kept) < _MAX_KEPT:
            self._kept[key] = data
        return data


def object_of(data: bytes, within: KeyPath = (), *, trusted: bool, where: str) -> Any:
    """The object in a torch.save zip.

    Args:
        data: the zip.
        within: keys that lead to it from what the zip holds.
        trusted: make objects of any class, which runs code that the pickle names.
        where: what it is called, for errors.

    Raises:
        UnsafePickle: a class that torch does not allow without ``trusted``.
    """
    queues = _Queues()
    try:
        with _ALLOWED([*_numpy_globals(), slice, range, queues.maker]):
            found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=not trusted)
    except pickle.UnpicklingError as error:
        text = f"holds objects that torch.load makes only where it is told to trust them: {str(error).splitlines()[0]}"
        raise UnsafePickle(text, where=where, hint="pass trusted=True if you wrote the checkpoint") from error
    found = queues.restored(found)
    for key in within:
        found = found[key]
    return found


class _Queues:
    """Deques of one pickle. torch appends to lists alone, so each is a list until all is read."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[list[Any], int | None]] = {}

    @property
    def maker(self) -> Callable[..., list[Any]]:
        """What torch is to call for ``collections.deque``; it goes by the name."""

        def make(items: Any = (), maxlen: int | None = None) -> list[Any]:
            made = list(items)
            self._made[id(made)] = made, maxlen
            return made

        make.__module__, make.__name__, make.__qualname__ = "collections", "deque", "deque"
        return make

    def restored(self, value: Any) -> Any:
        """``value`` with deques in place of the lists that stand for them."""
        if not self._made:
            return value
        if type(value) is list:
            items = [self.restored(each) for each in value]
            return deque(items, self._made[id(value)][1]) if id(value) in self._made else items
        if type(value) is tuple:
            return tuple(self.restored(each) for each in value)
        if type(value) in (dict, OrderedDict):
            return type(value)((key, self.restored(each)) for key, each in value.items())
        return value


@cache
def _numpy_globals() -> list[Any]:
    """What pickles of numpy's arrays and numbers name, random states among them: none of it runs code of a pickle."""
    makers = [value.__reduce__()[0] for value in (np.zeros(1), np.float64(1))]
    kinds = {type(np.dtype(code)) for code in np.typecodes["All"] if code != "O"}
    return [np.ndarray, np.dtype, *makers, *kinds]
