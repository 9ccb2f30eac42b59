"""Element types: one table of names, widths and spellings in every container format.

A ``DType`` is named as torch names it. Element widths are in bits, so that sub-byte types cannot be silently wrong.
Packed fp4 follows torch: ``float4_e2m1fn_x2`` is one byte per element, two values in it (safetensors' ``F4`` counts
the values; its reader and writer halve and double the last dimension). Knows nothing of files. numpy is imported only
when an array is asked for.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from ckpt_tool.errors import FormatError, Unsupported
from ckpt_tool.records import dataclass

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "DTYPES",
    "DType",
    "cast_array",
    "dtype",
    "from_safetensors",
    "from_storage",
    "opaque",
    "short_name",
    "spellings",
]


@dataclass(frozen=True, slots=True)
class DType:
    """One element type."""

    name: str
    """torch's name without the ``torch.`` prefix, or the container's own name for an opaque type."""
    bits: int
    """Width of one element in bits."""
    kind: str
    """One of ``float int uint bool complex quantized opaque``."""
    safetensors: str | None = None
    """Name in a safetensors header, None where that format has none."""
    storage: str | None = None
    """torch's typed storage class in pickles (``FloatStorage``), None for types that use ``UntypedStorage``."""
    numpy: str | None = None
    """numpy (or ml_dtypes) type name, None where elements are only bytes."""

    @property
    def itemsize(self) -> int:
        """Bytes of one element.

        Raises:
            Unsupported: an element is not a whole number of bytes.
        """
        if self.bits % 8:
            raise Unsupported(f"{self.name} elements are {self.bits} bits wide, not a whole number of bytes")
        return self.bits // 8

    @property
    def is_castable(self) -> bool:
        """Whether it is a floating type that becomes another, or that another becomes, by rounding."""
        return self.kind == "float" and self.numpy is not None

    @property
    def component_bytes(self) -> int:
        """Bytes that byte order applies to: half an element for complex types, else one element."""
        return self.itemsize // 2 if self.kind == "complex" else self.itemsize

    def nbytes(self, numel: int) -> int:
        """Bytes of ``numel`` packed elements, rounded up to a whole byte."""
        return (numel * self.bits + 7) // 8

    def __str__(self) -> str:
        """Its name."""
        return self.name

    def __reduce__(self) -> tuple[type[DType], tuple[str | int | None, ...]]:
        return DType, (self.name, self.bits, self.kind, self.safetensors, self.storage, self.numpy)

    def as_numpy(self) -> np.dtype[Any]:
        """The numpy dtype; raw bytes (``V`` of the item size) where numpy and ml_dtypes have no such type."""
        return _numpy_dtype(self)


# The rows below are shared, and a pickle that names torch.float32 holds one: its BUILD opcode must find no
# __setstate__, which a frozen dataclass with slots gets by itself. Copies are made by __reduce__ instead.
for _method in ("__getstate__", "__setstate__"):
    delattr(DType, _method)


def _row(
    name: str, bits: int, kind: str, st: str | None = None, storage: str | None = None, np_: str | None = None
) -> DType:
    return DType(name, bits, kind, st, storage, np_)


# Storage classes: torch/storage.py; safetensors names: safetensors/src/tensor.rs (0.8). float8 and fp4 use
# UntypedStorage in torch.save (torch._utils._rebuild_tensor_v3), so they have no storage class.
_ROWS = (
    _row("float64", 64, "float", "F64", "DoubleStorage", "float64"),
    _row("float32", 32, "float", "F32", "FloatStorage", "float32"),
    _row("float16", 16, "float", "F16", "HalfStorage", "float16"),
    _row("bfloat16", 16, "float", "BF16", "BFloat16Storage", "bfloat16"),
    _row("float8_e4m3fn", 8, "float", "F8_E4M3", None, "float8_e4m3fn"),
    _row("float8_e5m2", 8, "float", "F8_E5M2", None, "float8_e5m2"),
    _row("float8_e4m3fnuz", 8, "float", "F8_E4M3FNUZ", None, "float8_e4m3fnuz"),
    _row("float8_e5m2fnuz", 8, "float", "F8_E5M2FNUZ", None, "float8_e5m2fnuz"),
    _row("float8_e8m0fnu", 8, "float", "F8_E8M0", None, "float8_e8m0fnu"),
    _row("float4_e2m1fn_x2", 8, "float", "F4", None, None),
    _row("int64", 64, "int", "I64", "LongStorage", "int64"),
    _row("int32", 32, "int", "I32", "IntStorage", "int32"),
    _row("int16", 16, "int", "I16", "ShortStorage", "int16"),
    _row("int8", 8, "int", "I8", "CharStorage", "int8"),
    _row("uint8", 8, "uint", "U8", "ByteStorage", "uint8"),
    _row("uint16", 16, "uint", "U16", None, "uint16"),
    _row("uint32", 32, "uint", "U32", None, "uint32"),
    _row("uint64", 64, "uint", "U64", None, "uint64"),
    _row("bool", 8, "bool", "BOOL", "BoolStorage", "bool"),
    _row("complex32", 32, "complex", None, None, None),
    _row("complex64", 64, "complex", "C64", "ComplexFloatStorage", "complex64"),
    _row("complex128", 128, "complex", None, "ComplexDoubleStorage", "complex128"),
    _row("qint8", 8, "quantized", None, "QInt8Storage", None),
    _row("quint8", 8, "quantized", None, "QUInt8Storage", None),
    _row("qint32", 32, "quantized", None, "QInt32Storage", None),
    _row("quint4x2", 8, "quantized", None, "QUInt4x2Storage", None),
    _row("quint2x4", 8, "quantized", None, "QUInt2x4Storage", None),
    _row("bits8", 8, "opaque", None, None, None),
    _row("float6_e2m3fn", 6, "float", "F6_E2M3", None, None),
    _row("float6_e3m2fn", 6, "float", "F6_E3M2", None, None),
)  # fmt: skip

