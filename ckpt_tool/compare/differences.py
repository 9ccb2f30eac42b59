"""A tally counts and measures how the elements of two equally shaped arrays differ: by bits first, then by value.

Arrays are those of one tile, as raw bits; what they amount to is merged per tensor. Knows no file and no name.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt_tool.dtypes import DType, cast_array
from ckpt_tool.records import dataclass

__all__ = ["First", "Tally", "element_values", "same_bits", "tally", "ulp_distances"]

_BLOCK = 1 << 13
"""Elements looked at together where bits differ; larger temporaries would each be mapped and unmapped by the system."""


@dataclass(frozen=True, slots=True)
class First:
    """The first element that differs."""

    position: int
    """Row-major, in the compared array."""
    a: str
    """The value as text, as exact as its type."""
    b: str


@dataclass(slots=True)
class Tally:
    """How two arrays differ."""

    n_compared: int = 0
    n_differing: int = 0
    """Elements of other bits, without those that are NaN on both sides."""
    n_nan_payload: int = 0
    """Elements that are NaN on both sides, of other bits."""
    n_non_finite: int = 0
    """Differing elements that are NaN or infinite on a side; the measures below leave them out."""
    n_signed_zero: int = 0
    """Differing elements that are zero on both sides."""
    n_uncast: int = 0
    """Where the types differ: elements of the narrower type that are not what rounding the wider one gives."""
    max_abs: float | None = 0.0
    """None for types that are only bytes, whose elements have no distance."""
    max_rel: float | None = 0.0
    """Largest difference relative to the larger magnitude of the two, 0 to 2; None as above."""
    max_ulp: int | None = None
    """Largest number of representable steps between two values; None for types without, or of two types."""

    @property
    def is_same(self) -> bool:
        """Whether no bit differs."""
        return not self.n_differing and not self.n_nan_payload

    def add(self, other: Tally) -> None:
        """Count ``other`` in."""
        self.n_compared += other.n_compared
        self.n_differing += other.n_differing
        self.n_nan_payload += other.n_nan_payload
        self.n_non_finite += other.n_non_finite
        self.n_signed_zero += other.n_signed_zero
        self.n_uncast += other.n_uncast
        self.max_abs = _larger(self.max_abs, other.max_abs)
        self.max_rel = _larger(self.max_rel, other.max_rel)
        if other.max_ulp is not None:
            self.max_ulp = max(self.max_ulp or 0, other.max_ulp)


def _larger(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else max(one, other)


def same_bits(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    """Whether two contiguous arrays hold the same bytes."""
    one, other = a.reshape(-1).view(np.uint8), b.reshape(-1).view(np.uint8)
    if len(one) % 8 == 0:
        one, other = one.view(np.uint64), other.view(np.uint64)
    return bool(np.array_equal(one, other))


def tally(
    a: npt.NDArray[Any], b: npt.NDArray[Any], dtype_a: DType, dtype_b: DType
) -> tuple[Tally, First | None, npt.NDArray[np.bool_]]:
    """``(counts, the first element that differs, bool mask of those that do)`` of two contiguous arrays of raw bits.

    Elements of two types are compared as exact values: -0 is then 0, and NaN equals NaN.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # NaN that signal, differences larger than any number
        found, first, mask = _tally(a.reshape(-1), b.reshape(-1), dtype_a, dtype_b)
    return found, first, mask.reshape(a.shape)


def _tally(
    one: npt.NDArray[Any], other: npt.NDArray[Any], dtype_a: DType, dtype_b: DType
) -> tuple[Tally, First | None, npt.NDArray[np.bool_]]:
    found = Tally(n_compared=len(one))
    mask = np.zeros(len(one), dtype=np.bool_)
    first: First | None = None
    for start in range(0, len(one), _BLOCK):
        part_a, part_b = one[start : start + _BLOCK], other[start : start + _BLOCK]
        if dtype_a == dtype_b:
            picked = np.flatnonzero(_differs(part_a, part_b))
            if len(picked) == len(part_a):
                found.add(_measure(part_a, part_b, dtype_a))
            elif len(picked):
                found.add(_measure(part_a[picked], part_b[picked], dtype_a))
        else:
            picked = _unequal(part_a, part_b, dtype_a, dtype_b, found)
        if not len(picked):
            continue
        if len(picked) == len(part_a):
            mask[start : start + len(picked)] = True
        else:
            mask[start + picked] = True
        if first is None:
            at = int(picked[0])
            first = First(start + at, _text(part_a[at : at + 1], dtype_a), _text(part_b[at : at + 1], dtype_b))
    return found, first, mask


