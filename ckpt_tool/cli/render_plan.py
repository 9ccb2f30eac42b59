"""A plan and its outcome as text: what is read and written, and everything that will differ from the source."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ckpt_tool.cli.text import Line, Span, line, wrap
from ckpt_tool.sizes import counted, format_bytes, some_of

if TYPE_CHECKING:
    from ckpt_tool.api.convert.conversion import Conversion, ConversionResult, Dropped
    from ckpt_tool.engine.base import CastReport
    from ckpt_tool.layout.mesh import Mesh

__all__ = ["cast_lines", "drop_lines", "mesh_text", "plan_lines", "result_lines"]

_LABEL_WIDTH = 9


def mesh_text(mesh: Mesh | None) -> str:
    """Ranks and axes, those of size 1 left out."""
    if mesh is None:
        return "whole tensors"
    sizes = [f"{axis}={size}" for axis, size in zip(mesh.axes, mesh.sizes, strict=True) if size > 1]
    ranks = counted(mesh.world_size, "rank")
    return f"{ranks}, mesh {' '.join(sizes)}" if sizes else ranks


def plan_lines(conversion: Conversion, *, width: int) -> list[Line]:
    """What a run would do: from what to what, bytes, requests, memory."""
    stats = conversion.plan.stats
    source, target = conversion.plan.source, conversion.plan.target
    factor = stats.read_nbytes / stats.needed_nbytes if stats.needed_nbytes else 1.0
    size = f"{format_bytes(stats.target_nbytes)} ({counted(stats.target_nbytes, 'byte')})"
    facts = [
        ("from", f"{source.format}, {counted(stats.n_tensors, 'tensor')} in {counted(stats.n_source_files, 'file')}"),
        (
            "to",
            f"{target.format}, {mesh_text(conversion.mesh)}, {counted(stats.n_target_files, 'file')}, {size}",
        ),
        (
            "read",
            f"{format_bytes(stats.read_nbytes)} in {counted(stats.n_reads, 'request')}, {factor:.2f} times the need",
        ),
        ("write", f"{format_bytes(stats.written_nbytes)} in {counted(stats.n_writes, 'request')}"),
        ("memory", f"at most {format_bytes(conversion.peak_memory_bytes)} of buffers"),
    ]
    lines: list[Line] = []
    for label, text in facts:
        lines += wrap(text, width, line("  ", Span(label.ljust(_LABEL_WIDTH), "cyan")), " " * (_LABEL_WIDTH + 2))
    return lines


def result_lines(result: ConversionResult, mesh: Mesh | None, *, width: int) -> list[Line]:
    """What a run wrote, and how fast."""
    report = result.report
    rate = f", {format_bytes(round(report.written_nbytes / report.seconds))}/s" if report.seconds > 0 else ""
    besides = f"; {format_bytes(report.resumed_nbytes)} were there already" if report.resumed_nbytes else ""
    besides += f"; {format_bytes(report.shared_nbytes)} in blocks of the source" if report.shared_nbytes else ""
    text = (
        f"{result.format}, {mesh_text(mesh)}: {counted(result.n_tensors, 'tensor')} in "
        f"{counted(result.n_files, 'file')}, {format_bytes(result.nbytes)} in {report.seconds:.2f} s{rate}{besides}"
    )
    lines = wrap(text, width, line("wrote ", Span(result.target_url, "bold green"), "  "), "  ")
    if result.manifest_url is not None:
        said = "digests of its tensors, for ckpt verify --manifest and ckpt diff"
        lines += wrap(said, width, line("wrote ", Span(result.manifest_url, "green"), "  "), "  ")
    return lines


def drop_lines(dropped: Sequence[Dropped], *, width: int) -> list[Line]:
    """What the target does not have, by reason."""
    by_why: dict[str, list[str]] = {}
    for each in dropped:
        by_why.setdefault(each.why, []).append(each.fqn)
    lines: list[Line] = []
    for why, fqns in by_why.items():
        text = f"{len(fqns):,} left out, {why}: {some_of(fqns)}"
        lines += wrap(text, width, line(Span("dropped: ", "yellow")), "  ")
    return lines


def cast_lines(casts: Iterable[tuple[str, str, str]], reports: Iterable[CastReport] = (), *, width: int) -> list[Line]:
    """Changes of element type, (fqn, from, to), by kind; with what it did to the values where that is known."""
    by_kind: dict[tuple[str, str], list[str]] = {}
    for fqn, source, target in casts:
        by_kind.setdefault((source, target), []).append(fqn)
    effects: dict[tuple[str, str], list[CastReport]] = {}
    for report in reports:
        effects.setdefault((report.source, report.target), []).append(report)
    lines: list[Line] = []
    for (source, target), fqns in by_kind.items():
        text = f"{counted(len(fqns), 'tensor')} from {source} to {target}: {some_of(fqns)}"
        found = effects.get((source, target))
        if found:
            n_changed = sum(report.n_changed for report in found)
            lost = [report for report in found if report.n_overflowed]
            worst = max(found, key=lambda report: report.max_abs_error)
            most = max(found, key=lambda report: report.max_rel_error)
            text += (
                f"; {counted(n_changed, 'value')} changed, by {worst.max_abs_error:.3g} at most (in {worst.fqn}), "
                f"relatively by {most.max_rel_error:.3g} (in {most.fqn})"
                if n_changed
                else "; no value changed"
            )
            if lost:
                n_lost, names = sum(report.n_overflowed for report in lost), some_of([report.fqn for report in lost])
                text += f"; {counted(n_lost, 'value')} too large for {target}, no longer finite (in {names})"
        lines += wrap(text, width, line(Span("cast: ", "yellow")), "  ")
    return lines
