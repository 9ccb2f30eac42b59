"""numpy values in a pickle, decoded from their bytes after every length is checked.

numpy's own reconstruction functions are not used: they trust the pickle. Sources of the layouts:
``ndarray.__reduce__``, ``dtype.__reduce__`` and ``numpy/_core/multiarray.py`` of numpy 1 and 2.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ckpt_tool.errors import FormatError, Unsupported
from ckpt_tool.formats._pickle.nodes import Global
from ckpt_tool.sizes import counted

__all__ = ["Array", "NumpyDType", "array_from_buffer", "empty_array", "scalar"]

_MAX_DIMENSIONS = 64


class NumpyDType:
    """A ``numpy.dtype`` as the pickle describes it: a type code and, set afterwards, byte order and fields."""

    __slots__ = ("code", "state")

    def __init__(self, code: object, align: object = False, copy: object = False) -> None:  # noqa: FBT002 numpy's order
        del align, copy
        if isinstance(code, Global):
            code = code.last  # ml_dtypes names its scalar class: ml_dtypes.bfloat16
        if not isinstance(code, str):
            raise FormatError(f"a numpy dtype code is text, got {type(code).__name__}")
        self.code: str = code
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) < 2:
            raise FormatError("the state of a numpy dtype is a tuple of version, byte order and more")
        self.state = state

    def as_numpy(self) -> np.dtype[Any]:
        """The numpy dtype.

        Raises:
            Unsupported: numpy knows no such type.
            FormatError: fields lie outside their record.
        """
        try:
            return self._as_numpy()
        except (TypeError, ValueError, OverflowError, AttributeError) as error:
            raise Unsupported(f"numpy dtype {self.code[:80]!r} of a pickled array: {error}") from error

    def _as_numpy(self) -> np.dtype[Any]:
        names = self.state[3] if len(self.state) > 5 else None
        if names:
            fields = self.state[4]
            if not isinstance(fields, dict) or any(not isinstance(fields[name][0], NumpyDType) for name in names):
                raise FormatError("a numpy record dtype lacks the dtypes of its fields")
            return np.dtype(
                {
                    "names": list(names),
                    "formats": [fields[name][0].as_numpy() for name in names],
                    "offsets": [fields[name][1] for name in names],
                    "itemsize": self.state[5],
                }
            )
        subarray = self.state[2] if len(self.state) > 5 else None
        if subarray is not None:  # a field that is an array itself: its elements' dtype, and its shape
            element, shape = subarray
            if not isinstance(element, NumpyDType):
                raise FormatError("a numpy dtype of arrays lacks the dtype of their elements")
            return np.dtype((element.as_numpy(), shape))
        if len(self.code) > 32:
            raise FormatError("a numpy dtype code is longer than 32 characters")
        code = self.code
        if len(self.state) > 8 and code[:1] in "mM":  # datetime64: ..., ({}, (unit, count, 1, 1))
            unit = self.state[8][1]
            name = unit[0].decode("ascii") if isinstance(unit[0], bytes) else str(unit[0])
            code = f"{code}[{int(unit[1])}{name}]"
        order = self.state[1] if len(self.state) > 1 else "|"
        if code in {"bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "uint4"}:
            import ml_dtypes

            small: np.dtype[Any] = np.dtype(getattr(ml_dtypes, code))
            return small
        dtype: np.dtype[Any] = np.dtype(code)
        if order == ">":
            return dtype.newbyteorder(">")
        return dtype.newbyteorder("<") if order == "<" else dtype

    def __repr__(self) -> str:
        return f"<numpy.dtype {self.code[:32]}>"


class Array(np.ndarray[Any, np.dtype[Any]]):
    """A numpy array that came out of a pickle; otherwise an ndarray."""

    def __setstate__(self, state: object) -> None:
        """Take shape, dtype and elements from ``(version, shape, dtype, is_fortran, elements)``."""
        if not isinstance(state, tuple) or len(state) not in (4, 5):
            raise FormatError("the state of a numpy array is a tuple of 5")
        shape, described, is_fortran, elements = state[-4:]
        dtype, n_elements = _checked(shape, described)
        raw: bytes | list[Any]
        if dtype.hasobject:
            if dtype.kind != "O":
                raise Unsupported("a pickled numpy record array holds Python objects")
            if not isinstance(elements, list) or len(elements) != n_elements:
                raise FormatError(
                    f"a pickled numpy array of objects: expected a list of {counted(n_elements, 'element')}"
                )
            raw = elements
        else:
            raw = _raw(elements, n_elements * dtype.itemsize)
        super().__setstate__((1, shape, dtype, bool(is_fortran), raw))  # type: ignore[arg-type]  # takes a plain bool


def empty_array(*args: Any) -> Array:
    """The array that ``_reconstruct(ndarray, (0,), b"b")`` returns; its ``__setstate__`` fills it."""
    del args
    return np.ndarray.__new__(Array, (0,), np.int8)


def array_from_buffer(buffer: object, described: object, shape: object, order: object = "C") -> Array:
    """An array from bytes that stand in the pickle (``numpy._core.numeric._frombuffer``, protocol 5)."""
    array = empty_array()
    raw = bytes(buffer) if isinstance(buffer, (bytes, bytearray)) else buffer
    array.__setstate__((1, shape, described, order == "F", raw))
    return array


def scalar(described: object, raw: object = b"") -> Any:
    """One numpy scalar from its dtype and bytes."""
    if isinstance(described, NumpyDType) and described.code[:1] == "O":
        return raw
    dtype, _ = _checked((), described)
    if dtype.hasobject:
        raise Unsupported("a pickled numpy scalar holds Python objects")
    return np.frombuffer(_raw(raw, dtype.itemsize), dtype)[0] if dtype.itemsize else dtype.type()


def _checked(shape: object, described: object) -> tuple[np.dtype[Any], int]:
    """The dtype, and the number of elements of a valid shape."""
    if not isinstance(described, NumpyDType):
        raise FormatError(f"a pickled numpy array has no dtype, got {type(described).__name__}")
    if not isinstance(shape, tuple) or len(shape) > _MAX_DIMENSIONS:
        raise FormatError(f"a pickled numpy array: expected a shape of at most {_MAX_DIMENSIONS} lengths")
    n_elements = 1
    for length in shape:
        if type(length) is not int or not 0 <= length < 1 << 62:
            raise FormatError("a pickled numpy array: a length of its shape is no length")
        n_elements *= length
    dtype = described.as_numpy()
    if dtype.subdtype is not None:  # numpy gives such dimensions to the array itself
        raise FormatError("a pickled numpy array has elements that are arrays, which only fields of a record can be")
    return dtype, n_elements


def _raw(elements: object, nbytes: int) -> bytes:
    if isinstance(elements, str):  # written by Python 2
        try:
            elements = elements.encode("latin-1")
        except UnicodeEncodeError as error:
            raise FormatError("the elements of a pickled numpy array are text") from error
    if not isinstance(elements, bytes):
        raise FormatError(f"the elements of a pickled numpy array: expected bytes, got {type(elements).__name__}")
    if len(elements) != nbytes:
        raise FormatError(
            f"a pickled numpy array: expected {counted(nbytes, 'byte')} of elements, got {len(elements):,}"
        )
    return elements
