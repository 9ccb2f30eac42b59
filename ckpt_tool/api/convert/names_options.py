"""What the user says of names of a family: which, by which rules, with which numbers."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ckpt_tool.api.arguments import read_option_file
from ckpt_tool.errors import UsageError
from ckpt_tool.records import dataclass

__all__ = ["NamesOptions", "check_asked", "check_used", "names_options"]


@dataclass(frozen=True, slots=True)
class NamesOptions:
    """What the user says of names."""

    family: str = "auto"
    """``auto``, ``none``, or the family whose names are wanted."""
    naming: tuple[str, str] | None = None
    """A file of rules that go before the family's: its path and its text."""
    facts: Mapping[str, int] | None = None
    true_vocab: int | None = None


def names_options(
    family: str, naming: str | os.PathLike[str] | None, facts: Mapping[str, int] | None, true_vocab: int | None
) -> NamesOptions:
    """Options as commands take them; ``naming`` is the path of a local file.

    Raises:
        UsageError: it cannot be read.
    """
    if naming is None:
        return NamesOptions(family, None, facts, true_vocab)
    return NamesOptions(family, (os.fspath(naming), read_option_file(naming, "naming")), facts, true_vocab)


def check_asked(options: NamesOptions, *, is_asked: bool) -> None:
    """Nothing, where names are asked for, or the user says nothing of them.

    Raises:
        UsageError: something is said that nobody would look at.
    """
    said = [f"--family {options.family}"] if options.family not in ("auto", "none") else []
    said += [] if options.naming is None else [f"--naming {options.naming[0]}"]
    said += _given(options)
    if said and not is_asked:
        raise UsageError(f"{said[0]} is about other names, which are not asked for", hint="add --names hf")


def check_used(options: NamesOptions) -> None:
    """Nothing, where the user says nothing of names; to be asked where no naming is known to take it.

    Raises:
        UsageError: facts or a number of rows were given.
    """
    given = _given(options)
    if given:
        raise UsageError(
            f"{given[0]} is about the names of a family, but none is known to fit",
            hint="name the family with --family, or give rules with --naming FILE",
        )


def _given(options: NamesOptions) -> list[str]:
    """Numbers that the user gives, as they are typed."""
    given = [f"--fact {name}={value}" for name, value in (options.facts or {}).items()]
    return given + ([] if options.true_vocab is None else [f"--true-vocab {options.true_vocab}"])
