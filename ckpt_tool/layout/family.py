"""A family is a rule set that comes with the package, for models that name their tensors alike.

The rules are ``families/*.toml``. Which family a checkpoint is of is told from names alone, with the evidence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path

from ckpt_tool.errors import LayoutError
from ckpt_tool.layout.names import spellings
from ckpt_tool.layout.rules import RuleSet, load_rules, typical_names
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

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
    folder = Path(__file__).with_name("families")  # importlib.resources takes 4 ms to load
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
    is kept; the evidence says so unless both say the same of all tensors.

    Raises:
        LayoutError: no family fits; the message names the nearest one and what it misses.
    """
    distinct = {_NUMBER.sub("0", fqn) for fqn in fqns}
    readings = [[spelling.parameter for spelling in spellings(fqn, {})] for fqn in sorted(distinct)]
    ranked: list[tuple[int, int, str, RuleSet]] = []
    misfits: list[tuple[str, str]] = []
    for family_name, text in _texts().items():
        missing = next(_absent(typical_names(text), readings), None)
        if missing is not None:  # its rules are not compiled at all
            misfits.append((family_name, missing))
            continue
        family = _family(family_name)
        covered = sum(any(family.match(name) for name in names) for names in readings)
        ranked.append((covered, len(family.detect), family.name, family))
    if not ranked:
        near = _nearest(misfits, readings)
        raise LayoutError(
            f"the names of {counted(len(distinct), 'kind of tensors')} fit no known family{near}",
            hint=f"give rules with --rules FILE, or every rank a copy with --default replicate; known families are "
            f"{', '.join(_texts())}",
        )
    ranked.sort(key=lambda entry: (-entry[0], -entry[1], entry[2]))
    covered, n_typical, name, family = ranked[0]
    typical = ", ".join(pattern.pattern for pattern in family.detect)
    evidence = [f"{name}: names match {typical}; rules cover {covered} of {len(distinct)} kinds of names"]
    asks = f"{name} is kept, it asks for {counted(n_typical, 'typical name')}"
    evidence += [
        f"{other_name} covers as much; {asks}, {other_name} for {n_other}"
        for n_covered, n_other, other_name, other in ranked[1:]
        if n_covered == covered and _differ(family, other, readings)
    ]
    return Detection(family, tuple(evidence))


def _differ(family: RuleSet, other: RuleSet, readings: Sequence[Sequence[str]]) -> bool:
    """Whether two families say different things of a tensor."""

    def said(rules: RuleSet, names: Sequence[str]) -> tuple[object, ...] | None:
        match = next((found for name in names if (found := rules.match(name)) is not None), None)
        if match is None:
            return None
        rule = match.rule
        return rule.kind, rule.dim, rule.parts, rule.stage, match.layer, match.expert

    return any(said(family, names) != said(other, names) for names in readings)


def _absent(patterns: Sequence[str], readings: Sequence[Sequence[str]]) -> Iterator[str]:
    """The patterns that no name matches."""
    for pattern in patterns:
        search = re.compile(pattern).search
        if not any(search(name) for names in readings for name in names):
            yield pattern


def _nearest(misfits: Sequence[tuple[str, str]], readings: Sequence[Sequence[str]]) -> str:
    """Which family misses the fewest of its typical names, and the first of these, as a part of a sentence."""
    found = []
    for name, missing in misfits:
        patterns = typical_names(_texts()[name])
        found.append((len(patterns) - len(list(_absent(patterns, readings))), name, missing))
    n_found, name, missing = max(found)
    return f"; nearest is {name}, without {missing!r}" if n_found else ""
