"""``ckpt formats``: what can be read and written, and what that was proven with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tool.cli.options import Json, Quiet
from ckpt_tool.cli.output import output
from ckpt_tool.cli.text import Cell, Span, fitted, line, wrap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckpt_tool.api.formats.table import Proof

EXAMPLES = (
    "ckpt formats",
    "ckpt formats --json",
)


def formats(*, json: Json = False, quiet: Quiet = False) -> None:
    """List what is read and written, and what proves it.

    With --json: schema "ckpt-tool/formats/1": formats [{name, reads, writes, what, proofs [{direction, program, what,
    evidence}], recognised}].
    """
    from ckpt_tool.api.formats.table import format_rows

    sink = output(json=json, quiet=quiet)
    rows = format_rows()
    heads = [Span(head, "bold") for head in ("format", "read", "write", "what it is")]
    table: list[list[Cell]] = [[*heads]]
    for row in rows:
        marks = [Span("yes", "green") if has else Span("-", "dim") for has in (row.reads, row.writes)]
        table.append([Span(row.name, "cyan"), *marks, row.what])
    first, *lines = fitted(table, "llll", sink.width)
    sink.show(first)
    for found, row in zip(lines, rows, strict=True):
        sink.show(found)
        if row.recognised:
            sink.show(wrap(row.recognised, sink.width, line("  ", Span("told by ", "dim")), "    "))
        for direction in ("reads", "writes for"):
            text = _programs([proof for proof in row.proofs if proof.direction == direction])
            sink.show(wrap(text, sink.width, line("  ", Span(f"{direction} ", "dim")), "    ") if text else [])
    sink.json({"schema": "ckpt-tool/formats/1", "formats": [row.to_json() for row in rows]})
    sink.values(row.name for row in rows)


def _programs(proofs: Sequence[Proof]) -> str:
    """Programs with what each did, in parentheses."""
    by_program: dict[str, list[str]] = {}
    for proof in proofs:
        by_program.setdefault(proof.program, []).extend([proof.what] if proof.what else [])
    return ", ".join(f"{name} ({', '.join(whats)})" if whats else name for name, whats in by_program.items())
