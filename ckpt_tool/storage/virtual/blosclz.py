"""Blosc's own compression, ``blosclz``: literals, and matches of what came before, as in FastLZ.

Source: c-blosc's ``blosclz.c`` (1.21). A control byte below 32 stands before that many literals and one more; else its
upper three bits are a match's length, of which 7 goes on in further bytes, and its lower ones begin the distance, which
goes on in one byte, or, where both are full, in three.
"""

from __future__ import annotations

from ckpt_tool.errors import FormatError
from ckpt_tool.sizes import counted

__all__ = ["unpacked_blosclz"]

_FULL_LENGTH = 7
_FULL_HIGH = 31
_FAR = 8191
"""Distances are counted on from here where they take two bytes."""


def unpacked_blosclz(stream: bytes, nbytes: int, where: str) -> bytes:
    """The ``nbytes`` bytes that a stream holds.

    Raises:
        FormatError: it does not hold them.
    """
    found = bytearray()
    try:
        _unpack(stream, found, nbytes)
    except (IndexError, ValueError) as error:
        raise FormatError(
            f"not a block of blosclz: it breaks off or points nowhere behind {len(found):,} of "
            f"{counted(nbytes, 'byte')}",
            where=where,
        ) from error
    if len(found) != nbytes:
        raise FormatError(f"a block of blosclz holds {counted(len(found), 'byte')}, expected {nbytes:,}", where=where)
    return bytes(found)


def _unpack(stream: bytes, found: bytearray, nbytes: int) -> None:
    """Append to ``found``.

    Raises:
        IndexError: the stream ends within a match.
        ValueError: literals or a match beyond either end.
    """
    at, control = 1, stream[0] & _FULL_HIGH  # the first byte's upper bits are the version
    while True:
        if control < 1 << 5:
            count = control + 1
            if at + count > len(stream) or len(found) + count > nbytes:
                raise ValueError
            found += stream[at : at + count]
            at += count
        else:
            count, high = (control >> 5) + 2, control & _FULL_HIGH
            if control >> 5 == _FULL_LENGTH:
                more = 255
                while more == 255:
                    more = stream[at]
                    count += more
                    at += 1
            low = stream[at]
            at += 1
            distance = (high << 8 | low) + 1
            if high == _FULL_HIGH and low == 255:
                distance = (stream[at] << 8 | stream[at + 1]) + _FAR + 1
                at += 2
            first = len(found) - distance
            if first < 0 or len(found) + count > nbytes:
                raise ValueError
            piece = found[first : first + count]
            if len(piece) < count:  # a match that reaches into itself: its beginning over and over
                piece = (piece * -(-count // distance))[:count]
            found += piece
        if at >= len(stream):
            return
        control = stream[at]
        at += 1
