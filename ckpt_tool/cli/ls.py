"""``ckpt ls``: the steps of a run, which are complete, and which is the newest good one."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from ckpt_tool.cli.options import DEFAULT_MEMORY, Choice, Json, Memory, Quiet, Workers
from ckpt_tool.cli.output import output, write_lines
from ckpt_tool.cli.text import Span, line, wrap
from ckpt_tool.sizes import counted, parse_bytes

EXAMPLES = (
    "ckpt ls run",
    "ckpt ls s3://bucket/run --latest",
)

_NONE_COMPLETE = 1


class Level(Choice):
    """How much of each step is checked."""

    quick = "quick"
    default = "default"
    full = "full"


Run = Annotated[str, typer.Argument(metavar="RUN", help="Folder or URL that the steps lie in.")]
Verify = Annotated[
    Level | None,
    typer.Option("--verify", help="Verify each complete step; one with errors is not complete."),
]
Latest = Annotated[bool, typer.Option("--latest", help="Print only the newest complete step; exit 1 if there is none.")]


def ls(
    run: Run,
    *,
    latest: Latest = False,
    verify: Verify = None,
    memory: Memory = DEFAULT_MEMORY,
    workers: Workers = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """List the steps of a run, which are complete, and why not.

    Reads the listing, metadata files and the ends of local files; no payload without --verify.

    With --json: schema "ckpt-tool/ls/1": url, latest, steps [{path, url, step, complete, why, format, parts, layout,
    nbytes, files, modified, verified}], trackers [{path, names, says}], notes.
    """
    from ckpt_tool.api.runs.ls import ls as list_steps
    from ckpt_tool.cli.render_ls import run_lines

    sink = output(json=json, quiet=quiet)
    level = None if verify is None else verify.value
    found = list_steps(
        run, verify=level, latest=latest, memory_budget_bytes=parse_bytes(memory, of="--memory"), n_workers=workers
    )
    newest = found.latest
    sink.json(found.to_json() if json else {})
    if latest:
        if newest is None:
            steps = (
                f"none of {counted(len(found.steps), 'step')} is complete" if found.steps else "no step is there yet"
            )
            write_lines([line(Span("error: ", "bold red"), f"{run}: {steps}")], sys.stderr)
            raise typer.Exit(_NONE_COMPLETE)
        if not json:
            sys.stdout.write(f"{newest.url}\n")
        for note in found.notes:
            sink.talk(wrap(note, sink.width, Span("note: ", "yellow"), "  "))
        return
    sink.show(run_lines(found, now=time.time(), width=sink.width))
    sink.notes(found.notes)
    sink.values(f"{'complete' if step.is_complete else 'incomplete'} {step.url}" for step in found.steps)
