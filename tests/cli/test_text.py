from __future__ import annotations

from ckpt_tool.cli.text import Cell, Span, columns, cut, line, paint, plain, width_of, wrap


def test_columns_are_aligned_and_empty_ones_vanish() -> None:
    """Letters decide the side; a column without text takes no space, and lines have no blanks at their end."""
    rows: list[list[Cell]] = [["name", "", "1"], ["n", "", Span("1,000", "red")], ["longer name", "", Span("", "dim")]]
    assert [plain(found) for found in columns(rows, "llr")] == [
        "name             1",
        "n            1,000",
        "longer name",
    ]


def test_cut_keeps_styles() -> None:
    """What is left of a cut line keeps its styles and ends with an ellipsis."""
    assert cut(line(Span("abcd", "red"), "efgh"), 6) == (Span("abcd", "red"), Span("e"), Span("…"))
    assert cut(line("abc"), 3) == (Span("abc"),)


def test_wrap_breaks_between_words() -> None:
    """Only a word that is too long by itself makes a line longer than the width."""
    found = wrap("a " * 30 + "b" * 50, 40, "note: ", "  ")
    assert [width_of(each) <= 40 for each in found] == [True, True, False]
    assert " ".join(plain(each).removeprefix("note:").strip() for each in found) == "a " * 30 + "b" * 50


def test_paint_leaves_plain_text_alone() -> None:
    """Only styled spans get codes, and each is reset."""
    assert paint(line("a", Span("b", "bold on 117"), Span("c", ""))) == "a\x1b[1;30;48;5;117mb\x1b[0mc"
