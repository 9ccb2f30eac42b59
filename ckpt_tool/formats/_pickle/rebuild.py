"""torch's rebuild functions, as descriptions: each returns the record of the tensor that torch would make.

Signatures: ``torch/_utils.py`` and ``torch/_tensor.py`` of torch 2.13, which still reads what 1.x wrote.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ckpt_tool.dtypes import DType, from_storage
from ckpt_tool.errors import FormatError
from ckpt_tool.formats._pickle.nodes import Global, Stub
from ckpt_tool.formats._pickle.tensors import (
    TENSOR_RECORDS,
    InlineTensorRef,
    MetaTensorRef,
    QuantizedTensorRef,
    SparseTensorRef,
    StorageRef,
    TensorRef,
    WrapperRef,
    check_extent,
)

__all__ = ["REBUILDERS", "storage_from_id"]

_UNTYPED = frozenset({"UntypedStorage", "_UntypedStorage"})
_MAX_NUMEL = 1 << 62
_INTEGERS = frozenset({int})
_PACKED = frozenset({"quint4x2", "quint2x4"})
# Protocol 0 writes a persistent id as its repr, which torch.load itself cannot take apart.
_ID_AS_TEXT = (
    r"\('storage', <class 'torch\.(?:\w+\.)*(\w{1,40})'>, '([^'\\]{1,200})', '([^'\\]{1,200})', (\d{1,18})(?:, None)?\)"
)


def storage_from_id(persistent_id: object) -> StorageRef:
    """The storage that torch's persistent id ``('storage', class, key, location, numel[, view])`` names.

    Raises:
        FormatError: not such a tuple, nor its text, or not of plausible parts.
    """
    if isinstance(persistent_id, str) and (said := re.fullmatch(_ID_AS_TEXT, persistent_id)) is not None:
        persistent_id = ("storage", Global("torch", said[1]), said[2], said[3], int(said[4]))
    if not isinstance(persistent_id, tuple) or len(persistent_id) not in (5, 6) or persistent_id[0] != "storage":
        raise FormatError("a persistent id that names no storage")
    _, cls, key, location, numel, *rest = persistent_id
    if isinstance(cls, Global) and cls.last in _UNTYPED:
        dtype = None
    elif isinstance(cls, Global) and (found := from_storage(cls.last)) is not None:
        dtype = found
    else:
        raise FormatError(f"a storage of unknown class {cls!r}")
    if isinstance(key, int):
        key = str(key)
    if type(key) is not str or not isinstance(location, str) or type(numel) is not int or not 0 <= numel < _MAX_NUMEL:
        raise FormatError("a storage whose key, location or number of elements is of the wrong kind")
    view = rest[0] if rest else None
    if view is not None and not (isinstance(view, tuple) and [type(part) for part in view] == [str, int, int]):
        raise FormatError("a storage that is a view of another one says not which part")
    return StorageRef(dtype, key, str(location), numel, view)


def _lengths(values: object) -> tuple[int, ...]:
    if not isinstance(values, (tuple, list)) or not _INTEGERS.issuperset(map(type, values)):
        raise FormatError("a shape or strides of a tensor are not a tuple of integers")
    return values if isinstance(values, tuple) else tuple(values)


def _strided(storage: object, offset: Any, shape: object, strides: object, dtype: DType | None = None) -> TensorRef:
    if not isinstance(storage, StorageRef) or type(offset) is not int:
        raise FormatError("a tensor is rebuilt from something that is no storage")
    actual = dtype or storage.dtype
    if actual is None:
        raise FormatError("a tensor in an untyped storage has no dtype")
    if storage.view is not None:  # before torch 0.4: the offset counts within the view
        offset += storage.view[1]
        storage = replace(storage, view=None)
    sizes = tuple(_lengths(shape))  # a plain tuple, also of a Size
    steps = tuple(_lengths(strides))
    check_extent(storage, actual, offset, sizes, steps)
    return TensorRef(storage, offset, sizes, steps, actual)


def _with_flags(tensor: TensorRef, requires_grad: object, metadata: object) -> TensorRef:
    flags = metadata if isinstance(metadata, dict) else {}
    if not requires_grad and not flags:
        return tensor
    return replace(
        tensor, requires_grad=bool(requires_grad), conj=flags.get("conj") is True, neg=flags.get("neg") is True
    )


def _tensor_v1(storage: object, offset: object, shape: object, strides: object) -> Any:
    return _strided(storage, offset, shape, strides)


def _tensor_v2(
    storage: object,
    offset: object,
    shape: object,
    strides: object,
    requires_grad: object,
    hooks: object,
    metadata: object = None,
) -> Any:
    del hooks
    return _with_flags(_strided(storage, offset, shape, strides), requires_grad, metadata)


def _tensor_v3(
    storage: object,
    offset: object,
    shape: object,
    strides: object,
    requires_grad: object,
    hooks: object,
    dtype: object,
    metadata: object = None,
) -> Any:
    del hooks
    if not isinstance(dtype, DType):
        return None
    return _with_flags(_strided(storage, offset, shape, strides, dtype), requires_grad, metadata)


def _parameter(tensor: object, requires_grad: object, hooks: object, state: object = None) -> Any:
    del hooks
    if isinstance(tensor, TensorRef):
        attributes = tensor.attributes if state is None else state
        return replace(tensor, requires_grad=bool(requires_grad), is_parameter=True, attributes=attributes)
    if isinstance(tensor, WrapperRef):
        return replace(tensor, requires_grad=bool(requires_grad), is_parameter=True)
    return None


def _from_type(function: object, cls: object, args: object, state: object = None) -> Any:
    if not isinstance(function, Global) or not isinstance(cls, Global) or not isinstance(args, tuple):
        return None
    inner = function(*args)
    if isinstance(inner, TensorRef):
        return replace(inner, attributes=state, cls=cls)
    if isinstance(inner, WrapperRef):
        return replace(inner, cls=cls, state=state)
    return None


def _wrapper(
    cls: object,
    dtype: object,
    shape: object,
    strides: object,
    offset: object,
    layout: object,
    device: object,
    requires_grad: object,
) -> Any:
    if not isinstance(cls, Global) or type(offset) is not int:
        return None
    if strides is None:
        strides = ()
    return WrapperRef(cls, dtype, _lengths(shape), _lengths(strides), None, offset, layout, device, bool(requires_grad))


def _layout_name(layout: object) -> str:
    if isinstance(layout, Stub) and layout.args and isinstance(layout.args[0], str):
        layout = layout.args[0]
    name = layout.last if isinstance(layout, Global) else layout
    return str(name).removeprefix("torch.") if isinstance(name, str) else ""


def _sparse(layout: object, data: object) -> Any:
    name = _layout_name(layout)
    if not isinstance(data, tuple) or not name.startswith("sparse_"):
        return None
    n_parts = 2 if name == "sparse_coo" else 3
    if len(data) not in ((3, 4) if n_parts == 2 else (4,)) or not all(
        isinstance(part, TENSOR_RECORDS) for part in data[:n_parts]
    ):
        return None
    coalesced = data[3] if n_parts == 2 and len(data) == 4 else None
    is_coalesced = None if coalesced is None else bool(coalesced)
    return SparseTensorRef(name, data[:n_parts], _lengths(data[n_parts]), is_coalesced)


def _quantized(
    storage: object,
    offset: object,
    shape: object,
    strides: object,
    parameters: object,
    requires_grad: object,
    hooks: object,
) -> Any:
    del hooks
    if not isinstance(parameters, tuple) or len(parameters) not in (3, 4) or not isinstance(parameters[0], Global):
        return None
    if isinstance(storage, StorageRef) and storage.dtype is not None and storage.dtype.name in _PACKED:
        return None  # several elements a byte: strides say nothing about where one lies
    tensor = _with_flags(_strided(storage, offset, shape, strides), requires_grad, None)
    axis = parameters[3] if len(parameters) == 4 else None
    if axis is not None and (type(axis) is not int or not 0 <= axis < len(tensor.shape)):
        raise FormatError(f"a quantized tensor of shape {list(tensor.shape)} names axis {axis!r}")
    return QuantizedTensorRef(tensor, parameters[0].last, parameters[1], parameters[2], axis)


def _meta(dtype: object, shape: object, strides: object, requires_grad: object) -> Any:
    return MetaTensorRef(dtype, _lengths(shape), _lengths(strides), bool(requires_grad))


def _from_numpy(array: object, dtype: object, device: object, requires_grad: object) -> Any:
    return InlineTensorRef(array, dtype, device, bool(requires_grad))


def _from_cpu_tensor(tensor: object, dtype: object, device: object, requires_grad: object) -> Any:
    del device
    if isinstance(tensor, TensorRef) and tensor.dtype == dtype:
        return replace(tensor, requires_grad=bool(requires_grad))
    return None


# A function returns None where the record cannot say what the pickle says; a Stub stands there then.
REBUILDERS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _tensor_v1,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_wrapper_subclass": _wrapper,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_qtensor": _quantized,
    "torch._utils._rebuild_meta_tensor_no_storage": _meta,
    "torch._utils._rebuild_device_tensor_from_numpy": _from_numpy,
    "torch._utils._rebuild_xla_tensor": _from_numpy,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _from_cpu_tensor,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    # Of Ascend (``torch_npu/utils/storage.py``): the number of the device's format stands in place of metadata.
    "torch_npu.utils.storage._rebuild_npu_tensor": _tensor_v2,
}
