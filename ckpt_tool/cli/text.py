"""A line is a row of styled spans; colour is applied last, so that the same lines serve a terminal and a file.

Knows widths and ANSI codes; knows nothing of checkpoints. Not rich, which takes 60 ms to load and measures every cell
of a table: a table of 100,000 tensors is printed here in a fraction of a second.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_tool.records import dataclass

__all__ = [
    "Cell",
    "Line",
    "Span",
    "columns",
    "cut",
    "fitted",
    "flat",
    "harmless",
    "line",
    "paint",
    "plain",
    "width_of",
    "wrap",
]

_CODES = {
    "bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34", "magenta": "35", "cyan": "36",
}  # fmt: skip
_RESET = "\x1b[0m"


@dataclass(frozen=True, slots=True)
class Span:
    """Text of one style: words of ``_CODES`` joined by spaces, or ``on <0-255>`` for a background."""

    text: str
    style: str = ""


Line = tuple[Span, ...]
Cell = str | Span | Line


def line(*parts: Cell) -> Line:
    """One line of parts, put together without spaces.

    >>> plain(line("a", Span("b", "red"), (Span("c"),)))
    'abc'
    """
    spans: list[Span] = []
    for part in parts:
        if isinstance(part, str):
            spans.append(Span(part))
        elif isinstance(part, Span):
            spans.append(part)
        else:
            spans.extend(part)
    return tuple(spans)


def plain(found: Line) -> str:
    """The text of a line, without colour."""
    return "".join(span.text for span in found)


def harmless(found: Line) -> Line:
    """The line with characters that do things to a terminal shown as escapes: a name in a file may hold any.

    >>> plain(harmless(line("a" + chr(27) + "[31m"))).replace(chr(92), "/")
    'a/x1b[31m'
    """
    if all(span.text.isprintable() for span in found):
        return found
    return tuple(Span("".join(c if c.isprintable() else ascii(c)[1:-1] for c in s.text), s.style) for s in found)


def paint(found: Line) -> str:
    """The text of a line with ANSI codes.

    >>> paint(line("a", Span("b", "bold red"))).replace(chr(27), "ESC")
    'aESC[1;31mbESC[0m'
    """
    return "".join(f"\x1b[{code}m{s.text}{_RESET}" if (code := _code(s.style)) else s.text for s in found)


def _code(style: str) -> str:
    words = style.split()
    if "on" in words:
        at = words.index("on")
        return ";".join([*(_CODES[word] for word in words[:at]), "30", "48", "5", words[at + 1]])
    return ";".join(_CODES[word] for word in words)


def width_of(cell: Cell) -> int:
    """Columns that a cell takes."""
    return len(cell) if isinstance(cell, str) else len(cell.text) if isinstance(cell, Span) else len(plain(cell))


def cut(found: Line, width: int) -> Line:
    """The line, or its beginning with an ellipsis where it is longer than ``width``.

    >>> plain(cut(line("abc", "defg"), 5))
    'abcd…'
    """
    if width_of(found) <= width:
        return found
    kept: list[Span] = []
    room = max(width - 1, 0)
    for span in found:
        kept.append(Span(span.text[:room], span.style))
        room -= len(kept[-1].text)
    return (*(span for span in kept if span.text), Span("…"))


def wrap(text: str, width: int, first: Cell = "", indent: str = "") -> list[Line]:
    """Lines of whole words no wider than ``width`` (but for longer words), ``first`` before the first, ``indent`` else.

    >>> [plain(found) for found in wrap("one two three", 12, "note: ", "  ")]
    ['note: one', '  two three']
    """
    lines: list[Line] = []
    head: Cell = first
    words: list[str] = []
    for word in text.split():
        is_behind = words or (not lines and width_of(head) > len(indent))  # something that the word would stand behind
        if is_behind and width_of(head) + sum(len(w) + 1 for w in words) + len(word) > width:
            lines.append(_stripped(line(head, " ".join(words))))
            head, words = indent, []
        words.append(word)
    return [*lines, line(head, " ".join(words))]


def columns(rows: Sequence[Sequence[Cell]], align: str, *, gap: int = 2, indent: str = "") -> list[Line]:
    """Lines of aligned cells: one letter of ``align`` per column, ``l`` or ``r``; empty columns vanish.

    >>> [plain(found) for found in columns([["a", "10"], ["long", "2"]], "lr")]
    ['a     10', 'long   2']
    """
    widths = [max((width_of(row[at]) for row in rows), default=0) for at in range(len(align))]
    shown = [at for at in range(len(align)) if widths[at]]
    lines: list[Line] = []
    for row in rows:
        parts: list[Cell] = [indent]
        for position, at in enumerate(shown):
            space = " " * (widths[at] - width_of(row[at]))
            before = " " * gap if position else ""
            parts += [before, space, row[at]] if align[at] == "r" else [before, row[at], space]
        lines.append(_stripped(line(*parts)))
    return lines


def fitted(
    rows: Sequence[Sequence[Cell]],
    align: str,
    width: int,
    *,
    name: int = 0,
    spare: Sequence[int] = (),
    indent: str = "",
    heads: Sequence[str] = (),
) -> list[list[Line]]:
    """For each row its lines, aligned as by `columns` and no wider than ``width`` (but for longer cells).

    Where columns do not fit, those of ``spare`` go, one after another; then the column ``name`` takes a line for
    itself, with the others below it, which go on in the next line where they must. ``heads`` name the columns: in a row
    of their own, or each before its cell where cells go on in the next line.

    >>> rows = [["long/name", "12 B", "x"], ["b", "3 B", "y"]]
    >>> [[plain(found) for found in row] for row in fitted(rows, "lrl", 12, spare=[2])]
    [['long/name', '    12 B'], ['b', '     3 B']]
    """
    titled = [[Span(head, "bold") for head in heads], *rows] if any(heads) else list(rows)
    kept = list(range(len(align)))
    for without in (None, *spare):
        if without is not None:
            kept.remove(without)
        lines = columns([[row[at] for at in kept] for row in titled], "".join(align[at] for at in kept), indent=indent)
        if all(width_of(found) <= width for found in lines):
            return [[found] for found in lines]
    rest = [at for at in kept if at != name]
    below = f"{indent}    "
    lines = columns([[row[at] for at in rest] for row in titled], "".join(align[at] for at in rest), indent=below)
    if all(width_of(found) <= width for found in lines):
        return [[line(indent, row[name]), found] for row, found in zip(titled, lines, strict=True)]
    named = [f"{heads[at]} " if heads and heads[at] else "" for at in rest]
    return [
        [
            line(indent, row[name]),
            *_flowed(
                [line(head, row[at]) if width_of(row[at]) else "" for head, at in zip(named, rest, strict=True)],
                width,
                below,
            ),
        ]
        for row in rows
    ]


def _flowed(cells: Sequence[Cell], width: int, indent: str) -> list[Line]:
    """Cells one after another, as many on each line as fit; the words of a longer one are wrapped."""
    lines: list[Line] = []
    for cell in cells:
        if not width_of(cell):
            continue
        if width_of(cell) + len(indent) > width:
            lines += wrap(cell if isinstance(cell, str) else plain(line(cell)), width, indent, indent)
        elif lines and width_of(lines[-1]) + 2 + width_of(cell) <= width:
            lines[-1] = line(lines[-1], "  ", cell)
        else:
            lines.append(line(indent, cell))
    return lines


def flat(rows: Sequence[Sequence[Line]]) -> list[Line]:
    """The lines of all rows."""
    return [found for row in rows for found in row]


def _stripped(found: Line) -> Line:
    spans = list(found)
    while spans and not (spans[-1].style and spans[-1].text):
        text = spans[-1].text.rstrip(" ")
        if text:
            spans[-1] = Span(text)
            break
        spans.pop()
    return tuple(span for span in spans if span.text)
