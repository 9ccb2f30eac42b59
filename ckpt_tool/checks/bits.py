"""Which bit patterns of an element type are no numbers, and a scan that finds them at the speed of memory.

One reduction is enough for most blocks. What is not finite has the highest bit of the exponent set, as no number below
2 has: the bitwise or of all tells. Of larger numbers the sum of squares is finite if they are. Only then unsigned and
signed maxima decide: for IEEE-like types infinities and NaN are the largest patterns of each sign. Elements may lie on
any byte, as those of a mapped file do. Knows no file.
"""

from __future__ import annotations

import sys
from functools import cached_property
from math import isfinite
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt_tool.dtypes import DType
from ckpt_tool.records import dataclass

__all__ = ["BitPatterns", "NonFinite", "bit_patterns", "hold_numbers", "scan_non_finite", "union"]

_N_HEAD = 64
"""Elements that are looked at first, without numpy, whose loops take longer to begin."""


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

    @cached_property
    def telltales(self) -> int:
        """That bit of each of the first elements of a block, laid end to end."""
        return sum(self.telltale << (8 * self.nbytes * number) for number in range(_N_HEAD))


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


def hold_numbers(bits: npt.NDArray[Any], patterns: BitPatterns) -> bool:
    """Whether native ``bits`` are numbers all, as far as one look can tell: never where anything else is there.

    >>> from ckpt_tool.dtypes import dtype
    >>> patterns = bit_patterns(dtype("float32"))
    >>> bits = [np.array(values, "f4").view("u4") for values in ([0.5, -1.9], [0.5, 2.0], [0.5, np.nan])]
    >>> [hold_numbers(each, patterns) for each in bits]
    [True, True, False]
    """
    head = int.from_bytes(bits[:_N_HEAD].tobytes(), sys.byteorder)
    if not head & patterns.telltales and not union(bits) & patterns.telltale:
        return True
    if patterns.nbytes < 4:
        return False
    values = bits.view(f"f{patterns.nbytes}")
    return isfinite(np.vdot(values, values))  # neither warns of what is not finite nor minds where elements lie


def union(bits: npt.NDArray[Any]) -> int:
    """The bitwise or of all ``bits``, in words of 8 bytes where elements do not lie on multiples of their size.

    >>> hex(union(np.array([0x0100, 0x0030], dtype="u2")))
    '0x130'
    """
    if bits.flags.aligned or len(bits) < _N_HEAD:
        return int(np.bitwise_or.reduce(bits))
    width, raw = bits.itemsize, bits.view(np.uint8)
    skipped = -raw.__array_interface__["data"][0] % 8
    n_words = (len(raw) - skipped) // 8
    words = int(np.bitwise_or.reduce(raw[skipped : skipped + 8 * n_words].view(np.uint64)))
    folded = [0] * width
    for at, byte in enumerate(words.to_bytes(8, sys.byteorder)):
        folded[(skipped + at) % width] |= byte
    ends = np.bitwise_or.reduce(bits[:8]) | np.bitwise_or.reduce(bits[-8:])
    return int.from_bytes(bytes(folded), sys.byteorder) | int(ends)


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
