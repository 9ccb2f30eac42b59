"""A family is a rule set that comes with the package, for models that name their tensors alike.

The rules are ``families/*.toml``. Which family a checkpoint is of is told from names alone, with the evidence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources

from ckpt_tool.errors import LayoutError
from ckpt_tool.layout.names import spellings
from ckpt_tool.layout.rules import RuleSet, load_rules, typical_names

__all__ = ["Detection", "builtin_families", "detect_family"]

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True, slots=True)
class Detection:
    """The family that names are of, and why."""

    family: RuleSet
    evidence: tuple[str, ...]


@cache
def _texts() -> dict[str, str]:
    """The rules file of each family, by name. Reads the package's own files, once."""
    folder = resources.files("ckpt_tool.layout") / "families"
    entries = sorted((e for e in folder.iterdir() if e.name.endswith(".toml")), key=lambda entry: entry.name)
    return {entry.name.removesuffix(".toml"): entry.read_text(encoding="utf-8") for entry in entries}


@cache
def _family(name: str) -> RuleSet:
    return load_rules(_texts()[name], source=f"{name}.toml")


def builtin_families() -> dict[str, RuleSet]:
    """All families by name."""
    return {name: _family(name) for name in _texts()}


def detect_family(fqns: Iterable[str]) -> Detection:
    """The family whose typical names all occur and whose rules cover most of the others.

    Names that differ only in numbers count once. Where two families cover equally much, the one with more typical names
    is kept, and the evidence says so.

    Raises:
        LayoutError: no family fits; the message names the nearest one and what it misses.
    """
    distinct = {_NUMBER.sub("0", fqn) for fqn in fqns}
    readings = [[spelling.parameter for spelling in spellings(fqn, {})] for fqn in sorted(distinct)]
    ranked: list[tuple[int, int, str, RuleSet]] = []
    nearest: list[tuple[int, str, str]] = []
    for family_name, text in _texts().items():
        detect = typical_names(text)
        missing = [p.pattern for p in detect if not any(p.search(name) for names in readings for name in names)]
        if missing:  # its rules are not compiled at all
            nearest.append((len(detect) - len(missing), family_name, missing[0]))
            continue
        family = _family(family_name)
        covered = sum(any(family.match(name) for name in names) for names in readings)
        ranked.append((covered, len(family.detect), family.name, family))
    if not ranked:
        n_found, name, pattern = max(nearest)
        near = f"; nearest is {name}, without {pattern!r}" if n_found else ""
        raise LayoutError(
            f"the names of {len(distinct):,} kinds of tensors fit no known family{near}",
            hint=f"give rules with --rules FILE; known families are {', '.join(_texts())}",
        )
    ranked.sort(key=lambda entry: (-entry[0], -entry[1], entry[2]))
    covered, n_typical, name, family = ranked[0]
    typical = ", ".join(pattern.pattern for pattern in family.detect)
    evidence = [f"{name}: {typical} occur, rules cover {covered} of {len(distinct)} kinds of names"]
    evidence += [
        f"{other} covers as much; {name} is kept, it asks for {n_typical} typical names, {other} for {n_other}"
        for n_covered, n_other, other, _ in ranked[1:]
        if n_covered == covered
    ]
    return Detection(family, tuple(evidence))
