"""The opcodes of a pickle, passed over without executing any: where it ends, and that it asks for nothing absurd.

The C unpickler allocates what an opcode claims before it looks at the data: a memo index of two billion costs 32 GiB.
So a pickle is scanned first. Fixed-size opcodes and short strings are eaten by one regular expression (about 100 MB a
second); Python looks only at the rest. Knows opcode lengths, not meanings.
"""

from __future__ import annotations

import re
from functools import lru_cache

from ckpt_tool.errors import FormatError
from ckpt_tool.sizes import counted

__all__ = ["pickle_end"]

# Opcode tables: CPython Lib/pickletools.py, protocols 0 to 5.
_BARE = b"(012Nabde}ls]o)tuRQ\x81\x85\x86\x87\x88\x89\x8f\x90\x91\x92\x93\x94\x97\x98"
_STOP = 0x2E
_LONG_BINPUT = ord("r")
_PUT = ord("p")
# Fixed-size opcodes with arguments, and their sizes with the opcode.
_FIXED = {ord("K"): 2, ord("h"): 2, ord("q"): 2, 0x80: 2, ord("M"): 3, ord("J"): 5, ord("j"): 5, ord("G"): 9, 0x95: 9}
_EXTENSIONS = frozenset(b"\x82\x83\x84")
# Opcodes followed by a length of this many bytes, and that many bytes.
_COUNTED = {
    ord("U"): 1, 0x8C: 1, ord("C"): 1, 0x8A: 1,
    ord("T"): 4, ord("X"): 4, ord("B"): 4, 0x8B: 4,
    0x8D: 8, 0x8E: 8, 0x96: 8,
}  # fmt: skip
# Opcodes followed by this many lines.
_LINES = {ord("I"): 1, ord("F"): 1, ord("L"): 1, ord("S"): 1, ord("V"): 1, ord("P"): 1, ord("g"): 1, _PUT: 1,
          ord("c"): 2, ord("i"): 2}  # fmt: skip
_NUMBER_LINES = frozenset(b"IFLgp")

_MAX_NUMBER_LINE = 4_300  # digits: int() takes quadratic time, and CPython's own limit is the same
_MAX_LONG_NBYTES = 4_096
_SMALL_MEMO = 1 << 20
"""So many (8 MiB of memory) are never too many: pickles below a megabyte share one pattern, which takes 2 ms."""


def pickle_end(data: bytes, *, where: str, start: int = 0) -> int:
    """The offset just behind the ``STOP`` of the pickle that begins at ``start`` in ``data``.

    Raises:
        FormatError: no STOP, an unknown opcode, a length beyond the data, or a number far beyond need; ``where`` of
            the error ends in the opcode's byte offset.
    """
    limit = len(data)
    # No pickle memoizes more objects than it has bytes.
    memo_limit = max(limit - start, _SMALL_MEMO)
    match = _run_pattern(_pattern_limit(memo_limit)).match
    position = start
    while True:
        run = match(data, position)
        if run is not None:
            position = run.end()
        if position >= limit:
            raise FormatError(f"the pickle has no end in {counted(limit - start, 'byte')}", where=f"{where}:{limit}")
        opcode = data[position]
        if opcode == _STOP:
            return position + 1
        position = _after(data, position, opcode, where, memo_limit)


def _after(data: bytes, position: int, opcode: int, where: str, memo_limit: int) -> int:
    """The offset behind one opcode that the pattern does not know."""
    place = f"{where}:{position}"
    if opcode in _COUNTED:
        width = _COUNTED[opcode]
        header_end = position + 1 + width
        length = int.from_bytes(data[position + 1 : header_end], "little")
        end = header_end + length
        if end > len(data) or header_end > len(data):
            room = max(len(data) - header_end, 0)
            raise FormatError(
                f"a value of {counted(length, 'byte')} is claimed, expected at most {room:,}", where=place
            )
        if opcode in (0x8A, 0x8B) and length > _MAX_LONG_NBYTES:
            raise FormatError(
                f"an integer of {counted(length, 'byte')}, expected at most {_MAX_LONG_NBYTES:,}", where=place
            )
        return end
    if opcode in _LINES:
        return _after_lines(data, position, opcode, place, memo_limit)
    if opcode in _FIXED:  # the pattern stopped after its last round, or the data ends here
        end = position + _FIXED[opcode]
        if end > len(data):
            raise FormatError("the pickle ends inside an opcode", where=place)
        return end
    if opcode == _LONG_BINPUT:
        index = int.from_bytes(data[position + 1 : position + 5], "little")
        _check_memo_index(index, memo_limit, place)
        if position + 5 > len(data):
            raise FormatError("the pickle ends inside an opcode", where=place)
        return position + 5
    if opcode in _EXTENSIONS:
        raise FormatError("the pickle uses the extension registry, which no checkpoint does", where=place)
    raise FormatError(f"not a pickle, or a damaged one: 0x{opcode:02x} is no opcode", where=place)


def _after_lines(data: bytes, position: int, opcode: int, place: str, memo_limit: int) -> int:
    end = position + 1
    for _ in range(_LINES[opcode]):
        end = data.find(b"\n", end) + 1
        if end == 0:
            raise FormatError("the pickle ends inside a line of text", where=place)
    line = data[position + 1 : end - 1]
    if opcode in _NUMBER_LINES and len(line) > _MAX_NUMBER_LINE:
        raise FormatError(
            f"a number of {counted(len(line), 'digit')}, expected at most {_MAX_NUMBER_LINE:,}", where=place
        )
    if opcode == _PUT:
        if not line.strip().isdigit():
            raise FormatError("a memo index is not a number", where=place)
        _check_memo_index(int(line), memo_limit, place)
    return end


def _check_memo_index(index: int, memo_limit: int, place: str) -> None:
    if index >= memo_limit:
        raise FormatError(
            f"memo index {index:,}, expected below the pickle's {counted(memo_limit, 'byte')}", where=place
        )


def _pattern_limit(memo_limit: int) -> int:
    """The largest power of two up to ``memo_limit``, so that few patterns are compiled."""
    return 1 << min(memo_limit.bit_length() - 1, 31)


@lru_cache(maxsize=32)
def _run_pattern(memo_limit: int) -> re.Pattern[bytes]:
    """Runs of opcodes that need no look: ``memo_limit`` (a power of two) bounds LONG_BINPUT's index.

    Greedy with a bound: an unbounded repeat of a group keeps a backtracking record for each round.
    """
    bare = b"[" + re.escape(_BARE) + b"]"
    index = _byte_below(memo_limit >> 16) + b"\\x00" if memo_limit < 1 << 24 else b"." + _byte_below(memo_limit >> 24)
    short_text = b"|".join(re.escape(bytes([length])) + b".{%d}" % length for length in range(64))
    text = b"|".join(re.escape(bytes([length])) + rb"\x00\x00\x00.{%d}" % length for length in range(48))
    short_long = b"|".join(re.escape(bytes([length])) + b".{%d}" % length for length in range(10))
    fixed = (
        rb"[Khq\x80].|[Jj].{4}|M..|\x8c(?:" + short_text + rb")|r.." + index + rb"|X(?:" + text + rb")|G.{8}|\x8a(?:"
        + short_long + rb")|\x95.{8}"
    )  # fmt: skip
    return re.compile(b"(?s:(?:" + bare + b"*(?:" + fixed + b")){0,4000}" + bare + b"*)")


def _byte_below(limit: int) -> bytes:
    return b"[\\x00-" + re.escape(bytes([max(min(limit, 256) - 1, 0)])) + b"]"
