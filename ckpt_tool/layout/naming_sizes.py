"""How the parts of a fused tensor lie in it: sizes as rules write them, and the rows of each piece. Integers only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ckpt_tool.errors import LayoutError
from ckpt_tool.records import dataclass

__all__ = ["FACT_HINT", "Fact", "Piece", "check_counted", "pieces_of", "size_of", "stated"]

FACT_HINT = "if a fact is wrong, give the right one with --fact NAME=N"


@dataclass(frozen=True, slots=True)
class Fact:
    """A number that a rule needs, and where it is written."""

    value: int
    evidence: str


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of one part, in one group."""

    part: int
    """Position among the parts."""
    fused_row: int
    """Its first row in the fused tensor."""
    part_row: int
    """Its first row in the part's own tensor."""
    rows: int


def pieces_of(weights: Sequence[int], unit: int, n_groups: int) -> Iterator[Piece]:
    """Parts in order, each with its pieces group by group.

    Args:
        weights: relative size of each part in a group.
        unit: rows of weight 1.
        n_groups: how often the parts repeat.

    >>> [(p.part, p.fused_row, p.part_row, p.rows) for p in pieces_of([2, 1], 1, 2)]
    [(0, 0, 0, 2), (0, 3, 2, 2), (1, 2, 0, 1), (1, 5, 1, 1)]
    """
    period, start = sum(weights) * unit, 0
    for part, weight in enumerate(weights):
        size = weight * unit
        for group in range(n_groups):
            yield Piece(part, group * period + start, group * size, size)
        start += size


def size_of(text: str, facts: Mapping[str, Fact], fqn: str) -> int:
    """The value of a size, exact: numbers and facts with ``*`` and ``/`` between them.

    Raises:
        LayoutError: it is no whole number above 0.
    """
    value, words = 1, re.split(r"([*/])", text)
    for operator, word in zip(["*", *words[1::2]], words[::2], strict=True):
        number = int(word) if word.isdecimal() else facts[word].value
        if number < 1 or (operator == "/" and value % number):
            names = (name for name in words[::2] if not name.isdecimal())
            raise LayoutError(
                f"{text} is no whole number above 0 with {stated(names, facts)}", where=fqn, hint=FACT_HINT
            )
        value = value * number if operator == "*" else value // number
    return value


def stated(names: Iterable[str], facts: Mapping[str, Fact]) -> str:
    """Facts with their values and where these are written."""
    return ", ".join(f"{name} = {facts[name].value:,} ({facts[name].evidence})" for name in sorted(names))


def check_counted(name: str, shape: Sequence[int], facts: Mapping[str, Fact], fqn: str) -> None:
    """Raise LayoutError unless the first dimension is as long as the fact of this name says, if there is one."""
    if name in facts and (not shape or shape[0] != facts[name].value):
        found = f"{shape[0]:,}" if shape else "no"
        raise LayoutError(f"has {found} {name}, {facts[name].evidence} says {facts[name].value:,}", where=fqn)
