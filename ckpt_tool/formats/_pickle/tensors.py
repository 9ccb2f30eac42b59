"""Tensors as a pickle describes them: a storage, and how the elements lie in it. Holds no element.

Offsets, shapes and strides count elements of the tensor's dtype; ``StorageRef.numel`` counts elements of the storage's
class, which for an untyped storage are bytes (torch.save, ``torch/_utils.py``).
"""

from __future__ import annotations

from typing import Any

from ckpt_tool.dtypes import DType
from ckpt_tool.errors import FormatError
from ckpt_tool.formats._pickle.nodes import Global, refuse_state
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = [
    "TENSOR_RECORDS",
    "InlineTensorRef",
    "MetaTensorRef",
    "QuantizedTensorRef",
    "SparseTensorRef",
    "StorageRef",
    "TensorNode",
    "TensorRef",
    "WrapperRef",
    "check_extent",
    "tensor_text",
]


@dataclass(frozen=True, slots=True)
class StorageRef:
    """One storage: in a zip the member ``data/<key>``, in a legacy stream the record named ``key``."""

    dtype: DType | None
    """Element type of the storage's class, None for an untyped one."""
    key: str
    location: str
    """Where it lived (``cpu``, ``cuda:1``); says nothing about the bytes."""
    numel: int
    """Elements of ``dtype``, or bytes of an untyped storage."""
    view: Any = None
    """Legacy streams: the part of another storage that this one is, ``(key, offset, numel)``."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole storage."""
        return self.numel if self.dtype is None else self.dtype.nbytes(self.numel)


@dataclass(frozen=True, slots=True)
class TensorRef:
    """A strided tensor in a storage."""

    storage: StorageRef
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    conj: bool = False
    """The stored values are to be conjugated."""
    neg: bool = False
    """The stored values are to be negated."""
    requires_grad: bool = False
    is_parameter: bool = False
    attributes: Any = None
    """Python attributes: a dict, or a dict (or None) and a dict of slots; None when there are none."""
    cls: Global | None = None
    """The tensor's class when it is neither Tensor nor Parameter, or when it has attributes."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        product = 1
        for length in self.shape:
            product *= length
        return product

    @property
    def is_contiguous(self) -> bool:
        """True when the elements lie in row-major order without gaps (always for at most one element)."""
        step = 1
        for length, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if length != 1 and stride != step:
                return self.numel == 0
            step *= length
        return True


@dataclass(frozen=True, slots=True)
class WrapperRef:
    """A tensor subclass that wraps others: DTensor, ShardedTensor. What it wraps is in ``state``."""

    cls: Global
    dtype: Any
    """A DType; a Global for one that is not known here."""
    shape: tuple[int, ...]
    """The shape of the whole, so for DTensor and ShardedTensor the global one."""
    strides: tuple[int, ...]
    state: Any
    """DTensor: ``(None, {'_local_tensor': ..., '_spec': ...})`` or that dict; ShardedTensor: a tuple."""
    offset: int = 0
    layout: Any = None
    device: Any = None
    requires_grad: bool = False
    is_parameter: bool = False

    def attribute(self, name: str, default: object = None) -> Any:
        """The attribute ``name`` in the state, dict or slots; ``default`` where there is none."""
        states = self.state if isinstance(self.state, tuple) else (self.state,)
        for state in states:
            if isinstance(state, dict) and name in state:
                return state[name]
        return default


@dataclass(frozen=True, slots=True)
class SparseTensorRef:
    """A sparse tensor: COO parts are indices and values, compressed ones both index vectors and values."""

    layout: str
    """``sparse_coo``, ``sparse_csr``, ``sparse_csc``, ``sparse_bsr`` or ``sparse_bsc``."""
    parts: tuple[Any, ...]
    shape: tuple[int, ...]
    is_coalesced: bool | None = None
    """COO only; None where the file does not say."""


@dataclass(frozen=True, slots=True)
class QuantizedTensorRef:
    """Quantized integers in a storage, and the scheme that gives them meaning."""

    tensor: TensorRef
    scheme: str
    """``per_tensor_affine``, ``per_channel_affine`` or ``per_channel_affine_float_qparams``."""
    scale: Any
    """A float, or per channel a TensorRef."""
    zero_point: Any
    axis: int | None = None


@dataclass(frozen=True, slots=True)
class MetaTensorRef:
    """A tensor without data: shape and dtype only."""

    dtype: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class InlineTensorRef:
    """A tensor whose elements stand in the pickle itself, as a numpy array (devices without storages)."""

    array: Any
    dtype: Any
    device: Any
    requires_grad: bool = False


TensorNode = (
    TensorRef | WrapperRef | SparseTensorRef | QuantizedTensorRef | MetaTensorRef | InlineTensorRef
)  # fmt: skip
"""Everything that stands for one tensor."""

TENSOR_RECORDS = (TensorRef, WrapperRef, SparseTensorRef, QuantizedTensorRef, MetaTensorRef, InlineTensorRef)


def tensor_text(value: TensorNode) -> str:
    """What a tensor is, in a few words.

    >>> tensor_text(MetaTensorRef(Global("torch", "float32"), (2,), (1,)))
    '<meta tensor float32 [2]>'
    """
    if isinstance(value, InlineTensorRef):
        return f"<tensor {_dtype_name(value.dtype)} in numpy>"
    if isinstance(value, QuantizedTensorRef):
        return f"<tensor {value.tensor.dtype.name} {list(value.tensor.shape)} {value.scheme}>"
    if isinstance(value, SparseTensorRef):
        return f"<tensor {value.layout} {list(value.shape)}>"
    if isinstance(value, TensorRef):
        return f"<tensor {value.dtype.name} {list(value.shape)}>"
    name = value.cls.last if isinstance(value, WrapperRef) else "meta tensor"
    return f"<{name} {_dtype_name(value.dtype)} {list(value.shape)}>"


def _dtype_name(dtype: Any) -> str:
    return dtype.name if isinstance(dtype, (DType, Global)) else "?"


def check_extent(
    storage: StorageRef, dtype: DType, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    """Nothing, when all elements lie inside the storage.

    Raises:
        FormatError: lengths do not match, a number is negative, or an element lies beyond the storage's end.
    """
    if len(shape) != len(strides):
        raise FormatError(f"a tensor has {counted(len(shape), 'dimension')} and {counted(len(strides), 'stride')}")
    last = offset
    is_empty = False
    is_negative = offset < 0
    for length, stride in zip(shape, strides, strict=True):
        is_empty |= length == 0
        is_negative |= length < 0 or stride < 0
        last += (length - 1) * stride
    if is_negative:
        raise FormatError(f"a tensor has negative numbers: offset {offset}, shape {shape}, strides {strides}")
    if is_empty:
        return
    end = dtype.nbytes(last + 1)
    if end > storage.nbytes:
        raise FormatError(
            f"a {dtype.name} tensor of shape {list(shape)} ends at byte {end:,} of storage {storage.key!r}, "
            f"which has {storage.nbytes:,}"
        )


# A frozen dataclass with slots gets a __setstate__ that overwrites its fields: a pickle could use it to undo the checks
# that were made when the record was.
for _record in (StorageRef, *TENSOR_RECORDS):
    _record.__setstate__ = refuse_state  # type: ignore[union-attr]
for _record in TENSOR_RECORDS:
    _record.__repr__ = tensor_text  # type: ignore[assignment]
