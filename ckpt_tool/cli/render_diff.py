"""The difference of two checkpoints as text: a table for each kind, names that differ only in numbers on one line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ckpt_tool.cli.render_tables import folded_names
from ckpt_tool.cli.text import Cell, Line, Span, fitted, flat, line, width_of, wrap
from ckpt_tool.sizes import counted, format_bytes

if TYPE_CHECKING:
    from ckpt_tool.compare.report import DiffGroup, DiffReport, Measures, ObjectDiff, Side, TensorDiff

__all__ = ["report_lines"]

_TITLES = {
    "only-a": ("only in A", "bold red"),
    "only-b": ("only in B", "bold red"),
    "shape": ("other shape", "bold red"),
    "dtype": ("other type", "yellow"),
    "differs": ("differs", "bold red"),
    "same": ("same", "green"),
}


def report_lines(report: DiffReport, *, width: int, limit: int | None, with_same: bool) -> list[Line]:
    """What was compared, a table for each status and reason, what was left out, and a line that sums up.

    Args:
        report: what was found.
        width: columns of the terminal.
        limit: lines of each table, None for all.
        with_same: list tensors that are the same.
    """
    lines: list[Line] = []
    for name, side in (("A", report.a), ("B", report.b)):
        lines += wrap(_side(side), width, line(Span(f"{name}  ", "cyan"), Span(side.url, "bold"), "  "), "   ")
    for group in report.groups():
        if group.status != "same" or with_same:
            lines += [line(), *_group(group, width, limit)]
    lines += _objects(report.objects, width, limit)
    left_out = _left_out(report)
    if left_out or report.notes or report.hint:
        lines.append(line())
    for note in (*report.notes, *left_out):
        lines += wrap(note, width, line(Span("note: ", "yellow")), "  ")
    if report.hint:
        lines += wrap(report.hint, width, line(Span("hint: ", "bold cyan")), "  ")
    return [*lines, line(), *wrap(_verdict(report), width, _mark(report), "  ")]


def _side(side: Side) -> str:
    return f"{side.format}, {counted(side.n_tensors, 'tensor')}, {format_bytes(side.nbytes)}"


def _group(group: DiffGroup, width: int, limit: int | None) -> list[Line]:
    title, style = _TITLES[group.status]
    head: Cell = line(Span(title, style), Span(f" x{len(group.members):,}", "yellow"))
    if group.reason is not None:
        head = line(head, "  ", Span(group.reason, "bold"))
    folded = _folded(group.members)
    table = [_cells(name, members) for name, members in folded[:limit]]
    lines = [line(head), *flat(fitted(table, "lrlrrrrl", width, indent="  ", heads=_heads(table)))]
    if group.reason is not None:
        texts = dict.fromkeys(_reason(member) for member in group.members)
        shown = list(texts)[:3]
        for text in shown:
            lines += wrap(text, width, line("  ", Span("why: ", "cyan")), "       ")
        if len(texts) > len(shown):
            lines.append(line(Span(f"  … {len(texts) - len(shown):,} more of this kind", "dim")))
    if limit is not None and len(folded) > limit:
        more = counted(len(folded) - limit, "more line")
        lines.append(line(Span(f"  … {more}; --limit 0 shows all", "dim")))
    return lines


def _heads(table: Sequence[Sequence[Cell]]) -> list[str]:
    """The names of the columns that have anything in them; none where no element was measured."""
    names = ("tensor", "", "", "differing", "max abs", "max rel", "max ulp", "first")
    used = [any(width_of(row[at]) for row in table) for at in range(len(names))]
    if not any(used[3:]):
        return []
    return [name if has else "" for name, has in zip(names, used, strict=True)]


def _cells(name: str, members: Sequence[TensorDiff]) -> list[Cell]:
    """One line: a name, how often, type and shape, and the worst of each measure."""
    count: Cell = Span(f"x{len(members)}" if len(members) > 1 else "", "yellow")
    what: Cell = Span(_what(members), "cyan")
    measured = [member.measures for member in members if member.measures is not None]
    differing = [each for each in measured if each.n_differing or each.n_nan_payload]
    if not differing:
        return [name, count, what, "", "", "", "", ""]
    n, total = sum(each.n_differing for each in differing), sum(each.n_compared for each in measured)
    percent = 100 * n / total
    share = f"{n:,} ({'all' if n == total else f'{min(percent, 99.9):.1f}%' if percent > 1 else f'{percent:.1g}%'})"
    ulps = [each.max_ulp for each in differing if each.max_ulp is not None]
    absolute = [each.max_abs for each in differing if each.max_abs is not None]
    relative = [each.max_rel for each in differing if each.max_rel is not None]
    return [
        name,
        count,
        what,
        share,
        f"{max(absolute):.3g}" if absolute else "",
        f"{max(relative):.3g}" if relative else "",
        f"{max(ulps):,}" if ulps else "",
        Span(_first(differing), "dim"),
    ]


def _first(measured: Sequence[Measures]) -> str:
    """Place and values of the first difference, and how many of all have no distance."""
    measures = measured[0]
    if measures.first_a is None:
        return ""
    place = "" if measures.first_index is None else f"{list(measures.first_index)}: "
    special = [
        f"{n:,} {what}"
        for n, what in (
            (sum(each.n_non_finite for each in measured), "not finite"),
            (sum(each.n_nan_payload for each in measured), "NaN of other bits"),
            (sum(each.n_signed_zero for each in measured), "zeros of other sign"),
        )
        if n
    ]
    behind = f"; {', '.join(special)}" if special else ""
    return f"{place}{measures.first_a} | {measures.first_b}{behind}"


def _what(members: Sequence[TensorDiff]) -> str:
    """Type and shape of both sides, once where they agree."""
    first = members[0]
    types = [name for name in (first.dtype_a, first.dtype_b) if name is not None]
    shapes = [str(list(shape)) for shape in (first.shape_a, first.shape_b) if shape is not None]
    return f"{' | '.join(dict.fromkeys(types))} {' | '.join(dict.fromkeys(shapes))}"


def _folded(members: Iterable[TensorDiff]) -> list[tuple[str, list[TensorDiff]]]:
    """Tensors whose names differ only in numbers, and whose types and shapes agree, together."""
    kinds: dict[tuple[str, ...], list[TensorDiff]] = {}
    for member in members:
        kinds.setdefault((_pattern(member.fqn), _pattern(member.fqn_b or ""), _what([member])), []).append(member)
    folded: list[tuple[str, list[TensorDiff]]] = []
    for alike in kinds.values():
        sides = [folded_names((name, "") for name in _names(alike, side)) for side in (0, 1)]
        if all(len(lines) <= 1 for lines in sides):
            folded.append((_both([lines[0][0] for lines in sides if lines]), alike))
        else:
            folded += [(_both([name for side in (0, 1) for name in _names([each], side)]), [each]) for each in alike]
    return folded


def _both(names: Sequence[str]) -> str:
    """The name, or those of both sides; what A alone has in front stands in brackets.

    >>> _both(["model.w"]), _both(["model.w", "w"]), _both(["a", "b"])
    ('model.w', '[model.]w', 'a | b')
    """
    first, last = names[0], names[-1]
    if len(names) == 2 and first.endswith(last):
        return f"[{first.removesuffix(last)}]{last}"
    return " | ".join(names)


def _pattern(fqn: str) -> str:
    return ".".join("#" if part.isdecimal() else part for part in fqn.split("."))


def _names(members: Sequence[TensorDiff], side: int) -> list[str]:
    """A's names, or those of B that are others."""
    names = [member.fqn if side == 0 else member.fqn_b for member in members]
    return [name for name in names if name is not None]


