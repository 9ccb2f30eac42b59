"""The callables that a pickle may call: each returns plain data, or None where a Stub says it better.

Only names of the standard library, numpy and torch whose arguments are data. Does not know opcodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckpt_tool.errors import UnsafePickle
from ckpt_tool.formats._pickle.nodes import Device, Global, PathText, Stub
from ckpt_tool.formats._pickle.numpy_values import NumpyDType, array_from_buffer, empty_array, scalar
from ckpt_tool.formats._pickle.policy import refusal
from ckpt_tool.formats._pickle.rebuild import REBUILDERS

__all__ = ["CONSTRUCTORS", "Known", "constructor"]

_PLAIN = (tuple, list, set, frozenset, dict)


class Known(Global):
    """A name whose calls are answered with data: by ``make``, or a stub where that returns None."""

    _make: Callable[..., Any]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 instances are classes
        made = cls._make(*args, **kwargs)
        return cls.stub(*args, **kwargs) if made is None else made


def constructor(module: str, name: str) -> Known | None:
    """What stands for ``module.name`` when its calls have an answer."""
    qualified = f"{module}.{name}"
    make = CONSTRUCTORS.get(qualified) or REBUILDERS.get(qualified)
    if make is None and module.partition(".")[0] == "pathlib" and name.endswith("Path"):
        known = Known(module, name)
        known._make = lambda *parts: _path(known, parts)
        return known
    return None if make is None else Known(module, name, _make=staticmethod(make))


def _encode(text: object, encoding: object = "utf-8") -> Any:
    if isinstance(text, str) and encoding in ("latin1", "latin-1"):
        return text.encode("latin-1")
    return None


def _bytes(value: object = b"", encoding: object = None) -> Any:
    if isinstance(value, str):
        return _encode(value, encoding)
    return bytes(value) if isinstance(value, (bytes, bytearray, list, tuple)) else None


def _bytearray(value: object = b"", encoding: object = None) -> Any:
    made = _bytes(value, encoding)
    return None if made is None else bytearray(made)


def _set(items: object = ()) -> Any:
    return set(items) if isinstance(items, _PLAIN) else None


def _frozenset(items: object = ()) -> Any:
    return frozenset(items) if isinstance(items, _PLAIN) else None


def _complex(real: object, imaginary: object = 0.0) -> Any:
    return complex(real, imaginary) if isinstance(real, (int, float)) and isinstance(imaginary, (int, float)) else None


def _slice(*bounds: Any) -> Any:
    return slice(*bounds)


def _range(*bounds: Any) -> Any:
    return range(*bounds) if all(type(bound) is int for bound in bounds) else None


def _getattr(owner: object, name: object) -> Any:
    """The attribute's dotted name: pickles name nested classes and enum members so."""
    if not isinstance(owner, Global) or not isinstance(name, str):
        return None
    why = refusal(owner.module, f"{owner.name}.{name}")
    if why is not None:
        raise UnsafePickle(f"the pickle asks for {owner.qualified}.{name}, which {why}")
    return Global(owner.module, f"{owner.name}.{name}")


def _newobj(cls: object, *args: object) -> Any:
    return Stub.__new__(cls, *args) if isinstance(cls, Global) else None  # type: ignore[arg-type]


def _newobj_ex(cls: object, args: object, kwargs: object) -> Any:
    if not isinstance(cls, Global) or not isinstance(args, tuple) or not isinstance(kwargs, dict):
        return None
    return Stub.__new__(cls, *args, **kwargs)  # type: ignore[arg-type]


def _reconstructor(cls: object, base: object, state: object) -> Any:
    is_plain = isinstance(base, Global) and base.qualified == "builtins.object" and state is None
    return _newobj(cls) if is_plain else None


def _device(kind: object, index: object = None) -> Any:
    if not isinstance(kind, str) or (index is not None and type(index) is not int):
        return None
    return Device(kind if index is None else f"{kind}:{index}")


def _path(cls: Global, parts: tuple[object, ...]) -> Any:
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) != len(parts):
        return None
    separator = "\\" if "Windows" in cls.name else "/"
    head = texts[0] if texts and texts[0].endswith(separator) else ""
    return PathText(head + separator.join(texts[1:] if head else texts), cls)


CONSTRUCTORS: dict[str, Callable[..., Any]] = {
    "_codecs.encode": _encode,
    "builtins.bytes": _bytes,
    "builtins.bytearray": _bytearray,
    "builtins.set": _set,
    "builtins.frozenset": _frozenset,
    "builtins.complex": _complex,
    "builtins.slice": _slice,
    "builtins.range": _range,
    "builtins.getattr": _getattr,
    "copyreg.__newobj__": _newobj,
    "copyreg.__newobj_ex__": _newobj_ex,
    "copyreg._reconstructor": _reconstructor,
    "torch.device": _device,
    "numpy.dtype": NumpyDType,
    "numpy._core.multiarray._reconstruct": empty_array,
    "numpy._core.multiarray.scalar": scalar,
    "numpy._core.numeric._frombuffer": array_from_buffer,
    "numpy.core.multiarray._reconstruct": empty_array,
    "numpy.core.multiarray.scalar": scalar,
    "numpy.core.numeric._frombuffer": array_from_buffer,
}
