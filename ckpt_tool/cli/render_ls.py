"""The steps of a run as text: a line for each, why those are not complete that are not, and the newest good one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_tool.cli.text import Cell, Line, Span, fitted, line, wrap
from ckpt_tool.sizes import counted, format_bytes

if TYPE_CHECKING:
    from ckpt_tool.api.runs.ls import RunListing, RunStep

__all__ = ["age", "run_lines"]

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def age(seconds: float) -> str:
    """A time span in its largest unit.

    >>> age(30), age(7300), age(-3)
    ('30 s', '2 h', '0 s')
    """
    whole = max(int(seconds), 0)
    size, unit = next(((size, unit) for size, unit in _UNITS if whole >= size), _UNITS[-1])
    return f"{whole // size} {unit}"


def run_lines(found: RunListing, *, now: float, width: int) -> list[Line]:
    """A table of steps, oldest first, with reasons below, what trackers say, and the newest complete step.

    Args:
        found: the listing.
        now: seconds since 1970, from which ages are told.
        width: columns of the terminal.
    """
    heads: list[Cell] = [Span(head, "bold") for head in ("step", "state", "size", "age", "format", "layout", "path")]
    table: list[list[Cell]] = [heads, *(_cells(step, step is found.latest, now) for step in found.steps)]
    lines = [*wrap(counted(len(found.steps), "step"), width, line(Span(found.url, "bold"), "  "), "  "), line()]
    first, *rows = fitted(table, "rlrrlll", width, name=6, spare=(5,), indent="  ")
    lines += first
    for row, step in zip(rows, found.steps, strict=True):
        lines += row
        for problem in step.problems:
            lines += wrap(problem, width, line("      ", Span("- ", "yellow")), "        ")
    for tracker in found.trackers:
        if tracker.says is not None:
            lines += [line(), *wrap(tracker.says, width, line(Span(tracker.path, "yellow"), " "), "  ")]
    return [*lines, line(), _verdict(found)]


def _cells(step: RunStep, is_latest: bool, now: float) -> list[Cell]:
    state = Span("complete", "bold green" if is_latest else "green") if step.is_complete else Span("incomplete", "red")
    return [
        "-" if step.step is None else f"{step.step:,}",
        line(state, Span(f", {step.verified} check", "dim")) if step.verified and step.is_complete else state,
        format_bytes(step.nbytes),
        "" if step.modified is None else age(now - step.modified),
        Span(step.format or "-", "cyan"),
        step.layout or "",
        step.path or ".",
    ]


def _verdict(found: RunListing) -> Line:
    latest = found.latest
    if latest is None:
        return line(Span("no complete step", "bold red"))
    return line(Span("newest complete", "bold green"), ": ", latest.url)
