"""Which bit patterns of an element type are no numbers, and a scan that finds them at the speed of memory.

One reduction is enough for most blocks. What is not finite has the highest bit of the exponent set, as no number below
2 has: the bitwise or of all tells. Of larger numbers the sum of squares is finite if they are. Only then unsigned and
signed maxima decide: for IEEE-like types infinities and NaN are the largest patterns of each sign. Knows no file.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt_tool.dtypes import DType
from ckpt_tool.records import dataclass

__all__ = ["GRANULE", "BitPatterns", "NonFinite", "bit_patterns", "granules", "hold_numbers", "scan_non_finite"]

GRANULE = 1024
_HEAD = 256
"""Elements that are looked at first; of 500 and more numpy would let other threads in, and wait for its turn again."""


@dataclass(frozen=True)
class BitPatterns:
    """How a type spells what is not finite, per component of ``nbytes`` bytes."""

    nbytes: int
    infinity: int
    """Pattern of positive infinity; every larger positive one is NaN. Beyond the NaN where there is no infinity."""
    smallest: int
    """The smallest positive pattern that is not finite."""
    only: int | None = None
    """The one pattern that is NaN, for types without a sign or with a single NaN."""

    @cached_property
    def telltale(self) -> int:
        """A bit that is set in every pattern that is not finite."""
        return 1 << ((self.smallest if self.only is None else self.only).bit_length() - 1)


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


def granules(bits: npt.NDArray[Any], patterns: BitPatterns | None) -> npt.NDArray[Any]:
    """A number for each 1,024 ``bits``, the last of fewer: 0 for zeros, and for little else.

    It is the bitwise or; where the first ones are large floats of 4 or 8 bytes, the sum of squares.

    Args:
        bits: native and unsigned.
        patterns: those of the type; None where all are numbers.
    """
    if patterns is not None and patterns.nbytes >= 4 and not _are_small(bits[:_HEAD], patterns):
        return _reduced(bits, _squares)
    return _reduced(bits, _union)


def _reduced(bits: npt.NDArray[Any], reduction: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]) -> npt.NDArray[Any]:
    n_whole = len(bits) // GRANULE * GRANULE
    found = reduction(bits[:n_whole].reshape(-1, GRANULE))
    return found if n_whole == len(bits) else np.append(found, reduction(bits[n_whole:]))


def _union(bits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    found: npt.NDArray[Any] = np.bitwise_or.reduce(bits, axis=-1)
    return found


def _squares(bits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    values = bits.view(f"f{bits.itemsize}")
    with np.errstate(all="ignore"):
        found: npt.NDArray[Any] = np.matmul(values[..., None, :], values[..., :, None])[..., 0, 0]
    return found


def _are_small(bits: npt.NDArray[Any], patterns: BitPatterns) -> bool:
    return not int(np.bitwise_or.reduce(bits)) & patterns.telltale


def hold_numbers(bits: npt.NDArray[Any], reduced: npt.NDArray[Any], patterns: BitPatterns) -> bool:
    """Whether ``bits`` are numbers all, as far as can be told with little effort: never where anything else is there.

    ``reduced`` are their `granules`.

    >>> from ckpt_tool.dtypes import dtype
    >>> patterns = bit_patterns(dtype("float32"))
    >>> bits = [np.array(values, "f4").view("u4") for values in ([0.5, -1.9], [0.5, 2.0], [0.5, np.nan])]
    >>> [hold_numbers(each, granules(each, patterns), patterns) for each in bits]
    [True, True, False]
    """
    if reduced.dtype.kind == "u":
        if _are_small(reduced, patterns):
            return True
        if patterns.nbytes < 4:
            return False
        reduced = _reduced(bits, _squares)
    return bool(np.isfinite(reduced).all())


def scan_non_finite(bits: npt.NDArray[Any], patterns: BitPatterns) -> NonFinite | None:
    """Where NaN and infinities are in native ``bits`` (unsigned, one per component); None when there are none.

    >>> from ckpt_tool.dtypes import dtype
    >>> bits = np.array([1, 2, np.nan], "f4").view("u4")
    >>> found = scan_non_finite(bits, bit_patterns(dtype("float32")))
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
    if int(bits.max()) < sign + patterns.smallest and int(signed.max()) < patterns.smallest:
        return None
    magnitude = bits & np.array(sign - 1, dtype=bits.dtype)
    wrong = np.flatnonzero(magnitude >= patterns.smallest)
    if patterns.infinity < 0:
        return NonFinite(wrong, wrong[:0])
    is_inf = magnitude[wrong] == patterns.infinity
    return NonFinite(wrong[~is_inf], wrong[is_inf])