def _reason(member: TensorDiff) -> str:
    if member.reason is None:
        return ""
    return member.reason.text if member.reason.is_confirmed else f"{member.reason.text} (by a sample of rows)"


def _objects(objects: Sequence[ObjectDiff], width: int, limit: int | None) -> list[Line]:
    other = [each for each in objects if each.status != "same"]
    if not other:
        return []
    table: list[list[Cell]] = [
        [each.fqn, Span(_TITLES[each.status][0], "yellow"), _short(each.text_a), _short(each.text_b)]
        for each in other[:limit]
    ]
    lines = [line(), line(Span("objects", "bold"), Span(f" x{len(other):,}", "yellow"))]
    lines += flat(fitted(table, "llll", width, indent="  "))
    if limit is not None and len(other) > limit:
        lines.append(line(Span(f"  … {len(other) - limit:,} more; --limit 0 shows all", "dim")))
    return lines


def _short(text: str | None) -> str:
    return "" if text is None else text if len(text) <= 40 else f"{text[:39]}…"


def _left_out(report: DiffReport) -> list[str]:
    found = []
    ignored = _of_each([_ignored(side) for side in (report.a, report.b)])
    if ignored:
        found.append(f"not compared: {ignored}; --everything does")
    unselected = _of_each(
        [counted(side.n_unselected, "tensor") if side.n_unselected else "" for side in (report.a, report.b)]
    )
    if unselected:
        found.append(f"not selected: {unselected}")
    return found


def _ignored(side: Side) -> str:
    parts = []
    if side.n_ignored_tensors:
        parts.append(f"{counted(side.n_ignored_tensors, 'tensor')} of random and extra state")
    if side.n_ignored_objects:
        parts.append(counted(side.n_ignored_objects, "object"))
    return " and ".join(parts)


def _of_each(texts: Sequence[str]) -> str:
    """What A and B have, once where it is the same.

    >>> _of_each(["1 object", "1 object"]), _of_each(["1 object", ""]), _of_each(["", ""])
    ('1 object of each', '1 object of A', '')
    """
    if len(set(texts)) == 1:
        return f"{texts[0]} of each" if texts[0] else ""
    return ", ".join(f"{text} of {side}" for side, text in zip("AB", texts, strict=True) if text)


def _mark(report: DiffReport) -> Line:
    if not report.is_same:
        return line(Span("different", "bold red"), ": ")
    return line(Span("same names, shapes and types" if report.is_quick else "same", "bold green"), ": ")


def _verdict(report: DiffReport) -> str:
    counts = report.counts
    parts = [f"{counts['same']:,} same"]
    parts += [
        f"{counts[status]:,} {title}" for status, (title, _) in _TITLES.items() if status != "same" and counts[status]
    ]
    accepted = sum(tensor.is_accepted for tensor in report.tensors)
    if accepted:
        parts.append(f"{counted(accepted, 'cast')} allowed")
    objects = sum(each.status != "same" for each in report.objects)
    if objects:
        parts.append(counted(objects, "other object"))
    read = f"; {format_bytes(report.compared_nbytes)} compared" if report.compared_nbytes else ""
    return f"{', '.join(parts)}{read} in {report.seconds:.2f} s"
