"""What would bring names together that did not meet: a front that one side has, or another one on each side.

Only said, never done: a front that is not known to be a wrapper's may be that of another model (a student's, a
teacher's).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from ckpt_tool.errors import LayoutError
from ckpt_tool.records import dataclass

__all__ = ["NameHint", "family_hint", "name_hint"]

_END = re.compile(r"[./]")
_MAX_NAMES = 10_000
_MAX_FRONTS = 4


@dataclass(frozen=True, slots=True)
class NameHint:
    """How names would meet."""

    said: str
    """What was seen."""
    options: str
    """What makes them meet."""

    @property
    def text(self) -> str:
        """Both in one sentence."""
        return f"{self.said}: {self.options} pairs them"


def name_hint(
    a: Sequence[str], b: Sequence[str], *, alike: Callable[[str, str], bool] | None = None
) -> NameHint | None:
    r"""What explains at least half of the names that only one side has; None where nothing does.

    Args:
        a: names that only A has; of very many some are looked at.
        b: names that only B has.
        alike: whether a name of A and one of B can mean one tensor, by their shapes; None where shapes say nothing.

    >>> name_hint(["w.0", "w.1"], ["student.w.0", "student.w.1"]).text
    "names of B have 'student.' in front of those of A: --strip-prefix student. pairs them"
    >>> name_hint(["o.s.w", "o.s.v"], ["o.s.net.w", "o.s.net.v"]).options
    "ckpt diff --map-names 're:(^|[./])net\\.=>\\1'"
    """
    fronts: dict[str, set[str]] = {}
    for name in _some(b):
        for front, tail in _tails(name):
            known = fronts.setdefault(tail, set())
            if len(known) <= _MAX_FRONTS:  # one more tells that a tail says nothing, as "weight" does
                known.add(front)
    votes: Counter[tuple[str, str]] = Counter()
    within: set[tuple[str, str]] = set()
    names = _some(a)
    for name in names:
        nothing = "", "", set[str]()
        front, end, met = next(((front, t, fronts[t]) for front, t in _tails(name) if t in fronts), nothing)
        for other in met if len(met) <= _MAX_FRONTS else ():
            if alike is not None and not alike(name, other + end):
                continue
            common, apart = _apart(front, other)
            votes[apart] += 1
            if common:
                within.add(apart)
    (found, n), *_ = votes.most_common(1) or [(("", ""), 0)]
    if found == ("", "") or 2 * n < min(len(names), len(_some(b))):
        return None
    return _hint(*found, is_in_front=found not in within)


def family_hint(a: Sequence[str], b: Sequence[str]) -> NameHint | None:
    """How names meet that are a family's of Megatron or torchtitan on one side at least; None where neither is.

    Args:
        a: names that only A has.
        b: names that only B has.
    """
    from ckpt_tool.api.convert.published import is_in_one  # these only where names meet nothing
    from ckpt_tool.layout.naming_match import choose_naming

    in_one = [label for label, names in zip("AB", (a, b), strict=True) if is_in_one(names)]
    if len(in_one) == 1:
        said_of = f"{in_one[0]} has the experts of a layer in one tensor, as transformers 5 has them in memory"
        return NameHint(said_of, "--names hf")
    said = []
    for label, names in zip("AB", (_some(a), _some(b)), strict=True):
        try:
            found = choose_naming(names, family=None)
        except LayoutError as error:  # several fit equally well: which one it is the user knows
            return NameHint(f"{label}: {error.message}", "--names hf --family NAME")
        if found is not None:
            said.append(f"names of {label} are {found.naming.name}'s")
    return NameHint(" and ".join(said), "--names hf") if said else None


def _some(names: Sequence[str]) -> Sequence[str]:
    return names[:: len(names) // _MAX_NAMES + 1]


def _tails(name: str) -> Iterator[tuple[str, str]]:
    """``(front, rest)`` at each dot or slash, the whole name first."""
    yield "", name
    for end in _END.finditer(name):
        yield name[: end.end()], name[end.end() :]


def _apart(one: str, other: str) -> tuple[str, tuple[str, str]]:
    """What two fronts begin with in common, up to a dot or slash, and what is left of each."""
    common = 0
    for end in _END.finditer(one):
        if one[: end.end()] != other[: end.end()]:
            break
        common = end.end()
    return one[:common], (one[common:], other[common:])


def _hint(one: str, other: str, *, is_in_front: bool) -> NameHint:
    if one and other:
        said = f"names have {one!r} in A where they have {other!r} in B"
    elif one:
        said = f"names of A have {one!r} {'in front of' if is_in_front else 'within'} those of B"
    else:
        said = f"names of B have {other!r} {'in front of' if is_in_front else 'within'} those of A"
    fronts = [front for front in (one, other) if front]
    if is_in_front:
        return NameHint(said, " ".join(f"--strip-prefix {front}" for front in fronts))
    replaced = other if one else ""
    return NameHint(said, rf"ckpt diff --map-names 're:(^|[./]){re.escape(one or other)}=>\1{replaced}'")
