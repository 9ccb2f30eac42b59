"""CRC-32 of byte ranges, and of ranges put together; CRC-32C. Knows nothing of files.

The polynomial of CRC-32 is the one of zlib, zip and gzip, that of CRC-32C Castagnoli's (RFC 3720). ``isal`` (several
times as fast as zlib) is used for the former where it is importable; machines without a wheel of it fall back to zlib.
"""

from __future__ import annotations

import struct
import zlib
from functools import cache, lru_cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from typing_extensions import Buffer

__all__ = ["crc32", "crc32_combine", "crc32c", "crc32s"]

_POLYNOMIAL = 0xEDB88320  # x^32 + ... in reflected order, the highest power is implied
_CASTAGNOLI = 0x82F63B78
_SHORT_BYTES = 2048
_X0 = 1 << 31  # the polynomial 1 in reflected order


def crc32(data: Buffer, value: int = 0) -> int:
    """The CRC-32 of ``data``, continued from ``value``, the CRC of the bytes before it.

    >>> crc32(b"world", crc32(b"hello ")) == crc32(b"hello world")
    True
    """
    if memoryview(data).nbytes <= _SHORT_BYTES:
        return zlib.crc32(data, value)  # of heads and records alone, who looks at metadata need not import isal
    return _implementation()(data, value)


def crc32s(data: memoryview, nbytes: int) -> list[int]:
    """The CRC-32 of each run of ``nbytes`` bytes, one behind another: a tenth of a microsecond each, and their bytes.

    >>> crc32s(memoryview(b"hello world!"), 6) == [crc32(b"hello "), crc32(b"world!")]
    True
    """
    checksum = _implementation()
    return [checksum(run, 0) for (run,) in struct.iter_unpack(f"{nbytes}s", data)] if nbytes else []


def crc32_combine(first: int, second: int, second_nbytes: int) -> int:
    """The CRC-32 of two byte strings joined, from the CRC of each and the length of the second.

    Law: ``crc32_combine(crc32(a), crc32(b), len(b)) == crc32(a + b)``. Without ``isal`` about 3 microseconds
    once a length was seen.

    >>> crc32_combine(crc32(b"hello "), crc32(b"world"), 5) == crc32(b"hello world")
    True
    """
    if second_nbytes < 0:
        raise ValueError(f"second_nbytes is a length, expected 0 or more, got {second_nbytes:,}")
    return _combiner()(first, second, second_nbytes)


def crc32c(data: bytes) -> int:
    """The CRC-32C (Castagnoli) of ``data``: some 100 MB/s, from rows of equal length that are taken side by side.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    crc = 0xFFFFFFFF
    done = 0
    if len(data) >= _SHORT_BYTES:
        lane_nbytes = 1 << (len(data).bit_length() // 2)
        done = len(data) // lane_nbytes * lane_nbytes
        crc = _lanes_crc32c(data[:done], lane_nbytes) ^ 0xFFFFFFFF
    entries = _table(_CASTAGNOLI)
    for byte in data[done:]:
        crc = entries[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _lanes_crc32c(data: bytes, lane_nbytes: int) -> int:
    """The CRC-32C of a whole number of lanes."""
    import numpy as np

    table = np.array(_table(_CASTAGNOLI), dtype=np.uint32)
    lanes = np.ascontiguousarray(np.frombuffer(data, dtype=np.uint8).reshape(-1, lane_nbytes).T)
    value = np.full(lanes.shape[1], 0xFFFFFFFF, dtype=np.uint32)
    for column in lanes:
        value = table[(value ^ column) & 0xFF] ^ (value >> np.uint32(8))
    crc, power = 0, _lane_power(lane_nbytes)
    for lane in (value ^ np.uint32(0xFFFFFFFF)).tolist():
        crc = _multiply(power, crc, _CASTAGNOLI) ^ lane
    return crc


@cache
def _table(polynomial: int) -> tuple[int, ...]:
    """What each byte adds to a CRC."""
    entries = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (polynomial if value & 1 else 0)
        entries.append(value)
    return tuple(entries)


@cache
def _lane_power(nbytes: int) -> int:
    """The polynomial x to the power of so many bytes' bits, for CRC-32C."""
    power, base, exponent = _X0, _X0 >> 1, 8 * nbytes
    while exponent:
        if exponent & 1:
            power = _multiply(power, base, _CASTAGNOLI)
        base = _multiply(base, base, _CASTAGNOLI)
        exponent >>= 1
    return power


@cache
def _implementation() -> Callable[[Buffer, int], int]:
    function: Callable[[Buffer, int], int] = getattr(_isal(), "crc32", zlib.crc32)
    return function


@cache
def _combiner() -> Callable[[int, int, int], int]:
    function: Callable[[int, int, int], int] = getattr(_isal(), "crc32_combine", _combined)
    return function


def _isal() -> ModuleType | None:
    try:
        return import_module("isal.isal_zlib")
    except ImportError:
        return None


def _combined(first: int, second: int, second_nbytes: int) -> int:
    return _multiply(_power_of_x8(second_nbytes), first) ^ second


def _multiply(left: int, right: int, modulus: int = _POLYNOMIAL) -> int:
    """The product of two polynomials modulo a CRC polynomial, all in reflected bit order."""
    product = 0
    bit = _X0
    while left:
        if left & bit:
            product ^= right
            left ^= bit
        bit >>= 1
        right = (right >> 1) ^ modulus if right & 1 else right >> 1
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
