"""The flat tables of an inspection: tensors, files, ranks, objects and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from ckpt_tool.cli.render_tree import number_ranges, parts_text
from ckpt_tool.cli.render_values import object_text
from ckpt_tool.cli.text import Cell, Line, Span, fitted, flat, line, wrap
from ckpt_tool.sizes import counted, format_bytes

if TYPE_CHECKING:
    from ckpt_tool.api.inspect import FileRow, Inspection, RankRow, TensorRow
    from ckpt_tool.manifest.optimizer import OptimizerView

__all__ = ["file_lines", "folded_names", "object_lines", "optimizer_lines", "rank_lines", "sorted_rows", "tensor_lines"]

_SORT_KEYS: Mapping[str, Callable[[TensorRow], Any]] = {
    "name": lambda row: row.fqn,
    "size": lambda row: (-row.nbytes, row.fqn),
    "shape": lambda row: (-len(row.shape), tuple(-size for size in row.shape), row.fqn),
    "dtype": lambda row: (row.dtype, row.fqn),
}
_BAR_WIDTH = 16


def sorted_rows(rows: Sequence[TensorRow], by: str | None) -> Sequence[TensorRow]:
    """Rows by name, size (largest first), shape (most dimensions first) or dtype; as they are for None."""
    return rows if by is None else sorted(rows, key=_SORT_KEYS[by])


def tensor_lines(rows: Sequence[TensorRow], *, width: int, limit: int | None) -> list[Line]:
    """One line per tensor with its exact size; names are never cut."""
    shown = rows[:limit]
    table: list[list[Cell]] = [_heads("tensor", "dtype", "shape", "bytes", "", "parts")]
    table += [
        [row.fqn, Span(row.dtype, "cyan"), str(list(row.shape)), f"{row.nbytes:,}", _human(row.nbytes), _parts(row)]
        for row in shown
    ]
    return [*flat(fitted(table, "lllrrl", width, spare=(4, 5))), *_rest(len(rows) - len(shown), "tensor")]


def file_lines(rows: Sequence[FileRow], *, width: int, limit: int | None) -> list[Line]:
    """One line per file, numbers in names in their order: size, how much of it is tensors, from which ranks."""
    from ckpt_tool.api.runs.names import natural  # other lists do without

    shown = sorted(rows, key=lambda row: natural(row.path))[:limit]
    largest = max((row.payload_nbytes for row in rows), default=0)
    table: list[list[Cell]] = [_heads("file", "bytes", "tensor bytes", "", "boxes", "tensors", "ranks")]
    table += [
        [
            row.path,
            Span("unknown", "dim") if row.nbytes < 0 else f"{row.nbytes:,}",
            f"{row.payload_nbytes:,}",
            _bar(row.payload_nbytes, largest),
            f"{row.n_chunks:,}",
            f"{row.n_tensors:,}",
            Span(number_ranges(row.ranks), "cyan"),
        ]
        for row in shown
    ]
    return [*flat(fitted(table, "lrrlrrl", width, spare=(3,))), *_rest(len(rows) - len(shown), "file")]


def rank_lines(rows: Sequence[RankRow], *, width: int, limit: int | None) -> list[Line]:
    """One line per rank: what it wrote."""
    shown = rows[:limit]
    largest = max((row.payload_nbytes for row in rows), default=0)
    table: list[list[Cell]] = [_heads("rank", "tensor bytes", "", "boxes", "tensors", "files")]
    table += [
        [
            Span("unknown" if row.rank < 0 else str(row.rank), "cyan"),
            f"{row.payload_nbytes:,}",
            _bar(row.payload_nbytes, largest),
            f"{row.n_chunks:,}",
            f"{row.n_tensors:,}",
            f"{row.n_files:,}",
        ]
        for row in shown
    ]
    return [*flat(fitted(table, "rrlrrr", width, spare=(2,))), *_rest(len(rows) - len(shown), "rank")]


def object_lines(found: Inspection, *, width: int, limit: int | None) -> list[Line]:
    """One line per object that is not a tensor, its value cut to the width; ranks that agree share one."""
    if not found.objects:
        return [line(Span("no objects besides tensors", "dim"))]
    longest = min(max(len(blob.fqn) for blob in found.objects), width // 2)
    room = max(width - longest - 14, 20)
    ranks: dict[tuple[str, str], list[int]] = {}
    for blob in found.objects:
        of = ranks.setdefault((blob.fqn, object_text(blob.value, width=room)), [])
        of += [] if blob.rank is None else [blob.rank]
    entries = list(ranks.items())
    shown = entries[:limit]
    table: list[list[Cell]] = [[fqn, Span(_ranks(of), "cyan"), value] for (fqn, value), of in shown]
    return [*flat(fitted(table, "lll", width)), *_rest(len(entries) - len(shown), "object")]


def _ranks(of: Sequence[int]) -> str:
    return "" if not of else f"rank {of[0]}" if len(of) == 1 else f"ranks {number_ranges(set(of))}"


def optimizer_lines(views: Sequence[OptimizerView], *, width: int, limit: int | None) -> list[Line]:
    """Each optimizer in one normal form, however it was spelt: its groups, then the state of each parameter."""
    if not views:
        return [line(Span("no optimizer state found", "dim"))]
    lines: list[Line] = []
    for view in views:
        title = view.prefix or "optimizer"
        n_with_state = counted(len(view.parameters), "parameter") if view.parameters else "no parameter"
        lines.append(line(Span(title, "bold"), f"  {n_with_state} with state"))
        for sentence in view.evidence:
            lines += wrap(sentence, width, "  ", "  ")
        for number, group in enumerate(view.named_groups()):
            values = object_text(dict(group.hyperparameters), width=10_000)[1:-1]
            text = (
                f"{counted(len(group.params), 'parameter')}; {values}"
                if values
                else counted(len(group.params), "parameter")
            )
            if group.unread:
                text += f"; not read: {', '.join(group.unread)}"
            lines += wrap(text, width, line("  ", Span(f"group {number}  ", "cyan")), " " * 11)
        folded = folded_names((str(key), " ".join(states)) for key, states in view.named().items())
        shown = folded[:limit]
        table: list[list[Cell]] = [_heads("parameter", "", "state")]
        table += [[name, Span(f"x{n}" if n > 1 else "", "yellow"), Span(states, "cyan")] for name, states, n in shown]
        lines += flat(fitted(table, "lll", width, indent="  ")) if folded else []
        lines += _rest(len(folded) - len(shown), "line")
        if view.without_state and folded:
            names = ", ".join(
                str(view.names.get(key, key) if isinstance(key, int) else key) for key in view.without_state[:5]
            )
            lines += wrap(
                f"without state: {counted(len(view.without_state), 'parameter')} ({names})", width, "  ", "  "
            )
        lines.append(line())
    return lines[:-1]


def folded_names(named: Iterable[tuple[str, str]]) -> list[tuple[str, str, int]]:
    """(name, text, how many): names that differ only in numbers and have the same text are put together.

    >>> folded_names([("a.0.w", "x"), ("a.1.w", "x"), ("b", "x")])
    [('a.0,1.w', 'x', 2), ('b', 'x', 1)]
    """
    groups: dict[tuple[tuple[str, ...], str], list[tuple[int, ...]]] = {}
    for name, text in named:
        parts = name.split(".")
        pattern = tuple("" if part.isdecimal() else part for part in parts)
        groups.setdefault((pattern, text), []).append(tuple(int(part) for part in parts if part.isdecimal()))
    folded: list[tuple[str, str, int]] = []
    for (pattern, text), members in groups.items():
        axes = [sorted(set(axis)) for axis in zip(*members, strict=True)]
        is_grid = prod(len(axis) for axis in axes) == len(members)
        for numbers in [axes] if is_grid else [[[n] for n in member] for member in members]:
            texts = iter([number_ranges(axis) for axis in numbers])
            name = ".".join(part or next(texts) for part in pattern)
            folded.append((name, text, len(members) if is_grid else 1))
    return folded


def _heads(*names: str) -> list[Cell]:
    return [Span(name, "bold") for name in names]


def _human(nbytes: int) -> Cell:
    return Span(format_bytes(nbytes) if nbytes >= 1024 else "", "dim")


def _parts(row: TensorRow) -> Cell:
    return Span(parts_text(row), "dim")


def _bar(part: int, largest: int) -> Cell:
    """A bar that says how a value compares with the largest."""
    eighths = round(part / largest * _BAR_WIDTH * 8) if largest else 0
    return Span("█" * (eighths // 8) + (" ▏▎▍▌▋▊▉"[eighths % 8] if eighths % 8 else ""), "blue")


def _rest(n: int, noun: str) -> list[Line]:
    return [line(Span(f"… {counted(n, f'more {noun}')}; --limit 0 shows all", "dim"))] if n > 0 else []
