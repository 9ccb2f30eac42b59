r"""Plain values as JSON that gives back the same values: tuples stay tuples, bytes bytes, and keys keep their types.

What JSON can say itself is written as itself. Everything else is an object with the key ``$``, its type::

    (1, 2)              {"$": "tuple", "items": [1, 2]}
    {3: "a"}            {"$": "dict", "items": [[3, "a"]]}
    b"\x00"              {"$": "bytes", "value": "AA=="}
    float("nan")        {"$": "float", "value": "nan"}
    np.float32(1)       {"$": "scalar", "dtype": "<f4", "value": "AACAPw=="}

A dict whose keys are strings is written as itself unless one of them is ``$``. Knows nothing of files.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections import OrderedDict
from typing import Any

import numpy as np

from ckpt_tool.errors import FormatError, Unsupported

__all__ = ["from_plain", "is_plain", "to_plain"]

_MAX_DEPTH = 200
_NUMPY_KINDS = "biufcSUmM"
_SEQUENCES: dict[type[Any], str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}
_BUILDERS: dict[str, type[Any]] = {name: kind for kind, name in _SEQUENCES.items()}


def is_plain(value: Any) -> bool:
    """Whether `to_plain` takes ``value``."""
    try:
        to_plain(value)
    except Unsupported:
        return False
    return True


def to_plain(value: Any, where: str = "value") -> Any:
    """What to hand to ``json.dumps`` (``allow_nan=False`` will do) for ``value``.

    Args:
        value: any nesting of None, bool, int, float, complex, str, bytes, list, tuple, dict, OrderedDict, set,
            frozenset and numpy arrays and scalars of numbers, text or times; exactly these types, not subclasses.
        where: a name for it, for messages.

    >>> to_plain({"a": (1, None)})
    {'a': {'$': 'tuple', 'items': [1, None]}}

    Raises:
        Unsupported: something else is in it; the message says where.
    """
    return _encode(value, where, 0)


def _encode(value: Any, where: str, depth: int) -> Any:
    kind = type(value)
    if depth > _MAX_DEPTH:
        raise Unsupported(f"{where} is nested more than {_MAX_DEPTH} deep (or contains itself)")
    if value is None or kind in {bool, int, str}:
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$": "float", "value": repr(value)}
    if kind is complex:
        parts = [_encode(value.real, where, depth + 1), _encode(value.imag, where, depth + 1)]
        return {"$": "complex", "items": parts}
    if kind is bytes:
        return {"$": "bytes", "value": base64.b64encode(value).decode()}
    if kind is list:
        return [_encode(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    if kind in _SEQUENCES:
        items = sorted(value, key=repr) if kind in {set, frozenset} else value
        return {
            "$": _SEQUENCES[kind],
            "items": [_encode(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(items)],
        }
    if kind in {dict, OrderedDict}:
        return _encode_dict(value, where, depth)
    if isinstance(value, (np.ndarray, np.generic)):
        return _encode_numpy(value, where)
    raise Unsupported(f"{where} is a {kind.__module__}.{kind.__qualname__}, which has no plain form")


def _encode_dict(value: dict[Any, Any], where: str, depth: int) -> Any:
    if type(value) is dict and "$" not in value and all(type(key) is str for key in value):
        return {key: _encode(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
    items = [
        [_encode(key, f"a key of {where}", depth + 1), _encode(item, f"{where}[{key!r}]", depth + 1)]
        for key, item in value.items()
    ]
    return {"$": "dict" if type(value) is dict else "OrderedDict", "items": items}


def _encode_numpy(value: np.ndarray[Any, Any] | np.generic, where: str) -> Any:
    if value.dtype.kind in _NUMPY_KINDS:
        dtype = value.dtype.str
    elif value.dtype.kind == "V" and value.dtype.fields is None and value.dtype.name in _ml_names():
        dtype = value.dtype.name
    else:
        raise Unsupported(f"{where} is a numpy {value.dtype} array, which has no plain form")
    data = base64.b64encode(value.tobytes()).decode()
    if isinstance(value, np.ndarray):
        return {"$": "ndarray", "dtype": dtype, "shape": list(value.shape), "value": data}
    return {"$": "scalar", "dtype": dtype, "value": data}


def _ml_names() -> dict[str, Any]:
    import ml_dtypes

    return {name: found for name in dir(ml_dtypes) if isinstance(found := getattr(ml_dtypes, name), type)}


def from_plain(found: Any) -> Any:
    """The value that `to_plain` made ``found`` of: ``from_plain(to_plain(v)) == v``, with the same types.

    Raises:
        FormatError: ``found`` was not made by `to_plain`.
    """
    try:
        return _decode(found)
    except (KeyError, TypeError, ValueError, IndexError, RecursionError, binascii.Error) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"not a plain value: {type(error).__name__}: {error}") from error


def _decode(found: Any) -> Any:
    if isinstance(found, list):
        return [_decode(item) for item in found]
    if not isinstance(found, dict):
        return found
    kind = found.get("$")
    if kind is None:
        return {key: _decode(item) for key, item in found.items()}
    if kind == "float":
        return float(found["value"])
    if kind == "bytes":
        return base64.b64decode(found["value"], validate=True)
    if kind == "complex":
        real, imaginary = (_decode(part) for part in found["items"])
        return complex(real, imaginary)
    if kind in _BUILDERS:
        return _BUILDERS[kind](_decode(item) for item in found["items"])
    if kind in {"dict", "OrderedDict"}:
        pairs = ((_decode(key), _decode(item)) for key, item in found["items"])
        return dict(pairs) if kind == "dict" else OrderedDict(pairs)
    if kind in {"ndarray", "scalar"}:
        name = found["dtype"]
        dtype = np.dtype(_ml_names().get(name, name))
        if dtype.hasobject:
            raise FormatError(f"a numpy array of {name!r} has no plain form")
        flat = np.frombuffer(base64.b64decode(found["value"], validate=True), dtype=dtype)
        return flat.reshape(found["shape"]).copy() if kind == "ndarray" else flat.reshape(())[()]
    raise FormatError(f"{kind!r} is no type of a plain value")
