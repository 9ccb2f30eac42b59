"""Which places of a grid are absent, where the grid's size is as the input says.

Sizes come from names of files and from recorded arguments, which may be absurd: absent places are counted by
arithmetic, and only the first ones are listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import NamedTuple

__all__ = ["MAX_LISTED", "Absent", "absent_numbers", "absent_places"]

MAX_LISTED = 100_000
"""More ranks than any run has; their names take some 10 MB."""


class Absent(NamedTuple):
    """Places of a grid that nothing takes."""

    n: int
    """How many there are."""
    first: list[tuple[int, ...]]
    """The first of them, row-major: the last coordinate varies fastest."""


def absent_places(present: Iterable[tuple[int, ...]], sizes: Sequence[int], *, at_most: int = MAX_LISTED) -> Absent:
    """Places of the grid of these ``sizes`` that are not ``present``; at most ``at_most`` are listed.

    Places outside the grid count for nothing. Cost: one step for each that is present or listed, whatever the sizes.

    >>> absent_places([(0, 0), (1, 1), (7, 7)], (2, 2))
    Absent(n=2, first=[(0, 1), (1, 0)])
    >>> absent_places([(0,)], (10**15,), at_most=2)
    Absent(n=999999999999999, first=[(1,), (2,)])
    """
    inside = {place for place in present if all(0 <= n < size for n, size in zip(place, sizes, strict=True))}
    count = max(prod(sizes), 0) - len(inside)
    first: list[tuple[int, ...]] = []
    places = _places(sizes)
    while len(first) < min(count, at_most):
        place = next(places)
        if place not in inside:
            first.append(place)
    return Absent(count, first)


def absent_numbers(present: Iterable[int], size: int, *, first: int = 0, at_most: int = MAX_LISTED) -> list[int]:
    """The first ``at_most`` of the ``size`` numbers from ``first`` on that are not ``present``.

    >>> absent_numbers([1, 3], 4, first=1)
    [2, 4]
    """
    return [n + first for (n,) in absent_places([(n - first,) for n in present], (size,), at_most=at_most).first]


def _places(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All places, row-major; unlike ``itertools.product`` without a list of each size's numbers."""
    if not sizes:
        yield ()
        return
    for outer in _places(sizes[:-1]):
        for inner in range(sizes[-1]):
            yield (*outer, inner)
