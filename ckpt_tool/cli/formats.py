"""``ckpt formats``: what can be read and written, and what that was proven with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_tool.cli.options import Json, Quiet
from ckpt_tool.cli.output import output
from ckpt_tool.cli.text import Cell, Line, Span, columns, line, width_of, wrap
from ckpt_tool.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt_tool.api.formats.table import FormatRow, Proof

EXAMPLES = (
    "ckpt formats",
    "ckpt formats dcp megatron-dist",
)

_MORE = "ckpt formats NAME tells how a format is recognised, and what it was tested with."
_NARROW = 40
"""Columns that what a format is needs beside the others; with fewer it goes below them."""


Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="[NAME]...", help="Formats to tell more of: how each is recognised, and what proves it."),
]


def formats(names: Names = None, *, json: Json = False, quiet: Quiet = False) -> None:
    """List what is read and written, and what proves it.

    With --json: schema "ckpt-tool/formats/1": formats [{name, reads, writes, what, proofs [{direction, program, what,
    evidence}], recognised}].
    """
    from ckpt_tool.api.formats.table import format_rows

    sink = output(json=json, quiet=quiet)
    rows = _named(format_rows(), names or [])
    sink.show(_table(rows, width=sink.width, in_full=bool(names)))
    if not names:
        sink.show([line(), *wrap(_MORE, sink.width)])
    sink.json({"schema": "ckpt-tool/formats/1", "formats": [row.to_json() for row in rows]})
    sink.values(row.name for row in rows)


def _named(rows: Sequence[FormatRow], names: Sequence[str]) -> Sequence[FormatRow]:
    """The rows that were asked for, all where none was.

    Raises:
        UsageError: no format has one of the names.
    """
    known = [row.name for row in rows]
    for name in names:
        if name not in known:
            raise UsageError(f"no format is called {name!r}", hint=f"one of: {' '.join(known)}")
    return [row for row in rows if row.name in names] if names else rows


def _table(rows: Sequence[FormatRow], *, width: int, in_full: bool) -> list[Line]:
    """A line for each format; where that is narrow, one more for what it is. ``in_full`` adds how it is told."""
    table: list[list[Cell]] = [[Span(head, "bold") for head in ("format", "read", "write")]]
    for row in rows:
        marks = [Span("yes", "green") if has else Span("-", "dim") for has in (row.reads, row.writes)]
        table.append([Span(row.name, "cyan"), *marks])
    heads, *firsts = columns(table, "lll")
    taken = max(map(width_of, [heads, *firsts])) + 2
    is_narrow = width - taken < _NARROW
    lines = [heads if is_narrow else line(heads, " " * (taken - width_of(heads)), Span("what it is", "bold"))]
    for first, row in zip(firsts, rows, strict=True):
        if is_narrow:
            lines += [first, *wrap(row.what, width, "    ", "    ")]
        else:
            lines += wrap(row.what, width, line(first, " " * (taken - width_of(first))), " " * taken)
        lines += _details(row, width) if in_full else []
    return lines


def _details(row: FormatRow, width: int) -> list[Line]:
    """What tells that a checkpoint has this format, and the programs that read and write it have met."""
    lines: list[Line] = []
    if row.recognised:
        lines += wrap(row.recognised, width, line("  ", Span("told by ", "dim")), "    ")
    for direction in ("reads", "writes for"):
        text = _programs([proof for proof in row.proofs if proof.direction == direction])
        lines += wrap(text, width, line("  ", Span(f"{direction} ", "dim")), "    ") if text else []
    return lines


def _programs(proofs: Sequence[Proof]) -> str:
    """Programs with what each did, in parentheses."""
    by_program: dict[str, list[str]] = {}
    for proof in proofs:
        by_program.setdefault(proof.program, []).extend([proof.what] if proof.what else [])
    return ", ".join(f"{name} ({', '.join(whats)})" if whats else name for name, whats in by_program.items())
