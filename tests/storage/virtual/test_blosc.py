"""Blosc's container, as c-blosc 1.21 wrote it (numcodecs 0.16.6), and the other codecs of numcodecs."""

from __future__ import annotations

import base64
import bz2
import io
import lzma
import struct

import numpy as np
import pyarrow as pa
import pytest

from ckpt_tool.errors import FormatError, Unsupported
from ckpt_tool.storage.virtual.blosc import bit_unshuffled, blosc_blocks
from ckpt_tool.storage.virtual.blosclz import unpacked_blosclz
from ckpt_tool.storage.virtual.codecs import content_blocks

DATA = ((np.arange(600, dtype="<i4") // 40) * 1000).tobytes()
# Blosc(codec, 9, shuffle, blocksize=1024).encode(DATA): two whole blocks in a stream for each byte, and a rest in one.
CONTAINERS = {
    ("lz4", 0): (
        "AgEgBGAJAABgCQAArQAAABQAAAAdAAAAHwABAIwv6AMEAIsv0AcEAIsvuAsEAF5QALgLAAAmAAAAT7gLAAAEABEvoA8EAIsviBMEAIsv"
        "cBcEAIsvWBsEADZQAFgbAAAmAAAAT1gbAAAEADkvQB8EAIsvKCMEAIsvECcEAIsv+CoEAA5QAPgqAAAgAAAAT/gqAAAEAGEv4C4EAIsv"
        "yDIEAIsvsDYEAIZQALA2AAA="
    ),
    ("lz4", 1): (
        "AgEhBGAJAABgCQAA4AAAABQAAABRAAAAHwABABQf6AEAFB/QAQAUH7gBABQfoAEAFB+IAQAUH3ABABQfWAEAFB9AAQAUHygBABQfEAEA"
        "FB/4AQAUH+ABABQfyAEAFB+wAQAPULCwsLCwUQAAAB8AAQAUHwMBABQfBwEAFB8LAQAUHw8BABQfEwEAFB8XAQAUHxsBABQfHwEAFB8j"
        "AQAUHycBABQfKgEAFB8uAQAUHzIBABQfNgEAD1A2NjY2Ng0AAAAfAAEA//9BUAAAAAAADQAAAB8AAQD//0FQAAAAAAA="
    ),
    ("lz4", 2): (
        "AgEkBGAJAABgCQAA/gAAABQAAABgAAAAHwABANIQ/wEAAeoAAAkADwoAJQYCAAFGAAECAA8UACQBNwAGQQABCgABAgALGQABAgALGQAB"
        "AgAPGQALBgIAAS0ABgIADxkAHwYCAAY8AAsCAAYjAKD/////////////YAAAABAAAQAf/wEAHgA2AA8CAAIPSgAeDwIAAgZbAAEfAAEP"
        "AA8KACkGAgABRgABAgAPFAAfDwIABgFQAAsCAA8tAAEGIwAPHgABDwIABgY3AA8CAAEPNwAGDwIAZVAAAAAAAA0AAAAfAAEA//9BUAAA"
        "AAAADQAAAB8AAQD//0FQAAAAAAA="
    ),
    ("zlib", 1): (
        "AgFhBGAJAABgCQAAqwAAABQAAAA1AAAAeNpjYCAOvCASXCAS7CASLCASdBAJCogEEUQCByKBBpFAgEjwg0jwgEhwgkiwgUgAAN3bRlA0"
        "AAAAeNpjYCAOMBMJ2IkE3EQCfiKBMJFAnEggTSSQJxIoEwnUiQRaRAI9IoERkcCMSAAAHYE+0Q8AAAB42mNgGAWjgPoAAAJYAAEPAAAA"
        "eNpjYBgFo4D6AAACWAAB"
    ),
    ("zstd", 1): (
        "AgGRBGAJAAAABAAAowAAAHUAAAAcAAAAUAAAADAAAAAotS/9YAADNQEAgHBYQCgQ+OAXGx8jJyouAAAPkBD4BgD7aqNUKpXKdaNUKpXK"
        "mgYhAAAAKLUv/WBgAL0AAEDgyLAuMjYAAAeQEOAHACtKqbiUilsDKgAAACi1L/1gAAMFAQB4AOjQuKCIcAADBwsPExcAD1gBABB+S/y/"
        "vXf8IRqiBw=="
    ),
    ("zstd", 2): (
        "AgGUBGAJAAAABAAA1AAAABwAAABdAAAApgAAAD0AAAAotS/9YAADnQEAcoECBuAPAGBMCsYBvg+AQG2L1Vzw6s1yCpZGGxxoAixxsCHM"
        "XaVLP8XN2UVqthaakAIdRQAAACi1L/1gAAPdAQCYAP///////wD/AP8AAAD//wD/ABKg4HYe8GomVAc8VHo1f6QE2h0OYpukROibJhp/"
        "hrjyncxc4J/mDyoAAAAotS/9YGAABQEAUgIDBuAPAGBMCgIg8MEvBgBCQImXTkopBoR+JqIjYAM="
    ),
    ("blosclz", 1): (
        "AgEBBGAJAABgCQAAAAEAABQAAABgAAAAIwAAAADgGgMBAOjgHQAB6NDgHQAB0LjgHQABuKDgHQABoIjgHQABiHDgHQABcFjgHQABWEDg"
        "HQABQCjgHQABKBDgHQABEPjgHQAB+ODgHQAB4MjgHQAByLDgGwACsLCwYAAAACMAAAAA4BoDAQAD4B0AAQMH4B0AAQcL4B0AAQsP4B0A"
        "AQ8T4B0AARMX4B0AARcb4B0AARsf4B0AAR8j4B0AASMn4B0AAScq4B0AASou4B0AAS4y4B0AATI24BsAAjY2Ng4AAAAjAAAAAOD//0oD"
        "AgAAAA4AAAAjAAAAAOD//0oDAgAAAA=="
    ),
}


def container(codec: str = "lz4", shuffle: int = 1) -> bytearray:
    """One that may be changed."""
    return bytearray(base64.b64decode(CONTAINERS[codec, shuffle]))


def unpacked(content: bytes | bytearray) -> bytes:
    """What a container holds."""
    return b"".join(content_blocks(io.BytesIO(bytes(content)), "blosc", "here"))


@pytest.mark.parametrize(("codec", "shuffle"), CONTAINERS)
def test_containers_of_c_blosc(codec: str, shuffle: int) -> None:
    """Not shuffled, shuffled by bytes and by bits, in one stream for a block and in several."""
    assert unpacked(container(codec, shuffle)) == DATA


def test_stored_as_it_is() -> None:
    """Bytes that do not compress stand behind the header."""
    header = struct.pack("<BBBBiii", 2, 1, 2 | 1 << 5 | 1, 4, len(DATA), 1024, 16 + len(DATA))
    assert unpacked(header + DATA) == DATA
    with pytest.raises(FormatError, match="stored in a Blosc container"):
        unpacked(header[:4] + struct.pack("<iii", len(DATA), 1024, 16 + 9) + DATA[:9])


def test_what_is_empty() -> None:
    """A header alone."""
    assert unpacked(struct.pack("<BBBBiii", 2, 1, 1 << 5, 4, 0, 0, 16)) == b""


def test_bits_are_shuffled_in_groups_of_eight() -> None:
    """A rest of elements that is no full group is left as it is, as c-blosc does."""
    assert bit_unshuffled(b"abc", 1) == b"abc"
    assert bit_unshuffled(bytes([255, 0, 0, 0, 0, 0, 0, 0, 7]), 1) == bytes([255, 0, 0, 0, 0, 0, 0, 0, 7])
    assert bit_unshuffled(bytes([255, 0, 0, 0, 0, 0, 0, 0]), 1) == b"\x01" * 8


def test_matches_of_its_own_compression() -> None:
    """Near ones, those that reach into themselves, long ones, and those beyond 8,191 bytes."""
    noise = np.random.default_rng(0).integers(0, 256, 9000, dtype=np.uint8).tobytes()
    literals = b"".join(bytes([len(part) - 1]) + part for part in (noise[i : i + 32] for i in range(0, 9000, 32)))
    far = bytes([1 << 5 | 31, 255, *divmod(9000 - 8192, 256)])
    assert unpacked_blosclz(literals + far + b"\x00x", 9004, "here") == noise + noise[:3] + b"x"
    assert unpacked_blosclz(b"\x02abc" + bytes([1 << 5, 2]), 6, "here") == b"abcabc"
    assert unpacked_blosclz(b"\x01ab" + bytes([7 << 5, 255, 4, 1]), 2 + 268, "here") == b"ab" * 135


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (b"", "breaks off"),
        (b"\x05ab", "breaks off"),
        (b"\x00a" + bytes([1 << 5]), "breaks off"),
        (b"\x00a" + bytes([7 << 5, 255]), "breaks off"),
        (b"\x00a" + bytes([1 << 5, 1]), "points nowhere behind 1 of 4"),
        (b"\x00a" + bytes([7 << 5, 9, 0]), "points nowhere"),
        (b"\x07abcdefgh", "points nowhere"),
        (b"\x01ab", "holds 2 bytes, expected 4"),
    ],
)
def test_damaged_streams_of_its_own_compression(stream: bytes, message: str) -> None:
    """Cut short, matches before the beginning, more or fewer bytes than there are to be."""
    with pytest.raises(FormatError, match=message):
        unpacked_blosclz(stream, 4, "here")


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (0, b"\x05", "format version 5"),
        (2, b"\xff", "codec 7"),
        (3, b"\x00", "a Blosc header of"),
        (4, b"\xff\xff\xff\xff", "a Blosc header of -1 bytes"),
        (4, b"\xff\xff\xff\x7f", "ends within its index"),
        (8, b"\x00\x00\x00\x00", "in blocks of 0"),
        (12, b"\x00\x00\x00\x00", "0 coded"),
        (16, b"\xff\xff\xff\x7f", "a block of a Blosc container lies at"),
        (16, b"\x00\x00\x00\x00", "a block of a Blosc container lies at"),
        (32, b"\xff" * 12, "not a block of lz4_raw|holds|expected"),
    ],
)
def test_damage(at: int, value: bytes, message: str) -> None:
    """One clear error for each number that lies."""
    content = container()
    content[at : at + len(value)] = value
    with pytest.raises((FormatError, Unsupported), match=message):
        unpacked(content)


