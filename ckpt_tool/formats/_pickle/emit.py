"""How each record came to be, as one call: the function, its arguments, and what is set on the result.

The inverse of ``rebuild``, ``constructors`` and ``numpy_values``. Knows no opcodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from ckpt_tool.errors import Unsupported
from ckpt_tool.formats._pickle.nodes import Device, Global, OrderedMap, PathText, Size
from ckpt_tool.formats._pickle.numpy_values import NumpyDType
from ckpt_tool.formats._pickle.tensors import (
    InlineTensorRef,
    MetaTensorRef,
    QuantizedTensorRef,
    SparseTensorRef,
    TensorRef,
    WrapperRef,
)
from ckpt_tool.records import dataclass, field

__all__ = ["REDUCED", "Call"]

_MULTIARRAY = "numpy._core.multiarray"  # numpy 2's name, which numpy >= 1.26.1 finds too


@dataclass(frozen=True, slots=True)
class Call:
    """One object as a call, and what the pickle does to the result."""

    function: Global
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    state: Any = None
    entries: Sequence[tuple[Any, Any]] = ()
    items: Sequence[Any] = ()


@cache
def _named(module: str, name: str) -> Global:
    """A name that is used often: making a Global costs 15 microseconds."""
    return Global(module, name)


def _utils(name: str) -> Global:
    return _named("torch._utils", name)


def _strided(tensor: TensorRef) -> Call:
    """The call of ``_rebuild_tensor_v2``, or ``_v3`` for a dtype without a storage class."""
    # Shape and strides are new tuples, as torch makes them: the pickle shall not refer back to those of another tensor.
    args: tuple[Any, ...] = (
        tensor.storage, tensor.offset, (*tensor.shape,), (*tensor.strides,),
        tensor.requires_grad and not tensor.is_parameter, OrderedMap(),
    )  # fmt: skip
    flags = {name: True for name, is_set in (("conj", tensor.conj), ("neg", tensor.neg)) if is_set}
    if tensor.storage.dtype is None:
        return Call(_utils("_rebuild_tensor_v3"), (*args, tensor.dtype, *((flags,) if flags else ())))
    return Call(_utils("_rebuild_tensor_v2"), (*args, *((flags,) if flags else ())))


def _tensor(tensor: TensorRef) -> Call:
    call = _strided(tensor)
    if tensor.is_parameter:
        data = _Rebuilt(call)
        name = "_rebuild_parameter"
        state: tuple[Any, ...] = ()
        if tensor.attributes is not None:
            name, state = "_rebuild_parameter_with_state", (tensor.attributes,)
        return Call(_utils(name), (data, tensor.requires_grad, OrderedMap(), *state))
    if tensor.cls is not None:
        return Call(_from_type(), (call.function, tensor.cls, call.args, tensor.attributes))
    return call


@dataclass(frozen=True, slots=True)
class _Rebuilt:
    """A call whose result stands inside another call's arguments."""

    call: Call


def _from_type() -> Global:
    return _named("torch._tensor", "_rebuild_from_type_v2")


def _wrapper(tensor: WrapperRef) -> Call:
    args = (
        tensor.cls, tensor.dtype, tensor.shape, tensor.strides, tensor.offset, tensor.layout, tensor.device,
        tensor.requires_grad and not tensor.is_parameter,
    )  # fmt: skip
    call = Call(_from_type(), (_utils("_rebuild_wrapper_subclass"), tensor.cls, args, tensor.state))
    if tensor.is_parameter:
        return Call(_utils("_rebuild_parameter"), (_Rebuilt(call), tensor.requires_grad, OrderedMap()))
    return call


def _layout(name: str) -> Any:
    return _named("torch.serialization", "_get_layout")(f"torch.{name}")


def _sparse(tensor: SparseTensorRef) -> Call:
    coalesced = () if tensor.is_coalesced is None else (tensor.is_coalesced,)
    data = (*tensor.parts, tensor.shape, *coalesced)
    return Call(_utils("_rebuild_sparse_tensor"), (_layout(tensor.layout), data))


