"""Arguments of a call, as a program gives them, and of a training run, as a user types them."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Collection, Iterable
from typing import Any

from ckpt_tool.errors import UsageError

__all__ = ["check_arguments", "check_files", "parse_arguments", "parse_facts", "read_option_file"]


def check_arguments(**given: tuple[object, Collection[object] | int]) -> None:
    """Every argument has one of the values beside it; beside a number it is a whole one that is not below, or None.

    Raises:
        UsageError: one has another.
    """
    for name, (value, allowed) in given.items():
        if not isinstance(allowed, int):
            if value not in allowed:
                raise UsageError(f"{name} has no {value!r}", hint=f"one of: {' '.join(map(str, allowed))}")
        elif value is not None:
            if isinstance(value, bool) or not hasattr(value, "__index__"):
                raise UsageError(f"{name} is a whole number, got {value!r}")
            if operator.index(value) < allowed:
                raise UsageError(f"{name} is at least {allowed}, got {value}")


def read_option_file(path: str | os.PathLike[str], name: str) -> str:
    """The text of a local file that an argument of this name says something with.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else f"it is no text in UTF-8: {error}"
        raise UsageError(f"the {name} file cannot be read: {why}", where=os.fspath(path)) from error


def check_files(**given: str | os.PathLike[str] | None) -> None:
    """Every file that an argument names can be read, also where a call has no use for it.

    Raises:
        UsageError: one cannot.
    """
    for name, path in given.items():
        if path is not None:
            read_option_file(path, name)


def parse_arguments(texts: Iterable[str]) -> dict[str, Any]:
    """Arguments as they are typed; values are JSON, or else text.

    >>> parse_arguments(["seq_length=4096", "transformer_impl=local", "swiglu=true"])
    {'seq_length': 4096, 'transformer_impl': 'local', 'swiglu': True}

    Raises:
        UsageError: one is not ``NAME=VALUE``.
    """
    found: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not (name.isidentifier() and separator):
            raise UsageError(f"an argument is NAME=VALUE, got {text!r}", hint="for example --arg seq_length=4096")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def parse_facts(texts: Iterable[str]) -> dict[str, int]:
    """Facts as they are typed.

    >>> parse_facts(["heads=32", "kv_heads=8"])
    {'heads': 32, 'kv_heads': 8}

    Raises:
        UsageError: one is not ``NAME=N``.
    """
    facts: dict[str, int] = {}
    for text in texts:
        name, _, number = text.partition("=")
        if not (name.isidentifier() and number.isdecimal()):
            raise UsageError(f"a fact is NAME=N, got {text!r}", hint="for example --fact heads=32")
        facts[name] = int(number)
    return facts
