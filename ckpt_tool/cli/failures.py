"""A failure is shown as one line that says what is wrong, one that says what to do, and an exit status.

::

    error: run/step-500: an empty folder, no checkpoint
    hint: give one of the folders in "run"

With ``--json`` it is ``{"schema": "ckpt-tool/error/1", "error": {"kind", "message", "where", "hint", "exit_code"}}`` on
stderr; stdout stays empty.
Status: 0 fine, 1 verify found problems, 2 usage, 3 bad checkpoint or layout, 4 storage, 130 interrupted, 141 the reader
of the output went away. Only errors that are raised on purpose are shown like this: everything else is a bug, and keeps
its traceback; ``CKPT_DEBUG=1`` shows that of the others too. Knows exceptions; knows nothing of checkpoints.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from ckpt_tool.cli.output import write_lines
from ckpt_tool.cli.text import Line, Span, line
from ckpt_tool.cli.usage import said_of_usage
from ckpt_tool.errors import CkptError

__all__ = ["BROKEN_PIPE", "INTERRUPTED", "failure", "interruptions", "reported"]

INTERRUPTED = 130  # 128 + SIGINT, as shells report it
BROKEN_PIPE = 141  # 128 + SIGPIPE, as a program ends that does not handle it


def failure(error: CkptError) -> dict[str, Any]:
    """What ``--json`` prints of an error.

    >>> from ckpt_tool.errors import NotFound
    >>> failure(NotFound("nothing there", where="run"))["error"]["kind"]
    'not-found'
    """
    named = type(error)
    if isinstance(error, LookupError) and named.__base__ is not None:  # finer for programs, the same for who reads
        named = named.__base__
    kind = re.sub(r"(?<!^)(?=[A-Z])", "-", named.__name__).lower()
    return _record(kind, error.message, error.exit_code, where=error.where, hint=error.hint)


def _record(kind: str, message: str, code: int, *, where: str | None = None, hint: str | None = None) -> dict[str, Any]:
    found = {"kind": kind, "message": message, "where": where, "hint": hint, "exit_code": code}
    return {"schema": "ckpt-tool/error/1", "error": found}


@contextmanager
def interruptions() -> Iterator[None]:
    """Turns Ctrl-C and a closed pipe into an exit with their status; they would otherwise be swallowed by typer."""
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt:
        write_lines([line(Span("interrupted", "red"))], sys.stderr)
        _exit(INTERRUPTED)
    except BrokenPipeError:
        # The interpreter flushes stdout once more when it ends, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        _exit(BROKEN_PIPE)


@contextmanager
def reported(*, as_json: bool) -> Iterator[None]:
    """Prints an error that was raised on purpose and exits with its status; others pass."""
    try:
        yield
    except CkptError as error:
        if os.environ.get("CKPT_DEBUG"):
            raise
        _show(failure(error), as_json=as_json)
        _exit(error.exit_code)
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError" and not as_json:  # `ckpt` alone: help is the answer
            sys.stderr.write(f"{error}\n")
            _exit(2)
        usage = _usage(error)
        if usage is None:
            raise
        _show(usage, as_json=as_json)
        _exit(2)


def _usage(error: Exception) -> dict[str, Any] | None:
    """The record of an error of typer's parser, None for any other.

    Told by what it can do: typer brings a parser of its own since 0.26 and used click's before, so the class has no
    fixed place.
    """
    describe = getattr(error, "format_message", None)
    if describe is None or not hasattr(error, "exit_code"):
        return None
    context = getattr(error, "ctx", None)
    said, hint = said_of_usage(str(describe()), context.command_path if context is not None else "ckpt")
    return _record("usage-error", said, 2, hint=hint)


def _show(record: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        sys.stderr.write(json.dumps(record, ensure_ascii=False) + "\n")
        return
    found = record["error"]
    place = f"{found['where']}: " if found["where"] else ""
    lines = _said(line(Span("error: ", "bold red"), place), found["message"])
    if found["hint"]:
        lines += _said(line(Span("hint: ", "bold cyan")), found["hint"])
    write_lines(lines, sys.stderr)


def _said(start: Line, text: str) -> list[Line]:
    """Lines of a text that may have several, as a list of names or a rules file to paste."""
    first, *others = text.split("\n")
    return [line(start, first), *(line(other) for other in others)]


def _exit(code: int) -> NoReturn:
    raise SystemExit(code)
