"""``ckpt clean``: leftovers of killed saves and conversions in a run, listed, and removed on request."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from ckpt_tool.cli.options import Json, Quiet
from ckpt_tool.cli.output import output
from ckpt_tool.cli.render_ls import age
from ckpt_tool.cli.text import Span, line
from ckpt_tool.sizes import counted, format_bytes

EXAMPLES = (
    "ckpt clean run",
    "ckpt clean run --delete",
)

Run = Annotated[
    str,
    typer.Argument(metavar="RUN", help="Folder that the steps lie in: a path, or a URL of S3 or HDFS."),
]
Delete = Annotated[bool, typer.Option("--delete", help="Remove them; without it they are only listed.")]
MinAge = Annotated[
    int, typer.Option("--min-age", metavar="MINUTES", min=0, help="Leave what was written to within so many minutes.")
]


def clean(run: Run, *, delete: Delete = False, min_age: MinAge = 10, json: Json = False, quiet: Quiet = False) -> None:
    """List what killed saves and conversions left behind; remove it.

    Looks only at folders that this tool has marked as unfinished, and removes them with --delete only. Checkpoints are
    not touched, complete or not.

    With --json: schema "ckpt-tool/clean/1": url, removed, leftovers [{path, nbytes, n_files, modified, is_recent}].
    """
    from ckpt_tool.api.runs.clean import clean as find

    sink = output(json=json, quiet=quiet)
    found = find(run, dry_run=not delete, min_age_s=60.0 * min_age)
    sink.json(found.to_json() if json else {})
    now = time.time()
    lines = [
        line(
            Span(f"  {format_bytes(each.nbytes):>9}  {age(now - each.modified):>6}  "),
            Span(each.path),
            Span(f"  written to within {min_age} minutes: left" if each.is_recent else "", "dim"),
        )
        for each in found.leftovers
    ]
    old = [each for each in found.leftovers if not each.is_recent]
    nbytes = format_bytes(sum(each.nbytes for each in old))
    if not found.leftovers:
        ending = "nothing left over"
    elif not old:
        ending = "nothing to remove yet: --min-age 0 takes these too"
    elif found.removed:
        ending = f"removed {counted(len(old), 'folder')}, {nbytes}"
    else:
        ending = f"{counted(len(old), 'folder')} to remove, {nbytes}: add --delete"
    sink.show([*lines, line(ending)])
    sink.values(each.path for each in old)
