"""Changes to a file's bytes or its name, functions of a random generator: what disks, copies and attackers do."""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Callable

__all__ = ["MUTATORS", "mutated", "renamed"]

_INTERESTING = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, (1 << 63) - 1, (1 << 64) - 1)
_COUNTS = ("0", "7", "000001", "65535", "2147483647", "999999999999", str(1 << 64), "9" * 60)
_WORDS = (
    b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"PK\x06\x06", b"cos\nsystem\n", b"c__builtin__\neval\n", b"R.",
    b"\x81", b"data_offsets", b'"shape":[', b"-1", b"NaN", b"1e999", b"..\\/", b"/etc/passwd", b"\x8a\xff",
    b"\x8b\xff\xff\xff\x7f", b"\x00" * 64, b"[" * 200, b"(" * 200, b"2" * 64, b"]", b"}", b"\xf0\x9f\x92\xa9",
)  # fmt: skip


def _flip_bits(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 1, 4, 32))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def _head(data: bytearray, rng: random.Random) -> None:
    """Where formats keep what they say about the rest."""
    data[rng.randrange(min(len(data), 256))] = rng.randrange(256)


def _tail(data: bytearray, rng: random.Random) -> None:
    data[-1 - rng.randrange(min(len(data), 256))] = rng.randrange(256)


def _truncate(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def _extend(data: bytearray, rng: random.Random) -> None:
    data += rng.randbytes(rng.randrange(1, 200))


def _zero(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    stop = min(start + rng.randrange(1, 4096), len(data))
    data[start:stop] = bytes(stop - start)


def _remove(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    del data[start : start + rng.randrange(1, 64)]


def _repeat(data: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(data))
    piece = bytes(data[start : start + rng.randrange(1, 512)])
    at = rng.randrange(len(data))
    data[at:at] = piece * rng.choice((1, 2, 16))


def _swap(data: bytearray, rng: random.Random) -> None:
    n = max(1, min(rng.randrange(1, 512), len(data) // 3))
    first, second = rng.randrange(len(data) - n + 1), rng.randrange(len(data) - n + 1)
    data[first : first + n], data[second : second + n] = data[second : second + n], data[first : first + n]


def _number(data: bytearray, rng: random.Random) -> None:
    """A length or an offset that lies."""
    form = rng.choice(("<H", "<I", "<Q", ">I"))
    size = struct.calcsize(form)
    if len(data) < size:
        return
    at = rng.randrange(len(data) - size + 1)
    value = rng.choice(_INTERESTING) & ((1 << 8 * size) - 1)
    data[at : at + size] = struct.pack(form, value)


def _word(data: bytearray, rng: random.Random) -> None:
    word = rng.choice(_WORDS)
    at = rng.randrange(len(data))
    if rng.random() < 0.5:
        data[at : at + len(word)] = word
    else:
        data[at:at] = word


def _digit(data: bytearray, rng: random.Random) -> None:
    """A number in JSON text, or a byte of a small one in a pickle."""
    places = [i for i in range(min(len(data), 1 << 16)) if 0x30 <= data[i] <= 0x39]
    if places:
        data[rng.choice(places)] = rng.choice(b"0123456789-e.")


def _empty(data: bytearray, rng: random.Random) -> None:
    data.clear()


MUTATORS: tuple[Callable[[bytearray, random.Random], None], ...] = (
    _flip_bits, _flip_bits, _head, _head, _tail, _truncate, _extend, _zero, _remove, _repeat, _swap, _number, _number,
    _word, _digit, _digit, _empty,
)  # fmt: skip


def mutated(raw: bytes, rng: random.Random) -> bytes:
    """Other bytes than ``raw``."""
    while True:
        data = bytearray(raw)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            if data:
                rng.choice(MUTATORS)(data, rng)
        if bytes(data) != raw:
            return bytes(data)


def renamed(path: str, rng: random.Random) -> str:
    """The path with another number, which ranks, shards and steps are counted by; as it is where it has none.

    >>> renamed("mp_rank_00/model.pt", random.Random(0)) in {f"mp_rank_{n}/model.pt" for n in _COUNTS}
    True
    """
    numbers = list(re.finditer(r"[0-9]+", path))
    if not numbers:
        return path
    place = rng.choice(numbers)
    return f"{path[: place.start()]}{rng.choice(_COUNTS)}{path[place.end() :]}"
