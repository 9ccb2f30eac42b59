"""A match is the naming that fits a checkpoint, told from names alone, and the rule of it that fits each tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ckpt_tool.errors import LayoutError, UsageError
from ckpt_tool.layout.names import spellings
from ckpt_tool.layout.naming_rules import Naming, NamingRule, builtin_namings
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted, some_below

__all__ = [
    "Matched", "NamingMatch", "choose_naming", "match_names", "matches_of", "misfits", "nearest_naming",
    "rules_of_name",
]  # fmt: skip

_N_LISTED = 10


@dataclass(frozen=True, slots=True)
class NamingMatch:
    """A naming that fits, and why."""

    naming: Naming
    evidence: str


@dataclass(frozen=True, slots=True)
class Matched:
    """The rule for a tensor, and what its pattern captured of the name."""

    fqn: str
    parameter: str
    """The name without what wrappers put in front."""
    rule: NamingRule
    groups: Mapping[str, str | None]


def choose_naming(fqns: Iterable[str], *, family: str | None, must_fit: bool = True) -> NamingMatch | None:
    """The built-in naming that the names fit and whose rules cover most of them; None when they fit none.

    Args:
        fqns: names of tensors.
        family: only namings that lead to this family, or have this name; None for all.
        must_fit: a family that is named has to fit.

    Raises:
        UsageError: no naming is called so.
        LayoutError: the one that is does not fit, or several fit equally well.
    """
    known = builtin_namings().values()
    asked = [
        naming for naming in known if family in (naming.family, naming.name, None if not naming.only_asked else "")
    ]
    if not asked:
        families = sorted({naming.family for naming in known} | {naming.name for naming in known})
        raise UsageError(f"no naming is called {family!r}", hint=f"known are {', '.join(families)}, auto and none")
    readings = [[spelling.parameter for spelling in spellings(fqn, {})] for fqn in fqns]
    ranked: list[tuple[int, Naming]] = []
    against: list[str] = []
    for naming in asked:
        why_not = misfits(naming, readings)
        against += why_not[:1]
        if not why_not:
            covered = sum(any(r.pattern.fullmatch(name) for r in naming.rules for name in names) for names in readings)
            ranked.append((covered, naming))
    if not ranked:
        if family is None or not must_fit:
            return None
        raise LayoutError(f"the names are not those of {family}: {against[0]}", hint="try --family auto")
    best = max(covered for covered, _ in ranked)
    equal = [naming for covered, naming in ranked if covered == best]
    if len(equal) > 1:
        raise LayoutError(
            f"the names fit {' and '.join(naming.name for naming in equal)} equally well",
            hint=f"choose with --family {' or --family '.join(naming.family for naming in equal)}",
        )
    return NamingMatch(equal[0], f"names are {equal[0].name}'s: rules cover {best:,} of {len(readings):,}")


def nearest_naming(fqns: Iterable[str]) -> str | None:
    """Of names that fit none, the naming that lacks least and covers half of them at least, and why it does not fit."""
    readings = [[spelling.parameter for spelling in spellings(fqn, {})] for fqn in fqns]
    ranked: list[tuple[int, int, str]] = []
    for naming in builtin_namings().values():
        lacking = [pattern.pattern for pattern in naming.detect if not _occurs(pattern, readings)]
        covered = sum(any(r.pattern.fullmatch(name) for r in naming.rules for name in names) for names in readings)
        if lacking and not naming.only_asked and 2 * covered >= len(readings) > 0:
            said = f"rules of {naming.name} cover {covered:,} of {len(readings):,}, but none fits {lacking[0]!r}"
            ranked.append((len(lacking), -covered, said))
    return min(ranked)[2] if ranked else None


def misfits(naming: Naming, readings: Sequence[Sequence[str]]) -> list[str]:
    """Why names are not those of a naming, a clause each: what must occur and does not, and what must not and does.

    Args:
        naming: whose ``detect`` and ``absent`` are asked.
        readings: of each tensor the names that it may have.
    """
    return [
        *(f"none fits {each.pattern!r}" for each in naming.detect if not _occurs(each, readings)),
        *(f"some fit {each.pattern!r}" for each in naming.absent if _occurs(each, readings)),
    ]


def _occurs(pattern: re.Pattern[str], readings: Iterable[Iterable[str]]) -> bool:
    return any(pattern.search(name) for names in readings for name in names)


def match_names(naming: Naming, fqns: Iterable[str]) -> tuple[Matched, ...]:
    """The first rule for each name, in order.

    Raises:
        LayoutError: names that no rule covers.
    """
    found, uncovered = matches_of(naming, fqns)
    if uncovered:
        raise LayoutError(
            f"{naming.name} has no name for {len(uncovered):,} of {counted(len(uncovered) + len(found), 'tensor')}, "
            f"which would be lost:{some_below(uncovered, _N_LISTED)}",
            hint="give rules for them with --naming FILE, leave them out with --exclude, or keep all names with "
            "--family none",
        )
    return tuple(found)


def matches_of(naming: Naming, fqns: Iterable[str]) -> tuple[list[Matched], list[str]]:
    """The first rule for each name, in order, and the names that no rule covers."""
    found: list[Matched] = []
    uncovered: list[str] = []
    for fqn in fqns:
        matched = next(_matches(naming, fqn), None)
        if matched is None:
            uncovered.append(fqn)
        else:
            found.append(matched)
    return found, uncovered


def _matches(naming: Naming, fqn: str) -> Iterator[Matched]:
    for spelling in spellings(fqn, {}):
        if spelling.slot is None and spelling.adapter is None:
            yield from rules_of_name(naming, fqn, spelling.parameter)


def rules_of_name(naming: Naming, fqn: str, parameter: str) -> Iterator[Matched]:
    """The rules that match the whole of a parameter's name, in order; ``fqn`` is the tensor that is called so."""
    for rule in naming.rules:
        found = rule.pattern.fullmatch(parameter)
        if found is not None:
            yield Matched(fqn, parameter, rule, found.groupdict())