def _quantized(tensor: QuantizedTensorRef) -> Call:
    axis = () if tensor.axis is None else (tensor.axis,)
    parameters = (_named("torch", tensor.scheme), tensor.scale, tensor.zero_point, *axis)
    inner = tensor.tensor
    args = (inner.storage, inner.offset, inner.shape, inner.strides, parameters, inner.requires_grad, OrderedMap())
    return Call(_utils("_rebuild_qtensor"), args)


def _meta(tensor: MetaTensorRef) -> Call:
    args = (tensor.dtype, tensor.shape, tensor.strides, tensor.requires_grad)
    return Call(_utils("_rebuild_meta_tensor_no_storage"), args)


def _inline(tensor: InlineTensorRef) -> Call:
    args = (tensor.array, tensor.dtype, tensor.device, tensor.requires_grad)
    return Call(_utils("_rebuild_device_tensor_from_numpy"), args)


def _array(array: np.ndarray[Any, Any]) -> Call:
    is_fortran = bool(array.flags.f_contiguous and not array.flags.c_contiguous)
    elements: Any = (
        array.ravel(order="F" if is_fortran else "C").tolist()
        if array.dtype.hasobject
        else array.tobytes(order="F" if is_fortran else "C")
    )
    made_by = _named(_MULTIARRAY, "_reconstruct")
    state = (1, tuple(array.shape), array.dtype, is_fortran, elements)
    return Call(made_by, (_named("numpy", "ndarray"), (0,), b"b"), state=state)


def _scalar(value: np.generic) -> Call:
    return Call(_named(_MULTIARRAY, "scalar"), (value.dtype, value.tobytes()))


def _dtype(value: np.dtype[Any]) -> Call:
    """The call that numpy's own ``__reduce__`` describes; it holds plain data only."""
    reduced: Any = value.__reduce__()
    _, args, state = reduced
    code = args[0]
    if isinstance(code, type):  # ml_dtypes names its scalar class
        code = _named(code.__module__, code.__name__)
    return Call(_named("numpy", "dtype"), (code, *args[1:]), state=state)


def _numpy_dtype(value: NumpyDType) -> Call:
    return Call(_named("numpy", "dtype"), (value.code, False, True), state=value.state or None)


def _complex(value: complex) -> Call:
    return Call(_named("builtins", "complex"), (value.real, value.imag))


def _slice(value: slice) -> Call:
    return Call(_named("builtins", "slice"), (value.start, value.stop, value.step))


def _range(value: range) -> Call:
    return Call(_named("builtins", "range"), (value.start, value.stop, value.step))


def _size(value: Size) -> Call:
    return Call(_named("torch", "Size"), ((*value,),))


def _device(value: Device) -> Call:
    kind, _, index = str(value).partition(":")
    if index and not index.isdigit():
        raise Unsupported(f"{value!r} is no torch device")
    return Call(_named("torch", "device"), (kind, int(index)) if index else (kind,))


def _path(value: PathText) -> Call:
    return Call(value.cls, (str(value),))


def _rebuilt(value: _Rebuilt) -> Call:
    return value.call


REDUCED: Sequence[tuple[type, Callable[[Any], Call]]] = (
    (TensorRef, _tensor),
    (_Rebuilt, _rebuilt),
    (WrapperRef, _wrapper),
    (SparseTensorRef, _sparse),
    (QuantizedTensorRef, _quantized),
    (MetaTensorRef, _meta),
    (InlineTensorRef, _inline),
    (np.ndarray, _array),
    (np.generic, _scalar),
    (np.dtype, _dtype),
    (NumpyDType, _numpy_dtype),
    (Size, _size),
    (Device, _device),
    (PathText, _path),
    (complex, _complex),
    (slice, _slice),
    (range, _range),
)
