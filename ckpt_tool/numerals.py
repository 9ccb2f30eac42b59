"""Numbers in the names of files, spelled as the program that wrote them spells them.

Ranks, shards and chunks are counted by names. A second spelling of a number (``rank_01`` beside ``rank_1``: a copy, a
file from elsewhere) would pass for the same rank, and whichever is read last would win; so each format takes the
spelling of its writer and no other, and what is called otherwise is a file that it does not know.
"""

from __future__ import annotations

__all__ = ["numeral"]


def numeral(width: int = 1, *, most: int = 9) -> str:
    r"""A pattern of the whole numbers as ``f"{number:0{width}d}"`` writes them, of ``most`` digits or fewer.

    >>> import re
    >>> [bool(re.fullmatch(numeral(), text)) for text in ("0", "10", "01", "00", "")]
    [True, True, False, False, False]
    >>> [bool(re.fullmatch(numeral(2), text)) for text in ("00", "07", "123", "7", "007")]
    [True, True, True, False, False]
    """
    exact = "[0-9]" if width == 1 else f"[0-9]{{{width}}}"
    return f"(?:{exact}|[1-9][0-9]{{{width},{most - 1}}})"
