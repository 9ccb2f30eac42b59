"""Counts as people read and write them, of bytes and of other things. Knows nothing of tensors."""

from __future__ import annotations

import re

from ckpt_tool.errors import UsageError

__all__ = ["counted", "format_bytes", "parse_bytes"]

_UNITS = {
    "": 1, "B": 1,
    "K": 1000, "KB": 1000, "KIB": 1 << 10,
    "M": 10**6, "MB": 10**6, "MIB": 1 << 20,
    "G": 10**9, "GB": 10**9, "GIB": 1 << 30,
    "T": 10**12, "TB": 10**12, "TIB": 1 << 40,
}  # fmt: skip
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str) -> int:
    """Number of bytes named by ``text``; decimal units are powers of 1000, ``KiB`` and friends of 1024.

    >>> parse_bytes("64MiB"), parse_bytes("5GB"), parse_bytes("100")
    (67108864, 5000000000, 100)

    Raises:
        UsageError: not a number with a known unit, or not above zero.
    """
    match = _PATTERN.fullmatch(text)
    unit = match[2].upper() if match else None
    if match is None or unit not in _UNITS:
        raise UsageError(f"{text!r} is not a size in bytes", hint="write it as 512MiB, 1GiB, 5GB or a plain number")
    nbytes = int(float(match[1]) * _UNITS[unit])
    if nbytes <= 0:
        raise UsageError(f"{text!r} is not above zero bytes")
    return nbytes


def counted(n: int, noun: str) -> str:
    """A number with its noun, in the singular for 1.

    >>> counted(1, "file"), counted(2000, "box"), counted(3, "entry"), counted(2, "copy of a box")
    ('1 file', '2,000 boxes', '3 entries', '2 copies of a box')
    """
    if n == 1:
        return f"1 {noun}"
    word, of, rest = noun.partition(" of ")
    if word.endswith(("x", "s", "sh", "ch")):
        plural = f"{word}es"
    elif word.endswith("y") and word[-2:-1] not in "aeiou":
        plural = f"{word[:-1]}ies"
    else:
        plural = f"{word}s"
    return f"{n:,} {plural}{of}{rest}"


def format_bytes(nbytes: int) -> str:
    """``nbytes`` with a binary unit and three digits.

    >>> format_bytes(0), format_bytes(1023), format_bytes(1536), format_bytes(5 * 2**30)
    ('0 B', '1023 B', '1.50 KiB', '5.00 GiB')
    """
    size = float(nbytes)
    if size < 1024:
        return f"{nbytes} B"
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        size /= 1024
        if size < 1024 or unit == "PiB":
            break
    digits = 2 if size < 10 else 1 if size < 100 else 0
    return f"{size:.{digits}f} {unit}"
