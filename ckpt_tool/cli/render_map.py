"""The shard map: the boxes of one tensor drawn to scale, as a grid over the (at most two) dimensions that are cut.

More cut dimensions are shown as slices, one grid each. Every box has a letter, which the list below explains: its
place, its rank, its file, and how often it is stored. Letters and lines say everything; colour only repeats it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from math import prod
from typing import TYPE_CHECKING

from ckpt_tool.cli.render_tree import number_ranges
from ckpt_tool.cli.text import Cell, Line, Span, fitted, flat, line
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted, format_bytes, some_of

if TYPE_CHECKING:
    from ckpt_tool.api.shard_map import ShardBox, ShardMap

__all__ = ["map_lines"]

# Backgrounds that black text is readable on, neighbours far apart in hue.
_PALETTE = (117, 222, 157, 217, 183, 229, 152, 180, 120, 211, 147, 187)
_MAX_ROWS = 40
_MAX_SLICES = 8
_MAX_PAIRED = 200
_HOLE = "···"
_RANKS_WIDTH = 8


@dataclass(frozen=True, slots=True)
class _Stored:
    """A box with all its copies."""

    label: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    copies: tuple[ShardBox, ...]

    @property
    def ranks(self) -> str:
        """Ranks that store it; empty where the format does not tell."""
        return number_ranges({each.rank for each in self.copies if each.rank is not None})

    @property
    def colour(self) -> int:
        """Background, by rank."""
        rank = self.copies[0].rank
        return _PALETTE[(0 if rank is None else rank) % len(_PALETTE)]


def map_lines(found: ShardMap, *, width: int, limit: int | None) -> list[Line]:
    """The map: a title, the drawing, the list of boxes.

    Args:
        found: boxes of one tensor.
        width: columns of the terminal; a grid that is too wide or too high is left out, the list says it all.
        limit: most boxes in the list, None for all.
    """
    stored = _distinct(found)
    text = f"{found.dtype} {list(found.shape)}  {format_bytes(found.nbytes)}"
    title = fitted([[Span(found.fqn, "bold"), text]], "ll", width)[0]
    cuts = [
        sorted({0, size, *(edge for box in stored for edge in (box.offsets[dim], box.offsets[dim] + box.sizes[dim]))})
        for dim, size in enumerate(found.shape)
    ]
    lines = [*title, line()]
    if stored and 0 not in found.shape:
        lines += _drawing(stored, cuts, width) or [line(Span("  too many boxes to draw", "dim")), line()]
    lines += _listing(stored, width, limit)
    lines += _warnings(stored, found)
    if found.n_empty:
        lines.append(line(Span(f"and {counted(found.n_empty, 'box')} without elements", "dim")))
    if not stored and not found.n_empty:
        lines.append(line(Span("nothing of it is stored", "red")))
    return lines


def _distinct(found: ShardMap) -> list[_Stored]:
    """Boxes without their copies, in order of offsets, each with a letter."""
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[ShardBox]] = {}
    for each in found.boxes:
        groups.setdefault((each.box.offsets, each.box.sizes), []).append(each)
    return [_Stored(_letters(at), *place, tuple(copies)) for at, (place, copies) in enumerate(groups.items())]


def _letters(number: int) -> str:
    """A B ... Z AA AB ...

    >>> _letters(0), _letters(25), _letters(26)
    ('A', 'Z', 'AA')
    """
    text = ""
    number += 1
    while number:
        number, digit = divmod(number - 1, 26)
        text = chr(ord("A") + digit) + text
    return text


def _drawing(stored: Sequence[_Stored], cuts: Sequence[Sequence[int]], width: int) -> list[Line]:
    """The grid over the last two cut dimensions, one for each slice of the others; nothing if it is too big."""
    cut_dims = [dim for dim, edges in enumerate(cuts) if len(edges) > 2] or ([0] if cuts else [])
    across = cut_dims[-1] if len(cut_dims) > 1 or (cut_dims and cut_dims[-1] > 0) else None
    down = cut_dims[-2] if len(cut_dims) > 1 else None if across is not None else cut_dims[-1] if cut_dims else None
    outer = [dim for dim in cut_dims if dim not in {across, down}]
    slices = list(product(*(list(pairwise(cuts[dim])) for dim in outer)))
    lines: list[Line] = []
    for number, place in enumerate(slices[:_MAX_SLICES]):
        inside = [
            box
            for box in stored
            if all(
                box.offsets[dim] <= low and high <= box.offsets[dim] + box.sizes[dim]
                for dim, (low, high) in zip(outer, place, strict=True)
            )
        ]
        grid = _grid(inside, cuts, down, across, width)
        if not grid:
            return []
        if outer:
            where = ", ".join(f"dim {dim} = {low}:{high}" for dim, (low, high) in zip(outer, place, strict=True))
            lines += [line()] * (number > 0)
            lines.append(line("  ", Span(where, "bold")))
        lines += grid
    if len(slices) > _MAX_SLICES:
        lines.append(line(Span(f"  … {counted(len(slices) - _MAX_SLICES, 'more slice')}", "dim")))
    return [*lines, line()]


def _grid(
    stored: Sequence[_Stored], cuts: Sequence[Sequence[int]], down: int | None, across: int | None, width: int
) -> list[Line]:
    """One grid with its rulers; nothing where it would be too wide or too high."""
    rows = list(pairwise(cuts[down])) if down is not None else [(0, 1)]
    cols = list(pairwise(cuts[across])) if across is not None else [(0, 1)]
    rulers = [f"{low:,}:{high:,}" if down is not None else "" for low, high in rows]
    margin = max(map(len, rulers)) + 3
    room = min(width, 100) - margin - len(cols) - 1
    if len(rows) > _MAX_ROWS or len(cols) > room:
        return []
    owners = [[_owners(stored, (down, row), (across, col)) for col in cols] for row in rows]
    labels = [[_label([stored[at] for at in own]) for own in each] for each in owners]
    heads = [f"{low:,}:{high:,}" if across is not None else "" for low, high in cols]
    least = 2 + max(len(text) for each in (*labels, heads) for text in each)
    if least * len(cols) > room:
        return []
    widths = _scaled([high - low for low, high in cols], least, room if len(cols) > 1 else min(room, 30))
    lines: list[Line] = []
    if any(heads):
        lines.append(
            line(
                " " * (margin + 1),
                Span(" ".join(h.center(w) for h, w in zip(heads, widths, strict=True)).rstrip(), "dim"),
            )
        )
    for at in range(len(rows) + 1):
        lines.append(line(" " * margin, Span(_border(owners, widths, at), "dim")))
        if at < len(rows):
            lines.append(_cells(stored, owners, labels, widths, at, f"{rulers[at].rjust(margin - 1)} "))
    return lines


def _label(own: Sequence[_Stored]) -> str:
    """What is written into a cell: the letter and the rank, several letters for an overlap, dots for a hole."""
    if len(own) == 1 and own[0].ranks and len(own[0].ranks) <= _RANKS_WIDTH:
        return f"{own[0].label} r{own[0].ranks}"
    return "+".join(box.label for box in own) or _HOLE


def _owners(stored: Sequence[_Stored], *cell: tuple[int | None, tuple[int, int]]) -> tuple[int, ...]:
    """Which boxes cover a cell; more than one is an overlap, none a hole."""
    return tuple(
        at
        for at, box in enumerate(stored)
        if all(
            dim is None or (box.offsets[dim] <= low and high <= box.offsets[dim] + box.sizes[dim])
            for dim, (low, high) in cell
        )
    )


def _scaled(sizes: Sequence[int], least: int, room: int) -> list[int]:
    """Widths that add up to ``room`` at most, none below ``least``, larger ones for larger sizes."""
    spare = room - least * len(sizes)
    total = sum(sizes)
    return [least + spare * size // total for size in sizes]


def _border(owners: Sequence[Sequence[tuple[int, ...]]], widths: Sequence[int], at: int) -> str:
    """The line above row ``at``: drawn only between different boxes."""
    n_rows, n_cols = len(owners), len(widths)

    def cell(row: int, col: int) -> tuple[int, ...] | None:
        return owners[row][col] if 0 <= row < n_rows and 0 <= col < n_cols else None

    text = ""
    for col in range(n_cols + 1):
        above_left, above, left, here = cell(at - 1, col - 1), cell(at - 1, col), cell(at, col - 1), cell(at, col)
        up = above_left != above
        down = left != here
        to_left = above_left != left
        to_right = above != here
        text += _corner(up=up, down=down, left=to_left, right=to_right)
        if col < n_cols:
            text += ("─" if to_right else " ") * widths[col]
    return text


def _corner(*, up: bool, down: bool, left: bool, right: bool) -> str:
    lines = " ╶╴─╷┌┐┬╵└┘┴│├┤┼"
    return lines[8 * up + 4 * down + 2 * left + right]


def _cells(
    stored: Sequence[_Stored],
    owners: Sequence[Sequence[tuple[int, ...]]],
    labels: Sequence[Sequence[str]],
    widths: Sequence[int],
    row: int,
    ruler: str,
) -> Line:
    """One row of the grid; a box that spans cells has its letter in the first of them."""
    parts: list[Cell] = [Span(ruler, "dim"), Span("│", "dim")]
    for col, own in enumerate(owners[row]):
        style = "bold red" if len(own) != 1 else f"bold on {stored[own[0]].colour}"
        is_inside = (col and owners[row][col - 1] == own) or (row and owners[row - 1][col] == own)
        text = "" if is_inside and own else labels[row][col]
        parts.append(Span(text.center(widths[col]), style))
        is_edge = col == len(widths) - 1 or owners[row][col + 1] != own
        parts.append(Span("│", "dim") if is_edge else Span(" ", style))
    return line(*parts)


def _listing(stored: Sequence[_Stored], width: int, limit: int | None) -> list[Line]:
    """What each letter stands for."""
    shown = stored[:limit]
    copies = "copies" if any(len(box.copies) > 1 for box in shown) else ""
    table: list[list[Cell]] = [[Span(name, "bold") for name in ("  box", "place", "bytes", "rank", "file", copies)]]
    for box in shown:
        files = list(dict.fromkeys(_file(each) for each in box.copies))
        place = ", ".join(f"{o:,}:{o + s:,}" for o, s in zip(box.offsets, box.sizes, strict=True))
        table.append(
            [
                line("  ", Span(f" {box.label} ", f"bold on {box.colour}")),
                f"[{place}]",
                f"{box.copies[0].length:,}",
                box.ranks or Span("-", "dim"),
                some_of(files),
                Span(f"{counted(len(box.copies), 'copy')}", "yellow") if len(box.copies) > 1 else "",
            ]
        )
    rest = len(stored) - len(shown)
    tail = [line(Span(f"… {counted(rest, 'more box')}; --limit 0 shows all", "dim"))] if rest else []
    return [*flat(fitted(table, "llrlll", width, name=4)), *tail]


def _warnings(stored: Sequence[_Stored], found: ShardMap) -> list[Line]:
    """What makes the tensor unreadable: places that no box holds, or several do."""
    volumes = sum(prod(box.sizes) for box in stored)
    overlaps = (
        any(_overlap(a, b) for at, a in enumerate(stored) for b in stored[:at]) if len(stored) <= _MAX_PAIRED else False
    )
    lines = []
    if overlaps:
        lines.append(line(Span("overlap: ", "bold red"), "different boxes hold the same elements, see A+B"))
    if not overlaps and volumes < prod(found.shape):
        missing = prod(found.shape) - volumes
        lines.append(line(Span("hole: ", "bold red"), f"no box holds {counted(missing, 'element')}, see {_HOLE}"))
    return lines


def _overlap(a: _Stored, b: _Stored) -> bool:
    return all(
        low < other + size_other and other < low + size
        for low, size, other, size_other in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
    )


def _file(each: ShardBox) -> str:
    return each.file if each.offset is None else f"{each.file}:{each.offset:,}"
