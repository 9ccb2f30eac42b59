"""Objects that are no tensors, as torch.save writes them: the bytes that ``dcp.load`` hands to ``torch.load``."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from ckpt_tool.errors import UnsafePickle

__all__ = ["ObjectBytes", "object_of"]

_ATOMS = (int, float, str, bool, type(None))
_MAX_KEPT = 10_000


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


def object_of(data: bytes, *, trusted: bool, where: str) -> Any:
    """The object in a torch.save zip.

    Args:
        data: the zip.
        trusted: make objects of any class, which runs code that the pickle names.
        where: what it is called, for errors.

    Raises:
        UnsafePickle: a class that torch does not allow without ``trusted``.
    """
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=not trusted)
    except pickle.UnpicklingError as error:
        text = f"holds objects that torch.load makes only where it is told to trust them: {str(error).splitlines()[0]}"
        raise UnsafePickle(text, where=where, hint="pass trusted=True if you wrote the checkpoint") from error
