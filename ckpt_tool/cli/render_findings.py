"""The findings of a verification as text: worst first, those of one kind together, so that thousands read as a few."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tool.cli.text import Cell, Line, Span, line, wrap
from ckpt_tool.sizes import counted, format_bytes, some_of

if TYPE_CHECKING:
    from ckpt_tool.checks.report import FindingGroup, VerifyReport
    from ckpt_tool.manifest.finding import Finding

__all__ = ["report_lines"]

_STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan"}
_LABELS = {"error": "error", "warning": "warning", "info": "note"}
_FILES_SHOWN = 4


def report_lines(report: VerifyReport, *, width: int, limit: int | None) -> list[Line]:
    """A line on what was checked, a paragraph for each kind of finding, a line that sums up, and what to type next.

    Args:
        report: what was found.
        width: columns of the terminal.
        limit: findings shown of each kind, None for all.
    """
    lines = wrap(_checked(report), width, line(Span(report.url, "bold"), "  "), "  ")
    for group in report.groups():
        lines += [line(), *_group(report, group, width, limit)]
    after = [line(Span("next: ", "dim"), command) for command in report.next_commands]
    return [*lines, line(), _verdict(report), *after]


def _checked(report: VerifyReport) -> str:
    parts = [
        report.format,
        counted(report.n_tensors, "tensor"),
        counted(report.n_chunks, "box"),
        counted(report.n_files, "file"),
        f"{report.level} check in {report.seconds:.2f} s",
    ]
    if report.checked_nbytes:
        parts.append(f"{format_bytes(report.checked_nbytes)} of tensors read")
        parts.append(f"{format_bytes(report.covered_nbytes)} proven by recorded checksums")
    if report.unproven_files:
        parts.append(f"no checksum in {some_of(report.unproven_files)}")
    return ", ".join(parts)


def _group(report: VerifyReport, group: FindingGroup, width: int, limit: int | None) -> list[Line]:
    severity = group.severity.name.lower()
    head: Cell = line(Span(_LABELS[severity], _STYLES[severity]), " ", Span(group.kind, "bold"))
    if group.count > 1:
        where = [counted(group.n_tensors, "tensor")] if group.n_tensors else []
        where += [f"{path} ({n:,})" if n > 1 else path for path, n in group.files[:_FILES_SHOWN]]
        if len(group.files) > _FILES_SHOWN:
            where.append(f"{counted(len(group.files) - _FILES_SHOWN, 'more file')}")
        head = line(head, Span(f" x{group.count:,}", "yellow"), "  ")
        lines = wrap(", ".join(where), width, head, "    ")
    else:
        lines = [line(head)]
    members = [f for f in report.findings if (f.severity, f.kind) == (group.severity, group.kind)]
    for finding in members[:limit]:
        lines += wrap(_sentence(finding), width, "  ", "    ")
    if limit is not None and len(members) > limit:
        more = f"{len(members) - limit:,} more like this; --limit 0 shows all"
        lines += wrap(more, width, line(Span("  … ", "dim")), "    ")
    return lines


def _sentence(finding: Finding) -> str:
    """The message with its tensor and place, as far as it does not name them itself."""
    where = finding.where
    is_said = where is None or (where.length == 0 and where.path in finding.message)
    place = "" if is_said else str(where)
    before = [text for text in (finding.fqn, place) if text and text not in finding.message]
    return f"{' at '.join(before)}: {finding.message}" if before else finding.message


def _verdict(report: VerifyReport) -> Line:
    counts = report.counts
    parts: list[Cell] = []
    for severity in ("error", "warning"):
        if counts[severity]:
            parts += [", " if parts else "", Span(counted(counts[severity], severity), _STYLES[severity])]
    if counts["error"]:
        return line(*parts)
    return line(Span("no errors" if parts else "nothing wrong", "bold green"), ", " if parts else "", *parts)
