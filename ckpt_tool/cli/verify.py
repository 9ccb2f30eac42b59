"""``ckpt verify``: is the checkpoint whole, and does it agree with itself."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpt_tool.cli.options import DEFAULT_MEMORY, Json, Memory, Quiet, Source, Workers
from ckpt_tool.cli.output import output
from ckpt_tool.cli.progress import progress_bar
from ckpt_tool.errors import UsageError
from ckpt_tool.sizes import parse_bytes

_PROBLEMS_FOUND = 1


def verify(
    source: Source,
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Listing and metadata only; no payload is touched.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Read every byte: checksums, NaN, zeros, replicas.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 for warnings too.")] = False,
    limit: Annotated[int, typer.Option(min=0, metavar="N", help="Findings shown of each kind, 0 for all.")] = 3,
    memory: Memory = DEFAULT_MEMORY,
    workers: Workers = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check that a checkpoint is whole and agrees with itself.

    Exit status 1 when there is an error, with --strict when there is a warning, else 0.

    With --json: schema "ckpt-tool/verify/1": url, format, level, ok, seconds, counts {error, warning, info}, totals,
    groups [{kind, severity, count, tensors, files}], findings [{kind, severity, message, fqn, file, offset, length}].
    """
    from ckpt_tool.api.verify import verify as check
    from ckpt_tool.cli.render_findings import report_lines

    sink = output(json=json, quiet=quiet)
    if quick and full:
        raise UsageError("--quick and --full exclude each other", hint="leave both out for the level between them")
    level = "quick" if quick else "full" if full else "default"
    with progress_bar(sink, "checking") as moved:
        report = check(source, level=level, memory_budget_bytes=parse_bytes(memory), n_workers=workers, progress=moved)
    if sink.mode == "human":
        sink.show(report_lines(report, width=sink.width, limit=limit or None))
    sink.json(report.to_json() if json else {})
    sink.values(f"{group.severity.name.lower()} {group.kind} {group.count}" for group in report.groups())
    if not report.is_ok or (strict and report.counts["warning"]):
        raise typer.Exit(_PROBLEMS_FOUND)