def test_every_cut_is_noticed() -> None:
    """A container that ends early is an error of this package, wherever it ends."""
    content = bytes(container("zstd", 1))
    for end in range(len(content)):
        with pytest.raises(FormatError):
            b"".join(blosc_blocks(content[:end], "here"))


def lz4(data: bytes) -> bytes:
    """As numcodecs frames a block of LZ4."""
    return struct.pack("<I", len(data)) + bytes(pa.Codec("lz4_raw").compress(data, asbytes=True))


ENCODERS = {"lz4": lz4, "bz2": bz2.compress, "xz": lzma.compress}


@pytest.mark.parametrize("codec", ENCODERS)
def test_other_streams(codec: str) -> None:
    """They come back; what ends early, or goes on behind the end, is an error."""
    coded = ENCODERS[codec](DATA)
    assert b"".join(content_blocks(io.BytesIO(coded), codec, "here")) == DATA
    for damaged in (coded[:-3], coded + b"x", b"", b"\xff" * 40):
        with pytest.raises(FormatError, match="here"):
            b"".join(content_blocks(io.BytesIO(damaged), codec, "here"))


def test_several_steps() -> None:
    """Bytes that were shuffled, then packed."""
    shuffled = np.frombuffer(DATA, np.uint8).reshape(-1, 4).T.tobytes()
    assert b"".join(content_blocks(io.BytesIO(lz4(shuffled)), "lz4|shuffle:4", "here")) == DATA
