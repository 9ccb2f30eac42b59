"""What was saved of a damaged checkpoint, and what is lost, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tool.cli.text import Line, Span, line, wrap
from ckpt_tool.sizes import counted, format_bytes

if TYPE_CHECKING:
    from ckpt_tool.api.trust.salvage import SalvageResult

__all__ = ["salvage_lines"]

_SHOWN = 5


def salvage_lines(done: SalvageResult, *, width: int) -> list[Line]:
    """Where it is, what is lost and why, what nothing can tell, and a line that sums up."""
    result = done.result
    text = (
        f"{result.format}: {counted(result.n_tensors, 'tensor')} of {done.source_format} "
        f"in {counted(result.n_files, 'file')}, {format_bytes(result.nbytes)}"
    )
    lines = wrap(text, width, line("wrote ", Span(result.target_url, "bold green"), "  "), "  ")
    lines += wrap("what is kept and lost", width, line("wrote ", Span(done.report_url, "green"), "  "), "  ")
    for said in done.borrowed[:_SHOWN]:
        lines += wrap(said, width, line(Span("borrowed: ", "yellow")), "  ")
    for lost in done.lost[:_SHOWN]:
        lines += wrap(f"{lost.fqn}: {lost.why}", width, line(Span("lost: ", "bold red")), "  ")
    if len(done.lost) > _SHOWN:
        lines.append(line(Span(f"  … {len(done.lost) - _SHOWN:,} more; the report lists all", "dim")))
    for unknown in done.unknown[:_SHOWN]:
        lines += wrap(unknown, width, line(Span("not known: ", "yellow")), "  ")
    if len(done.unknown) > _SHOWN:
        lines.append(line(Span(f"  … {len(done.unknown) - _SHOWN:,} more; the report lists all", "dim")))
    return [*lines, line(), line(Span(_verdict(done), "bold green" if done.is_all else "bold red"))]


def _verdict(done: SalvageResult) -> str:
    kept = f"{len(done.kept):,} kept"
    if done.is_all:
        return f"{kept}, nothing is lost"
    if done.lost:
        return f"{kept}, {len(done.lost):,} lost"
    return f"{kept}, none known to be lost, but not all can be known"
