"""``ckpt verify``: is the checkpoint whole, and does it agree with itself."""

from __future__ import annotations

from typing import Annotated

import typer

from ckpt_tool.cli.options import DEFAULT_MEMORY, Json, Memory, Quiet, Source, Workers
from ckpt_tool.cli.output import output
from ckpt_tool.cli.progress import progress_bar
from ckpt_tool.cli.render_header import counted
from ckpt_tool.cli.text import Span, line
from ckpt_tool.errors import UsageError
from ckpt_tool.sizes import parse_bytes

_PROBLEMS_FOUND = 1

Record = Annotated[
    str | None,
    typer.Option(
        "--write-manifest",
        metavar="FILE",
        help="Record a digest of each tensor and file, if there is no error.",
        show_default=False,
    ),
]
Recorded = Annotated[
    str | None,
    typer.Option("--manifest", metavar="FILE", help="Compare each tensor with its digest there.", show_default=False),
]
Prefixes = Annotated[
    list[str] | None,
    typer.Option(
        "--strip-prefix",
        metavar="TEXT",
        help="With --manifest: take this off names on both sides. Repeatable.",
        show_default=False,
    ),
]
RequireAll = Annotated[
    bool, typer.Option("--require-all", help="With --manifest: a tensor that one side lacks is an error.")
]
Wide = Annotated[bool, typer.Option("--wide", help="With --write-manifest: 128-bit sums besides CRC-32.")]
Sha256 = Annotated[bool, typer.Option("--sha256", help="With --write-manifest: SHA-256 of files, not CRC-32.")]


def verify(
    source: Source,
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Listing and metadata only; no payload is touched.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Read every byte: checksums, NaN, zeros, replicas.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 for warnings too.")] = False,
    write_manifest: Record = None,
    manifest: Recorded = None,
    strip_prefix: Prefixes = None,
    require_all: RequireAll = False,
    wide: Wide = False,
    sha256: Sha256 = False,
    limit: Annotated[int, typer.Option(min=0, metavar="N", help="Findings shown of each kind, 0 for all.")] = 3,
    memory: Memory = DEFAULT_MEMORY,
    workers: Workers = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check that a checkpoint is whole and agrees with itself.

    Exit status 1 when there is an error, with --strict when there is a warning, else 0.

    --write-manifest records what each tensor holds in a small file, --manifest proves that a copy in any format and
    layout holds the same. Both read every tensor; neither is a signature.

    With --json: schema "ckpt-tool/verify/1": url, format, level, ok, seconds, counts {error, warning, info}, totals,
    groups [{kind, severity, count, tensors, files}], findings [{kind, severity, message, fqn, file, offset, length}].
    """
    from ckpt_tool.api.digest import digests
    from ckpt_tool.api.manifest_file import write_manifest as save
    from ckpt_tool.api.verify import verify as check
    from ckpt_tool.cli.render_findings import report_lines

    sink = output(json=json, quiet=quiet)
    if quick and full:
        raise UsageError("--quick and --full exclude each other", hint="leave both out for the level between them")
    if write_manifest and (quick or manifest):
        raise UsageError(f"--write-manifest and --{'quick' if quick else 'manifest'} exclude each other")
    if not write_manifest and (wide or sha256):
        raise UsageError("--wide and --sha256 are for --write-manifest")
    if manifest is None and (strip_prefix or require_all):
        raise UsageError("--strip-prefix and --require-all are for --manifest")
    level = "quick" if quick else "full" if full else "default"
    with progress_bar(sink, "checking") as moved:
        report = check(
            source, level=level, manifest=manifest, strip_prefixes=strip_prefix or (), require_all=require_all,
            memory_budget_bytes=parse_bytes(memory), n_workers=workers, progress=moved,
        )  # fmt: skip
    if sink.mode == "human":
        sink.show(report_lines(report, width=sink.width, limit=limit or None))
    sink.json(report.to_json() if json else {})
    sink.values(f"{group.severity.name.lower()} {group.kind} {group.count}" for group in report.groups())
    if write_manifest and not report.is_ok:
        sink.talk([line(Span("not written: ", "yellow"), f"{write_manifest}, because there are errors")])
    elif write_manifest:
        with progress_bar(sink, "recording") as moved:
            table = digests(
                source, wide=wide, files="sha256" if sha256 else "crc32", memory_budget_bytes=parse_bytes(memory),
                n_workers=workers, progress=moved,
            )  # fmt: skip
        save(table, write_manifest)
        counts = f"{counted(len(table.rows), 'tensor')}, {counted(len(table.files), 'file')}"
        sink.talk([line("wrote ", Span(write_manifest, "green"), f"  {counts}")])
    if not report.is_ok or (strict and report.counts["warning"]):
        raise typer.Exit(_PROBLEMS_FOUND)
