"""``ckpt verify``: is the checkpoint whole, and does it agree with itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt_tool.cli.options import DEFAULT_MEMORY, Json, Memory, Quiet, Source, Workers
from ckpt_tool.cli.output import Output, output
from ckpt_tool.cli.progress import progress_bar
from ckpt_tool.cli.text import Span, line
from ckpt_tool.errors import UsageError
from ckpt_tool.sizes import counted, parse_bytes

if TYPE_CHECKING:
    from ckpt_tool.api.trust.fetch import FetchPlan

EXAMPLES = (
    "ckpt verify run/step-500 --full",
    "ckpt verify run/step-500 --write-manifest step-500.json",
    "ckpt verify copy/of/step-500 --manifest step-500.json",
    "ckpt verify run/step-500 --salvage saved --like run/step-400",
)

_PROBLEMS_FOUND = 1

Record = Annotated[
    str | None,
    typer.Option(
        "--write-manifest",
        metavar="FILE",
        help="Record a digest of each tensor and file, if there is no error.",
    ),
]
Recorded = Annotated[
    str | None,
    typer.Option("--manifest", metavar="FILE", help="Compare each tensor with its digest there."),
]
Prefixes = Annotated[
    list[str] | None,
    typer.Option(
        "--strip-prefix",
        metavar="TEXT",
        help="With --manifest: take this off names on both sides. Repeatable.",
    ),
]
RequireAll = Annotated[
    bool, typer.Option("--require-all", help="With --manifest: a tensor that one side lacks is an error.")
]
Wide = Annotated[bool, typer.Option("--wide", help="With --write-manifest: 128-bit sums besides CRC-32.")]
Sha256 = Annotated[bool, typer.Option("--sha256", help="With --write-manifest: SHA-256 of files, not CRC-32.")]


Against = Annotated[
    str | None,
    typer.Option("--against", metavar="OTHER", help="Compare with another checkpoint, bit by bit."),
]
SalvageTo = Annotated[
    str | None,
    typer.Option("--salvage", metavar="OUT", help="Write every tensor that is still wholly readable to OUT."),
]
Like = Annotated[
    str | None,
    typer.Option(
        metavar="STEP",
        help="With --salvage: another step of the run, to tell names and places where they are lost here.",
    ),
]
PlanFetch = Annotated[
    bool, typer.Option("--plan-fetch", help="Print only the files, or FILE FIRST-LAST bytes, to fetch again.")
]


def verify(
    source: Source,
    *,
    quick: Annotated[bool, typer.Option("--quick", help="Listing, metadata and headers; no payload is read.")] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Read every byte: checksums, NaN, zeros, repeats, replicas.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 for warnings too.")] = False,
    write_manifest: Record = None,
    manifest: Recorded = None,
    strip_prefix: Prefixes = None,
    require_all: RequireAll = False,
    wide: Wide = False,
    sha256: Sha256 = False,
    against: Against = None,
    salvage: SalvageTo = None,
    like: Like = None,
    plan_fetch: PlanFetch = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="With --salvage: replace what is there.")] = False,
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

    --salvage reads every byte and writes what is still good: of files that were cut, of folders that lack files, of DCP
    without .metadata; OUT.salvage.json lists what is kept and lost. Exit status 0 when nothing is lost, 1 when
    something is, or when nothing that is left can tell (names without .metadata, what a missing file held). --like STEP
    takes names and places from another step where they are lost, says what speaks for them, and borrows no value.

    With --json: schema "ckpt-tool/verify/1": url, format, level, ok, seconds, counts {error, warning, info}, totals,
    groups [{kind, severity, count, tensors, files}], findings [{kind, severity, message, fqn, file, offset, length}],
    unproven_files [without any recorded checksum], next [commands for what is lost].
    With --plan-fetch: schema "ckpt-tool/fetch/1": fetch [{file, offset, length}], notes; length null for the rest, both
    for the whole file.
    With --salvage: schema "ckpt-tool/salvage/1": source, format, target, kept, lost [{fqn, why}], unknown,
    borrowed.
    """
    from ckpt_tool.api.trust.verify import verify as check
    from ckpt_tool.cli.render_findings import report_lines

    sink = output(json=json, quiet=quiet)
    _check_options(
        quick=quick, full=full, writes=bool(write_manifest), is_wide=wide or sha256, compares=bool(manifest or against),
        pairs=bool(strip_prefix or require_all), salvages=bool(salvage), overwrite=overwrite, plan_fetch=plan_fetch,
        has_like=like is not None,
    )  # fmt: skip
    if write_manifest:
        from ckpt_tool.api.manifest_file import check_manifest

        check_manifest(write_manifest)
    if salvage:
        _salvage(sink, source, salvage, like=like, overwrite=overwrite, memory=memory, workers=workers)
        return
    options: dict[str, Any] = {
        "level": "quick" if quick else "full" if full else "default", "manifest": manifest,
        "strip_prefixes": strip_prefix or (), "require_all": require_all, "against": against,
        "memory_budget_bytes": parse_bytes(memory, of="--memory"), "n_workers": workers,
    }  # fmt: skip
    if plan_fetch:
        from ckpt_tool.api.trust.fetch import plan_fetch as plan

        with progress_bar(sink, "checking") as moved:
            planned = plan(source, **options, progress=moved)
        _show_fetch(sink, planned)
        return
    with progress_bar(sink, "checking") as moved:
        report = check(source, **options, progress=moved)
    if sink.mode == "human":
        sink.show(report_lines(report, width=sink.width, limit=limit or None))
    sink.json(report.to_json() if json else {})
    sink.values(f"{group.severity.name.lower()} {group.kind} {group.count}" for group in report.groups())
    if write_manifest and not report.is_ok:
        sink.talk([line(Span("not written: ", "yellow"), f"{write_manifest}, because there are errors")])
    elif write_manifest:
        from ckpt_tool.api.digest import digests
        from ckpt_tool.api.manifest_file import write_manifest as save

        with progress_bar(sink, "recording") as moved:
            table = digests(
                source, wide=wide, files="sha256" if sha256 else "crc32",
                memory_budget_bytes=parse_bytes(memory, of="--memory"), n_workers=workers, progress=moved,
            )  # fmt: skip
        save(table, write_manifest)
        counts = f"{counted(len(table.rows), 'tensor')}, {counted(len(table.files), 'file')}"
        sink.talk([line("wrote ", Span(write_manifest, "green"), f"  {counts}")])
    if not report.is_ok or (strict and report.counts["warning"]):
        raise typer.Exit(_PROBLEMS_FOUND)


