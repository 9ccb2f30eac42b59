"""Counts, lists of names and words of commands as people read and write them. Knows nothing of tensors."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ckpt_tool.errors import UsageError

__all__ = ["counted", "counted_of", "format_bytes", "parse_bytes", "shell_word", "some_below", "some_of"]

_UNITS = {
    "": 1, "B": 1,
    "K": 1000, "KB": 1000, "KIB": 1 << 10,
    "M": 10**6, "MB": 10**6, "MIB": 1 << 20,
    "G": 10**9, "GB": 10**9, "GIB": 1 << 30,
    "T": 10**12, "TB": 10**12, "TIB": 1 << 40,
}  # fmt: skip
_SIZE_EXAMPLES = "write it as 512MiB, 1GiB, 5GB or a plain number"
_SINGULAR = {"are": "is", "were": "was", "have": "has", "do": "does"}
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def shell_word(text: str) -> str:
    """``text`` as one word of a command that is typed.

    >>> shell_word("run/step-5"), shell_word("my run")
    ('run/step-5', "'my run'")
    """
    from shlex import quote  # only messages need it

    return quote(text)


def parse_bytes(text: str, *, of: str = "") -> int:
    """Number of bytes named by ``text``; decimal units are powers of 1000, ``KiB`` and friends of 1024.

    >>> parse_bytes("64MiB"), parse_bytes("5GB"), parse_bytes("100")
    (67108864, 5000000000, 100)

    Args:
        text: a number, and a unit if it has one.
        of: the option that has this value, for messages.

    Raises:
        UsageError: not a number with a known unit, or not above zero.
    """
    match, place = _PATTERN.fullmatch(text), f"{of}: " if of else ""
    unit = match[2].upper() if match else None
    if match is None or unit not in _UNITS:
        raise UsageError(f"{place}{text!r} is not a size in bytes", hint=_SIZE_EXAMPLES)
    nbytes = int(float(match[1]) * _UNITS[unit])
    if nbytes <= 0:
        raise UsageError(f"{place}a size of {text} is not above zero bytes", hint=_SIZE_EXAMPLES)
    return nbytes


def counted(n: int, noun: str, verb: str = "") -> str:
    """A number with its noun, in the singular for 1, and so is the verb, which is given in the plural.

    >>> counted(1, "file"), counted(2000, "box"), counted(3, "entry"), counted(2, "copy of a box")
    ('1 file', '2,000 boxes', '3 entries', '2 copies of a box')
    >>> counted(1, "tensor", "are"), counted(1, "copy", "carry"), counted(2, "file", "lie")
    ('1 tensor is', '1 copy carries', '2 files lie')
    """
    behind = f" {verb}" if verb else ""
    if n == 1:
        return f"1 {noun} {_SINGULAR.get(verb) or _with_s(verb)}" if verb else f"1 {noun}"
    word, of, rest = noun.partition(" of ")
    return f"{n:,} {_with_s(word)}{of}{rest}{behind}"


def counted_of(n: int, total: int, noun: str, verb: str) -> str:
    """So many of all, and the verb, given in the plural, that goes with them.

    >>> counted_of(1, 3, "file", "are"), counted_of(2, 3, "file", "are"), counted_of(1, 1, "file", "lack")
    ('1 of 3 files is', '2 of 3 files are', '1 of 1 file lacks')
    """
    return f"{n:,} of {counted(total, noun)} {(_SINGULAR.get(verb) or _with_s(verb)) if n == 1 else verb}"


def some_of(names: Sequence[object], most: int = 3, *, n: int | None = None) -> str:
    """The first names, and how many more there are of ``n``, or of the names where that is not given.

    >>> some_of(["a", "b", "c", "d"]), some_of([0, 1], 8), some_of(["a"], 1, n=5)
    ('a, b, c and 1 more', '0, 1', 'a and 4 more')
    """
    n_more = (len(names) if n is None else n) - most
    return ", ".join(map(str, names[:most])) + (f" and {n_more:,} more" if n_more > 0 else "")


def some_below(names: Sequence[object], most: int) -> str:
    r"""As ``some_of``, each on a line of its own below the sentence that ends here.

    >>> some_below(["a", "b", "c"], 2)
    '\n  a\n  b\n  ... and 1 more'
    """
    lines = "".join(f"\n  {name}" for name in names[:most])
    return lines + (f"\n  ... and {len(names) - most:,} more" if len(names) > most else "")


def _with_s(word: str) -> str:
    """A noun in the plural; as it happens, a verb in the singular."""
    if word.endswith(("x", "s", "sh", "ch")):
        return f"{word}es"
    if word.endswith("y") and word[-2:-1] not in "aeiou":
        return f"{word[:-1]}ies"
    return f"{word}s"


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