def element_values(bits: npt.NDArray[Any], dtype: DType) -> npt.NDArray[Any] | None:
    """Elements as numbers: floats as float64 (float32 up to 16 bits), the others in numpy's own type.

    None for types that are only bytes.
    """
    if dtype.numpy is None or dtype.kind in {"quantized", "opaque"}:
        return None
    values = bits.view(dtype.as_numpy())
    if dtype.kind == "float":
        return values.astype(np.float32 if dtype.bits <= 16 else np.float64)
    return values


def ulp_distances(a: npt.NDArray[Any], b: npt.NDArray[Any], dtype: DType) -> npt.NDArray[np.uint64] | None:
    """Representable steps between finite floats given as raw bits; None for other types.

    >>> from ckpt_tool.dtypes import dtype
    >>> x = np.array([1.0, -0.0, 1e-45], "f4").view("u4")
    >>> y = np.array([1.0000001, 0.0, -1e-45], "f4").view("u4")
    >>> ulp_distances(x, y, dtype("float32")).tolist()
    [1, 0, 2]
    """
    if dtype.kind != "float" or dtype.numpy is None:
        return None
    if dtype.name == "float8_e8m0fnu":  # no sign
        between: npt.NDArray[np.uint64] = np.subtract(np.maximum(a, b), np.minimum(a, b), dtype=np.uint64)
        return between
    if dtype.bits < 64:
        steps = _on_a_line(a, dtype.bits) - _on_a_line(b, dtype.bits)
        np.abs(steps, out=steps)
        return steps.view(np.uint64)
    sign = np.uint64(1 << 63)
    size_a, size_b = a & (sign - np.uint64(1)), b & (sign - np.uint64(1))
    apart = np.maximum(size_a, size_b) - np.minimum(size_a, size_b)
    found: npt.NDArray[np.uint64] = np.where((a ^ b) & sign != 0, size_a + size_b, apart)
    return found


def _on_a_line(bits: npt.NDArray[Any], width: int) -> npt.NDArray[np.int64]:
    """Sign and magnitude as one number: neighbours are 1 apart, both zeros are 0."""
    signed = bits.view(f"i{width // 8}")
    flips = signed >> (width - 1)  # all ones where the sign bit is set
    line: npt.NDArray[np.int64] = (((signed & ((1 << (width - 1)) - 1)) ^ flips) - flips).astype(np.int64)
    return line


