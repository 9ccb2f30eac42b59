"""CRC-32 of byte ranges, and of ranges put together. Knows nothing of files.

The polynomial is the one of zlib, zip and gzip. ``isal`` (some ten times faster than many builds of zlib) is used where
it is importable; the machines without a wheel of it fall back to zlib.
"""

from __future__ import annotations

import zlib
from functools import cache, lru_cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Buffer

__all__ = ["crc32", "crc32_combine"]

_POLYNOMIAL = 0xEDB88320  # x^32 + ... in reflected order, the highest power is implied
_X0 = 1 << 31  # the polynomial 1 in reflected order


def crc32(data: Buffer, value: int = 0) -> int:
    """The CRC-32 of ``data``, continued from ``value``, the CRC of the bytes before it.

    >>> crc32(b"world", crc32(b"hello ")) == crc32(b"hello world")
    True
    """
    return _implementation()(data, value)


def crc32_combine(first: int, second: int, second_nbytes: int) -> int:
    """The CRC-32 of two byte strings joined, from the CRC of each and the length of the second.

    Law: ``crc32_combine(crc32(a), crc32(b), len(b)) == crc32(a + b)``. About 3 microseconds once a length was seen.

    >>> crc32_combine(crc32(b"hello "), crc32(b"world"), 5) == crc32(b"hello world")
    True
    """
    if second_nbytes < 0:
        raise ValueError(f"second_nbytes is a length, expected 0 or more, got {second_nbytes:,}")
    return _multiply(_power_of_x8(second_nbytes), first) ^ second


@lru_cache(maxsize=1)
def _implementation() -> Callable[[Buffer, int], int]:
    try:
        module = import_module("isal.isal_zlib")
    except ImportError:
        return zlib.crc32
    function: Callable[[Buffer, int], int] = module.crc32
    return function


def _multiply(left: int, right: int) -> int:
    """The product of two polynomials modulo the CRC polynomial, all in reflected bit order."""
    product = 0
    bit = _X0
    while left:
        if left & bit:
            product ^= right
            left ^= bit
        bit >>= 1
        right = (right >> 1) ^ _POLYNOMIAL if right & 1 else right >> 1
    return product


@cache
def _square(exponent: int) -> int:
    """The polynomial x, squared ``exponent`` times."""
    if exponent == 0:
        return _X0 >> 1
    root = _square(exponent - 1)
    return _multiply(root, root)


@lru_cache(maxsize=4096)
def _power_of_x8(nbytes: int) -> int:
    """The polynomial x to the power of ``8 * nbytes``: what ``nbytes`` zero bytes do to a CRC."""
    power = _X0
    exponent = 3
    while nbytes:
        if nbytes & 1:
            power = _multiply(_square(exponent), power)
        nbytes >>= 1
        exponent += 1
    return power