DTYPES: dict[str, DType] = {row.name: row for row in _ROWS}
_BY_SAFETENSORS = {row.safetensors: row for row in _ROWS if row.safetensors}
_BY_STORAGE = {row.storage: row for row in _ROWS if row.storage}
_ALIASES = {
    "half": "float16", "fp16": "float16", "float": "float32", "fp32": "float32", "double": "float64", "fp64": "float64",
    "bf16": "bfloat16", "long": "int64", "int": "int32", "short": "int16", "cfloat": "complex64",
    "cdouble": "complex128", "chalf": "complex32", "fp8": "float8_e4m3fn",
}  # fmt: skip
_SHORT = (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c"))


def short_name(name: str) -> str:
    """A type's name as narrow tables print it.

    >>> short_name("bfloat16"), short_name("int64"), short_name("bool")
    ('bf16', 'i64', 'bool')
    """
    for long, short in _SHORT:
        if name.startswith(long):
            return short + name.removeprefix(long)
    return name


def spellings(name: str) -> tuple[str, ...]:
    """Every name that a user may know a type by, its own first.

    >>> spellings("bfloat16")
    ('bfloat16', 'bf16', 'BF16')
    """
    row = DTYPES.get(name)
    others = [alias for alias, own in _ALIASES.items() if own == name]
    others += [row.safetensors] if row is not None and row.safetensors is not None else []
    return tuple(dict.fromkeys((name, short_name(name), *others)))


_BY_SHORT = {short_name(name): row for name, row in DTYPES.items()}


def dtype(name: str) -> DType:
    """The type that torch (``torch.bfloat16``), a user (``bf16``), safetensors (``BF16``) or this table calls ``name``.

    >>> dtype("torch.bfloat16").bits, dtype("fp32").name, dtype("f32").name, dtype("F8_E5M2").name
    (16, 'float32', 'float32', 'float8_e5m2')

    Raises:
        Unsupported: no such type; the message lists the known ones.
    """
    short = name.removeprefix("torch.")
    found = DTYPES.get(_ALIASES.get(short, short)) or _BY_SHORT.get(short) or _BY_SAFETENSORS.get(short)
    if found is None:
        raise Unsupported(f"{name!r} is not a known dtype", hint="known: " + " ".join(sorted(DTYPES)))
    return found


def from_storage(name: str) -> DType | None:
    """The type of torch's storage class ``name``; None for ``UntypedStorage`` and unknown ones."""
    return _BY_STORAGE.get(name)


def from_safetensors(name: str) -> DType | None:
    """The type that a safetensors header calls ``name``; None for names newer than this table."""
    return _BY_SAFETENSORS.get(name)


def opaque(name: str, *, numel: int, nbytes: int) -> DType:
    """A stand-in for an unknown type ``name``, its width taken from the bytes that ``numel`` elements use.

    Raises:
        FormatError: ``nbytes`` is not a whole number of bits per element.
    """
    if numel == 0:
        return DType(name, 8, "opaque", name)
    bits, rest = divmod(nbytes * 8, numel)
    if rest or not bits:
        raise FormatError(f"unknown dtype {name!r}: {nbytes:,} bytes do not divide into {numel:,} equal elements")
    return DType(name, bits, "opaque", name)


def cast_array(values: np.ndarray[Any, Any], kind: DType) -> np.ndarray[Any, Any]:
    """``values`` rounded to another floating type; ml_dtypes has no direct way between some of its own."""
    try:
        return values.astype(kind.as_numpy())
    except TypeError:
        return values.astype("f4").astype(kind.as_numpy())  # float32 has every value of a narrower type


@cache
def _numpy_dtype(row: DType) -> np.dtype[Any]:
    import numpy as np

    if row.numpy is None:
        return np.dtype(f"V{row.itemsize}")
    try:
        found: np.dtype[Any] = np.dtype(row.numpy)
    except TypeError:
        import ml_dtypes

        found = np.dtype(getattr(ml_dtypes, row.numpy))
    return found