def _check_options(
    *,
    quick: bool,
    full: bool,
    writes: bool,
    is_wide: bool,
    compares: bool,
    pairs: bool,
    salvages: bool,
    overwrite: bool,
    plan_fetch: bool,
    has_like: bool,
) -> None:
    """Raise where options do not go together."""
    if quick and full:
        raise UsageError("--quick and --full exclude each other", hint="leave both out for the level between them")
    if writes and (quick or compares):
        other = "--quick" if quick else "--manifest or --against"
        raise UsageError(f"--write-manifest and {other} exclude each other")
    if not writes and is_wide:
        raise UsageError("--wide and --sha256 are for --write-manifest")
    if not compares and pairs:
        raise UsageError("--strip-prefix and --require-all are for --manifest and --against")
    if (overwrite or has_like) and not salvages:
        raise UsageError(f"{'--overwrite' if overwrite else '--like'} is for --salvage")
    if salvages and (quick or compares or writes or plan_fetch):
        raise UsageError("--salvage does not go with other kinds of verification")


def _show_fetch(sink: Output, plan: FetchPlan) -> None:
    """A line for each file or range to fetch again, whatever the mode: the list is the result."""
    texts = [
        each.path if each.length == 0 else f"{each.path} {each.offset}-{each.end - 1 if each.length > 0 else ''}"
        for each in plan.ranges
    ]
    sink.show(line(text) for text in texts)
    sink.values(texts)
    sink.json(plan.to_json())
    sink.talk([line(Span("note: ", "yellow"), note) for note in plan.notes])
    if not plan.is_ok:
        raise typer.Exit(_PROBLEMS_FOUND)


def _salvage(
    sink: Output, source: str, target: str, *, like: str | None, overwrite: bool, memory: str, workers: int | None
) -> None:
    from ckpt_tool.api.trust.salvage import salvage
    from ckpt_tool.cli.render_salvage import salvage_lines

    with progress_bar(sink, "reading") as moved:
        done = salvage(
            source, target, like=like, overwrite=overwrite,
            memory_budget_bytes=parse_bytes(memory, of="--memory"), n_workers=workers, progress=moved,
        )  # fmt: skip
    sink.show(salvage_lines(done, width=sink.width))
    sink.json(done.to_json())
    sink.values([done.result.target_url])
    if not done.is_all:
        raise typer.Exit(_PROBLEMS_FOUND)