def _differs(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """bool[n]: elements of other bits."""
    if a.dtype.kind == "u":
        differs: npt.NDArray[np.bool_] = a != b
        return differs
    width = a.dtype.itemsize
    rows: npt.NDArray[np.bool_] = (a.view(np.uint8).reshape(-1, width) != b.view(np.uint8).reshape(-1, width)).any(1)
    return rows


def _measure(a: npt.NDArray[Any], b: npt.NDArray[Any], dtype: DType) -> Tally:
    """The tally of elements of one type that all differ by bits."""
    found = Tally(n_differing=len(a))
    values_a, values_b = element_values(a, dtype), element_values(b, dtype)
    if values_a is None or values_b is None:
        found.max_abs = found.max_rel = None
        return found
    if dtype.kind not in {"float", "complex"}:
        _measure_integers(values_a, values_b, found)
        return found
    apart = np.abs(values_a - values_b)
    if not np.isfinite(apart.max()):  # only then can there be something that is not
        is_finite = np.isfinite(values_a) & np.isfinite(values_b)
        found.n_nan_payload = int(np.count_nonzero(np.isnan(values_a) & np.isnan(values_b)))
        found.n_differing -= found.n_nan_payload
        found.n_non_finite = int(np.count_nonzero(~is_finite)) - found.n_nan_payload
        a, b, values_a, values_b = a[is_finite], b[is_finite], values_a[is_finite], values_b[is_finite]
        apart = _apart(values_a, values_b)
    _measure_values(values_a, values_b, apart, found)
    distances = ulp_distances(a, b, dtype)
    if distances is not None:
        found.max_ulp = int(distances.max(initial=0))
    return found


def _apart(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Distances of finite numbers; where one is larger than any number, the largest number."""
    apart: npt.NDArray[Any] = np.abs(a - b)
    largest = np.finfo(apart.dtype).max
    apart[~np.isfinite(apart)] = largest
    return apart


def _measure_values(a: npt.NDArray[Any], b: npt.NDArray[Any], apart: npt.NDArray[Any], found: Tally) -> None:
    """Largest differences of finite numbers."""
    if not len(a):
        return
    found.max_abs = float(apart.max())
    size = np.maximum(np.abs(a), np.abs(b))
    if size.min() == 0:
        found.n_signed_zero = int(np.count_nonzero(size == 0))
        apart, size = apart[size > 0], size[size > 0]
    found.max_rel = float((apart / size).max(initial=0))


def _measure_integers(a: npt.NDArray[Any], b: npt.NDArray[Any], found: Tally) -> None:
    """Largest differences of integers and booleans, exact before they become floats."""
    is_larger = a > b
    unsigned = f"u{max(a.dtype.itemsize, 1)}"
    one, other = a.view(unsigned), b.view(unsigned)
    apart = np.where(is_larger, one - other, other - one)
    found.max_abs = float(apart.max())
    size = np.maximum(np.abs(a.astype(np.float64)), np.abs(b.astype(np.float64)))
    found.max_rel = float(np.divide(apart, size, out=np.zeros(len(a)), where=size > 0).max())


def _unequal(
    a: npt.NDArray[Any], b: npt.NDArray[Any], dtype_a: DType, dtype_b: DType, found: Tally
) -> npt.NDArray[np.int64]:
    """Positions whose exact values differ, counted in; also counts what a cast does not explain."""
    values_a, values_b = element_values(a, dtype_a), element_values(b, dtype_b)
    if values_a is None or values_b is None:  # one of them only says how wide its elements are
        picked = np.flatnonzero(_differs(a, b)) if a.dtype.itemsize == b.dtype.itemsize else np.arange(len(a))
        found.n_differing += len(picked)
        found.n_uncast += len(picked)
        if len(picked):
            found.max_abs = found.max_rel = None
        return picked
    wide: npt.DTypeLike = np.complex128 if "c" in {values_a.dtype.kind, values_b.dtype.kind} else np.float64
    exact_a, exact_b = values_a.astype(wide), values_b.astype(wide)
    if {values_a.dtype.kind, values_b.dtype.kind} <= set("iub"):  # some of 64 bits are no float64
        differs = (_as_unsigned(values_a) != _as_unsigned(values_b)) | ((values_a < 0) != (values_b < 0))
    else:
        differs = (exact_a != exact_b) & ~(np.isnan(exact_a) & np.isnan(exact_b))
    picked = np.flatnonzero(differs)
    if len(picked):
        found.n_differing += len(picked)
        one, other = exact_a[picked], exact_b[picked]
        is_finite = np.isfinite(one) & np.isfinite(other)
        found.n_non_finite += int(np.count_nonzero(~is_finite))
        part = Tally()
        one, other = one[is_finite], other[is_finite]
        _measure_values(one, other, _apart(one, other), part)
        found.add(part)
        found.n_uncast += _uncast(a[picked], b[picked], dtype_a, dtype_b)
    return picked


def _as_unsigned(values: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Integers modulo 2**64."""
    return values.astype(np.uint64 if values.dtype.kind == "u" else np.int64).view(np.uint64)


def _uncast(a: npt.NDArray[Any], b: npt.NDArray[Any], dtype_a: DType, dtype_b: DType) -> int:
    """Elements of the narrower type that are not the rounded ones of the wider."""
    if dtype_a.bits < dtype_b.bits or (dtype_a.bits == dtype_b.bits and dtype_a.kind != "float"):
        a, b, dtype_a, dtype_b = b, a, dtype_b, dtype_a
    rounded = cast_array(a.view(dtype_a.as_numpy()), dtype_b)
    narrow = b.view(dtype_b.as_numpy())
    return int(np.count_nonzero(rounded != narrow))


def _text(element: npt.NDArray[Any], dtype: DType) -> str:
    """One element in the shortest text that is exactly it."""
    if dtype.numpy is None or dtype.kind in {"quantized", "opaque"}:
        return "0x" + element.tobytes()[::-1].hex()
    value = element.view(dtype.as_numpy())[0]
    return str(value)
