"""A hint for a name that is not there: the names beside it that look most alike."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from ckpt_tool.sizes import some_of

__all__ = ["did_you_mean"]

MAX_NAMES = 3


def did_you_mean(name: str, names: Iterable[str]) -> str | None:
    """A question with the nearest of ``names``, or a list of a few when none is near; None when there are none.

    >>> did_you_mean("step_10", ["step_100", "logs"])
    'did you mean step_100?'
    """
    known = sorted(names, key=lambda each: (each.startswith("."), each))  # a hidden file is seldom meant
    if not known:
        return None
    near = difflib.get_close_matches(name, known, n=MAX_NAMES, cutoff=0.6)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"beside it are: {some_of(known, MAX_NAMES)}"
