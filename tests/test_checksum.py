"""CRC-32 of parts and of the whole."""

from __future__ import annotations

import sys
import zlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ckpt_tool import checksum
from ckpt_tool.checksum import crc32, crc32_combine, crc32c


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_the_checksum_of_parts_combines_to_that_of_the_whole(first: bytes, second: bytes) -> None:
    """crc32_combine(crc32(a), crc32(b), len(b)) == crc32(a + b)."""
    assert crc32_combine(crc32(first), crc32(second), len(second)) == zlib.crc32(first + second)
    assert crc32(second, crc32(first)) == zlib.crc32(first + second)


@given(st.lists(st.binary(max_size=20), max_size=8))
def test_combining_is_associative(parts: list[bytes]) -> None:
    """From the left or from the right, the whole is the same."""
    left, nbytes = 0, 0
    for part in parts:
        left = crc32_combine(left, crc32(part), len(part))
        nbytes += len(part)
    right, behind = 0, 0
    for part in reversed(parts):
        right = crc32_combine(crc32(part), right, behind)
        behind += len(part)
    assert (left, right, behind) == (zlib.crc32(b"".join(parts)), left, nbytes)


def test_lengths_beyond_memory_combine() -> None:
    """Five GiB of zeros, without having them: squaring one MiB's operator."""
    block = bytes(1 << 20)
    expected = 0
    for _ in range(64):
        expected = zlib.crc32(block, expected)
    whole = crc32_combine(0x12345678, 0, 5 << 30)
    step = 0x12345678
    for _ in range(80):
        step = crc32_combine(step, 0, 64 << 20)
    assert (crc32_combine(crc32(block), crc32(bytes(63 << 20)), 63 << 20), whole) == (expected, step)


def test_without_isal_checksums_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines without a wheel of it take zlib, and combine in Python."""
    parts = [bytes(range(1 + number)) * 7 for number in (0, 3, 200)]
    found = []
    for is_hidden in (False, True):
        if is_hidden:
            monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
        for function in (checksum._implementation, checksum._combiner):
            function.cache_clear()
        value = 0
        for part in parts:
            value = crc32_combine(value, crc32(part), len(part))
        found.append(value)
    assert found == [zlib.crc32(b"".join(parts))] * 2
    for function in (checksum._implementation, checksum._combiner):
        function.cache_clear()


def test_a_negative_length_is_refused() -> None:
    """It is a length."""
    with pytest.raises(ValueError, match="expected 0 or more, got -1"):
        crc32_combine(1, 2, -1)


@given(st.binary(max_size=300))
@example(bytes(range(256)) * 33)
def test_castagnoli(data: bytes) -> None:
    """CRC-32C bit by bit, as its polynomial says; long data goes in lanes."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    assert crc32c(data) == crc ^ 0xFFFFFFFF


@pytest.mark.parametrize("nbytes", [2047, 2048, 2049, 65_537, 1_000_001])
def test_lanes_join(nbytes: int) -> None:
    """Whatever is left of a whole number of lanes."""
    data = bytes(range(251)) * (nbytes // 251 + 1)
    assert crc32c(data[:nbytes]) == _slow(data[:nbytes])


def _slow(data: bytes) -> int:
    """Without lanes: by a table."""
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    crc = 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 255] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF
