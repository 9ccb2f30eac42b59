"""Values of which ranks keep copies, as counters and hyperparameters: where copies differ, two saves are mixed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.sizes import counted, some_of

__all__ = ["DISAGREEING", "Held", "differing", "disagreement_findings", "is_told"]

DISAGREEING = "values_of_ranks"
"""Where a manifest's ``info`` has the values that ranks hold differently and that are no objects of its own."""

Held = Mapping[str, Mapping[str, Sequence[int]]]
"""By name, and by value as it is shown, the ranks that hold it."""

_SETTING = re.compile(r"(?:.*\.)?param_groups?\.(?!.*params$).*")
_COUNTER = re.compile(r"(?:.*\.)?(?:step|num_steps|global_steps?|iteration|epoch|_step_count|num_update_steps)")
_OF_THE_SAVE = ("step", "iteration", "global_step", "global_steps")
"""Counters of the whole program, of which no rank can rightly hold another one."""
_PLAIN = (bool, int, float, str, type(None))


def is_told(fqn: str) -> bool:
    """Whether ranks should hold the same under this name, whatever their part of the model is.

    >>> is_told("optimizer.param_groups.0.lr"), is_told("optimizer.param_groups.0.params"), is_told("rng_state.cuda")
    (True, False, False)
    """
    return bool(_COUNTER.fullmatch(fqn) or _SETTING.fullmatch(fqn))


def differing(values: Iterable[tuple[str, int, Any]]) -> dict[str, dict[str, list[int]]]:
    """Of ``(name, rank, value)`` the names of which ranks hold several values; tensors and objects are not compared.

    >>> differing([("iteration", 0, 7), ("iteration", 1, 8), ("iteration", 2, 7), ("lr", 0, 0.1)])
    {'iteration': {'7': [0, 2], '8': [1]}}
    """
    held: dict[str, dict[str, list[int]]] = {}
    for fqn, rank, value in values:
        if _is_plain(value):
            held.setdefault(fqn, {}).setdefault(repr(value), []).append(rank)
    return {fqn: ranks for fqn, ranks in held.items() if len(ranks) > 1}


def disagreement_findings(held: Held) -> Iterator[Finding]:
    """``mixed-steps`` for each counter, an error for the program's own; one ``ranks-disagree`` for all else."""
    rest: dict[str, str] = {}
    for fqn, ranks in held.items():
        ordered = sorted(ranks.items(), key=lambda item: list(item[1]))
        said = "; ".join(f"{value} on ranks {some_of(sorted(numbers), 8)}" for value, numbers in ordered)
        if _COUNTER.fullmatch(fqn):
            message = f"{fqn} is {said}: files of several saves are mixed"
            yield Finding("mixed-steps", Severity.ERROR if fqn in _OF_THE_SAVE else Severity.WARNING, message, fqn)
        else:
            rest[fqn] = said
    if rest:
        first, *others = rest
        more = f"; so do {', '.join(others[:3])}" if others else ""
        more += f" and {counted(len(others) - 3, 'other')}" if len(others) > 3 else ""
        kind = "hyperparameters" if all(map(_SETTING.fullmatch, rest)) else "values"
        message = f"{kind} differ between ranks: {first} is {rest[first]}{more}"
        yield Finding("ranks-disagree", Severity.WARNING, message, first)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(isinstance(each, _PLAIN) for each in value)
    return isinstance(value, _PLAIN)
