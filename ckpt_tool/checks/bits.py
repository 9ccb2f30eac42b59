"""Which bit patterns of an element type are no numbers, and a scan that finds them at the speed of memory.

Unsigned and signed maxima of the raw bits decide: for IEEE-like types infinities and NaN are the largest patterns of
each sign. So a block without any costs two reductions and no temporary array. Knows no file.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt_tool.dtypes import DType
from ckpt_tool.records import dataclass

__all__ = ["BitPatterns", "NonFinite", "bit_patterns", "scan_non_finite"]


@dataclass(frozen=True, slots=True)
class BitPatterns:
    """How a type spells what is not finite, per component of ``nbytes`` bytes."""

    nbytes: int
    infinity: int
    """Pattern of positive infinity; every larger positive one is NaN. Beyond the NaN where there is no infinity."""
    smallest: int
    """The smallest positive pattern that is not finite."""
    only: int | None = None
    """The one pattern that is NaN, for types without a sign or with a single NaN."""


@dataclass(frozen=True, slots=True)
class NonFinite:
    """What a scan found; positions count components from the start of the block."""

    nan: npt.NDArray[np.int64]
    inf: npt.NDArray[np.int64]


# Widths and exponents by IEEE 754; float8 by the OCP 8-bit floating point specification 1.0 and ml_dtypes.
_PATTERNS = {
    "float64": BitPatterns(8, 0x7FF0_0000_0000_0000, 0x7FF0_0000_0000_0000),
    "float32": BitPatterns(4, 0x7F80_0000, 0x7F80_0000),
    "float16": BitPatterns(2, 0x7C00, 0x7C00),
    "bfloat16": BitPatterns(2, 0x7F80, 0x7F80),
    "float8_e5m2": BitPatterns(1, 0x7C, 0x7C),
    "float8_e4m3fn": BitPatterns(1, -1, 0x7F),
    "float8_e4m3fnuz": BitPatterns(1, -1, 0, only=0x80),
    "float8_e5m2fnuz": BitPatterns(1, -1, 0, only=0x80),
    "float8_e8m0fnu": BitPatterns(1, -1, 0, only=0xFF),
    "complex32": BitPatterns(2, 0x7C00, 0x7C00),
    "complex64": BitPatterns(4, 0x7F80_0000, 0x7F80_0000),
    "complex128": BitPatterns(8, 0x7FF0_0000_0000_0000, 0x7FF0_0000_0000_0000),
}


def bit_patterns(dtype: DType) -> BitPatterns | None:
    """Patterns of a type's components; None for types that have nothing but numbers, or are only bytes."""
    return _PATTERNS.get(dtype.name)


def scan_non_finite(bits: npt.NDArray[Any], patterns: BitPatterns, maxima: npt.NDArray[Any]) -> NonFinite | None:
    """Where NaN and infinities are in native ``bits`` (unsigned, one per component); None when there are none.

    ``maxima`` are such that their largest is the largest of ``bits``, which may be these themselves.

    >>> from ckpt_tool.dtypes import dtype
    >>> bits = np.array([1, 2, np.nan], "f4").view("u4")
    >>> found = scan_non_finite(bits, bit_patterns(dtype("float32")), bits)
    >>> found.nan.tolist(), found.inf.tolist()
    ([2], [])
    """
    if not bits.size:
        return None
    if patterns.only is not None:
        nan = np.flatnonzero(bits == patterns.only)
        return NonFinite(nan, nan[:0]) if len(nan) else None
    sign = 1 << (8 * patterns.nbytes - 1)
    signed = bits.view(f"i{patterns.nbytes}")
    if int(maxima.max()) < sign + patterns.smallest and int(signed.max()) < patterns.smallest:
        return None
    magnitude = bits & np.array(sign - 1, dtype=bits.dtype)
    wrong = np.flatnonzero(magnitude >= patterns.smallest)
    if patterns.infinity < 0:
        return NonFinite(wrong, wrong[:0])
    is_inf = magnitude[wrong] == patterns.infinity
    return NonFinite(wrong[~is_inf], wrong[is_inf])
