"""The common end of ``reshard``, ``export`` and ``plan``: show the plan, or run it and say what came out.

Everything that the target will not have like the source (dropped, cast, assumed) is part of the result, not talk.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ckpt_tool.cli.output import Output
from ckpt_tool.cli.progress import progress_bar
from ckpt_tool.cli.render_plan import cast_lines, drop_lines, mesh_text, plan_lines, result_lines
from ckpt_tool.cli.text import Span, line, wrap
from ckpt_tool.errors import UsageError
from ckpt_tool.sizes import format_bytes

if TYPE_CHECKING:
    from ckpt_tool.api.convert.conversion import Conversion, ConversionResult

_RESUME = "the same command with --resume goes on where this one stopped"

__all__ = ["digest_place", "run_conversion"]


def digest_place(digest: bool, write_manifest: str | None) -> str | None:
    """Where digests go, as ``Running`` has it.

    Raises:
        UsageError: they are to be written, and not to be taken.
    """
    if write_manifest is not None and not digest:
        raise UsageError("--no-digest takes no digests for --write-manifest", hint="leave one of them out")
    return write_manifest or ("beside" if digest else None)


def _show_plan(sink: Output, conversion: Conversion) -> None:
    """Print what would be done. With --json the document is `Conversion.summary`'s."""
    sink.show(plan_lines(conversion, width=sink.width))
    _show_differences(sink, conversion)
    if conversion.is_in_the_way:
        sink.notes([f"{conversion.target_url} is there already: the run needs --overwrite, which replaces it"])
    sink.json(conversion.summary())


def _save_plan(sink: Output, conversion: Conversion, path: str) -> None:
    """Write every byte range of the plan as JSON; ``-`` is stdout.

    Raises:
        UsageError: stdout is taken by another document; or the file is here and is no plan.
        StorageError: the file cannot be written.
    """
    if path == "-":
        if sink.mode != "quiet":
            raise UsageError("--plan-json - needs stdout for the plan alone", hint="add --quiet, or name a file")
        sys.stdout.writelines(conversion.plan_json())
        return
    conversion.save_plan(path)


def run_conversion(sink: Output, conversion: Conversion, *, dry_run: bool, plan_json: str | None) -> None:
    """Show the plan and, unless it is a dry run, write the target. With --json: `ConversionResult.to_json`."""
    share = conversion.execution.share
    is_first = share is None or share.index == 0
    with conversion.checkpoint:
        if not is_first and dry_run:
            return  # the first process shows the plan
        if plan_json is not None and is_first:
            _save_plan(sink, conversion, plan_json)
        if dry_run:
            _show_plan(sink, conversion)
            sink.values([] if plan_json == "-" else [conversion.plan.fingerprint])
            return
        stats = conversion.plan.stats
        formats = f"{conversion.plan.source.format} to {conversion.plan.target.format}, {mesh_text(conversion.mesh)}"
        memory = format_bytes(conversion.peak_memory_bytes)
        said = f"{formats}: {format_bytes(stats.written_nbytes)} with at most {memory} of buffers"
        sink.talk(wrap(said, sink.width, indent="  "))
        try:
            with progress_bar(sink, "writing") as moved:
                result = conversion.run(moved)
        except KeyboardInterrupt:
            sink.talk([line(Span("hint: ", "bold cyan"), _RESUME)])
            raise
    if not is_first:
        written = format_bytes(result.report.written_nbytes)
        sink.talk([line(f"{share}: {written} written; the first process completes {result.target_url}")])
        return
    sink.show(result_lines(result, conversion.mesh, width=sink.width))
    _show_differences(sink, conversion, result)
    sink.json(result.to_json())
    sink.values([] if plan_json == "-" else [result.target_url])


def _show_differences(sink: Output, conversion: Conversion, result: ConversionResult | None = None) -> None:
    casts = [(cast.fqn, cast.source.name, cast.target.name) for cast in conversion.casts]
    sink.show(cast_lines(casts, () if result is None else result.report.casts, width=sink.width))
    sink.show(drop_lines(conversion.dropped, width=sink.width))
    sink.notes(conversion.notes if result is None else result.notes)
