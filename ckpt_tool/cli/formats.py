"""``ckpt formats``: what can be read and written, and what that was proven with."""

from __future__ import annotations

from ckpt_tool.cli.options import Json, Quiet
from ckpt_tool.cli.output import output
from ckpt_tool.cli.text import Span, columns


def formats(*, json: Json = False, quiet: Quiet = False) -> None:
    """List what is read and written, and what proves it.

    With --json: {"schema": 1, "formats": [{name, reads, writes, what, proofs: [{direction, program, evidence}]}]}.
    """
    from ckpt_tool.api.formats_table import format_rows

    sink = output(json=json, quiet=quiet)
    rows = format_rows()
    table = [[Span(head, "bold") for head in ("format", "read", "write", "what it is", "proven with")]]
    for row in rows:
        marks = [Span("yes", "green") if has else Span("-", "dim") for has in (row.reads, row.writes)]
        for at, proof in enumerate(map(str, row.proofs or ("",))):
            first = [Span(row.name, "cyan"), *marks, Span(row.what)] if at == 0 else [Span("")] * 4
            table.append([*first, Span(proof, "dim")])
    sink.show(columns(table, "lllll"))
    sink.json({"schema": 1, "formats": [row.to_json() for row in rows]})
    sink.values(row.name for row in rows)
