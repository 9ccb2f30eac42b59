"""Patterns are the regular expressions by which a checkpoint names parameters; they come from a file, so with care.

Most are one escaped name between ``^`` and ``$`` and are looked up, not matched. Others are matched as DeepSpeed does,
at the start of the name, unless they could take time exponential in its length.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

from ckpt_tool.errors import FormatError, Unsupported

__all__ = ["Patterns"]

Value = TypeVar("Value")
_MAX_LENGTH = 1000
_ESCAPED = re.compile(r"\\([^A-Za-z0-9])")
_SPECIAL = re.compile(r"[.^$*+?{}\[\]\\|()]")
_ATOMS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_REPEATS = ("*", "+", "{")
_MAX_REPEATS = 8


class Patterns(Generic[Value]):
    r"""Values by pattern, asked by name; the first pattern that fits decides.

    >>> Patterns({r"^model\.norm\.weight$": 1, r"\d+\.mlp": 2}).get("3.mlp.weight")
    2
    """

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._literal: dict[str, Value] = {}
        self._compiled: list[tuple[re.Pattern[str], Value]] = []
        for pattern, value in values.items():
            name = _literal_name(pattern)
            if name is not None:
                self._literal.setdefault(name, value)
            else:
                self._compiled.append((_compiled(pattern), value))

    @classmethod
    def of(cls, patterns: Iterable[object], value: Value) -> Patterns[Value]:
        """The same value for all of ``patterns``."""
        return cls({pattern: value for pattern in patterns if isinstance(pattern, str)})

    def get(self, name: str) -> Value | None:
        """The value of the first pattern that fits ``name``, literal ones first; None when none does."""
        if name in self._literal:
            return self._literal[name]
        return next((value for pattern, value in self._compiled if pattern.match(name)), None)


def _literal_name(pattern: str) -> str | None:
    if not (pattern.startswith("^") and pattern.endswith("$")):
        return None
    inner = pattern[1:-1]
    return None if _SPECIAL.search(_ESCAPED.sub("", inner)) else _ESCAPED.sub(r"\1", inner)


def _compiled(pattern: str) -> re.Pattern[str]:
    if len(pattern) > _MAX_LENGTH or _is_slow(pattern):
        raise Unsupported(f"the pattern {pattern[:80]!r} could take unbounded time to match, so it is not used")
    try:
        return re.compile(pattern)
    except re.error as error:
        raise FormatError(f"the pattern {pattern[:80]!r} is none: {error}") from error


def _is_slow(pattern: str) -> bool:
    r"""Whether a repeated group repeats or chooses inside, as in ``(a+)+`` and ``(a|aa)*``, or much is repeated.

    >>> _is_slow(r"(\d+\.)*x"), _is_slow(r"layers\.\d+\.(mlp|attn)\.w")
    (True, False)
    """
    open_groups: list[bool] = []  # whether something inside repeats or chooses
    n_repeats = 0
    closed_busy = False
    for atom in _ATOMS.findall(pattern):
        if atom in _REPEATS:
            n_repeats += 1
            if closed_busy or n_repeats > _MAX_REPEATS:
                return True
        closed_busy = False
        if atom == "(":
            open_groups.append(False)
        elif atom == ")" and open_groups:
            closed_busy = open_groups.pop()
            if open_groups:
                open_groups[-1] |= closed_busy
        elif open_groups and (atom in _REPEATS or atom in ("|", "?")):
            open_groups[-1] = True
    return False
