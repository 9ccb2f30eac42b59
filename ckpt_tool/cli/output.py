"""The sink of a command: results go to stdout, talk to stderr, each as a person, a program or a script wants it.

Three modes. ``human``: tables and sentences, coloured on a terminal. ``json`` (``--json``): one JSON document on
stdout. ``quiet`` (``--quiet``): bare values on stdout. Only a person is talked to; the others find errors alone on
stderr (and a progress bar, where that is a terminal and ``--quiet`` is not given).

Colour follows each stream by itself: ``NO_COLOR`` turns it off, ``FORCE_COLOR`` on, otherwise a terminal has it. Knows
nothing of checkpoints.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any, Literal

from ckpt_tool.api.traffic import current_traffic
from ckpt_tool.cli.text import Line, Span, harmless, paint, plain, wrap
from ckpt_tool.errors import UsageError
from ckpt_tool.records import dataclass

__all__ = ["Output", "document", "has_colour", "output", "terminal_width", "write_lines"]

Mode = Literal["human", "json", "quiet"]
_WIDTH_OF_A_FILE = 120


def has_colour(stream: IO[str]) -> bool:
    """Whether ANSI codes may be written to ``stream`` (https://no-color.org, https://force-color.org)."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def terminal_width() -> int:
    """Columns to fill: those of the terminal or of ``COLUMNS``; 120 for a pipe or a file."""
    return max(shutil.get_terminal_size((_WIDTH_OF_A_FILE, 24)).columns, 40)


def document(value: Mapping[str, Any]) -> Iterator[str]:
    """``value`` as JSON text in pieces: a line for each key, and for each element of a list of objects.

    >>> print("".join(document({"format": "npz", "rows": [{"a": 1}, {"a": 2}]})))
    {
      "format": "npz",
      "rows": [
        {"a": 1},
        {"a": 2}
      ]
    }
    """
    separator = "{\n"
    for key, found in value.items():
        yield f"{separator}  {json.dumps(key)}: "
        separator = ",\n"
        if isinstance(found, list | tuple) and found and all(isinstance(item, dict | list) for item in found):
            inner = "[\n"
            for item in found:
                yield f"{inner}    {_text(item)}"
                inner = ",\n"
            yield "\n  ]"
        else:
            yield _text(found)
    yield "\n}" if value else "{}"


def _text(value: Any) -> str:
    """``value`` as JSON; NaN and infinities, which JSON cannot say, as the texts ``nan``, ``inf`` and ``-inf``."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True, slots=True)
class Output:
    """Where a command's results and talk go."""

    mode: Mode

    @property
    def width(self) -> int:
        """Columns to fill."""
        return terminal_width()

    def show(self, lines: Iterable[Line]) -> None:
        """Print lines as the result, when a person reads it."""
        if self.mode == "human":
            write_lines(lines, sys.stdout)

    def json(self, value: Mapping[str, Any]) -> None:
        """Print a document as the result, when a program reads it; ``traffic`` is in it where storage was remote."""
        if self.mode == "json":
            traffic = current_traffic()
            extra = {"traffic": traffic.to_json()} if traffic.n_requests else {}
            sys.stdout.writelines(document({**value, **extra}))
            sys.stdout.write("\n")

    def values(self, values: Iterable[str]) -> None:
        """Print bare values as the result, one a line, when a script reads it."""
        if self.mode == "quiet":
            sys.stdout.writelines(f"{value}\n" for value in values)

    def talk(self, lines: Iterable[Line]) -> None:
        """Print lines beside the result, when a person reads them: a program finds errors alone on stderr."""
        if self.mode == "human":
            sys.stdout.flush()
            write_lines(lines, sys.stderr)

    def notes(self, notes: Iterable[str]) -> None:
        """Print what a person should know besides, each wrapped, after a result that a person reads."""
        for note in notes:
            self.show(wrap(note, self.width, Span("note: ", "yellow"), "  "))


def output(*, json: bool, quiet: bool) -> Output:
    """The sink that ``--json`` and ``--quiet`` ask for.

    Raises:
        UsageError: both at once.
    """
    if json and quiet:
        raise UsageError("--json and --quiet exclude each other", hint="--json prints nothing but the document")
    return Output("json" if json else "quiet" if quiet else "human")


def write_lines(lines: Iterable[Line], stream: IO[str]) -> None:
    """Write lines to a stream, coloured where it has colour."""
    text = paint if has_colour(stream) else plain
    stream.writelines(f"{text(harmless(found))}\n" for found in lines)
