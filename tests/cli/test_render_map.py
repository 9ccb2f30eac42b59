from __future__ import annotations

import pytest

from ckpt_tool.cli.render_map import map_lines
from ckpt_tool.cli.text import paint, width_of
from tests.cli.synthetic import Placed, shard_map, text


def drawn(shape: tuple[int, ...], boxes: list[Placed], *, width: int = 60, limit: int | None = None) -> str:
    """The map as text."""
    return text(map_lines(shard_map(shape, boxes), width=width, limit=limit))


def test_one_dimension_with_replicas() -> None:
    """Bands from the top down; a box that is stored twice names both ranks and both files."""
    boxes: list[Placed] = [("a", (0,), (4,), 0), ("b", (4,), (6,), 1), ("c", (4,), (6,), 2)]
    assert (
        drawn((10,), boxes)
        == """\
w  float32 [10]  40 B

       ┌──────────────────────────────┐
   0:4 │             A r0             │
       ├──────────────────────────────┤
  4:10 │            B r1,2            │
       └──────────────────────────────┘

  box  place   bytes  rank  file  copies
   A   [0:4]      16  0     a
   B   [4:10]     24  1,2   b, c  2 copies"""
    )


def test_two_dimensions_that_are_no_grid() -> None:
    """A box that spans two rows has no line through it; widths follow the sizes."""
    boxes: list[Placed] = [("a", (0, 0), (8, 2), 0), ("b", (0, 2), (3, 4), 1), ("c", (3, 2), (5, 4), 2)]
    assert (
        drawn((8, 6), boxes)
        == """\
w  float32 [8, 6]  192 B

               0:2                       2:6
      ┌───────────────────┬────────────────────────────────┐
  0:3 │        A r0       │              B r1              │
      │                   ├────────────────────────────────┤
  3:8 │                   │              C r2              │
      └───────────────────┴────────────────────────────────┘

  box  place       bytes  rank  file
   A   [0:8, 0:2]     64  0     a
   B   [0:3, 2:6]     48  1     b
   C   [3:8, 2:6]     80  2     c"""
    )


def test_three_cut_dimensions_are_slices() -> None:
    """Of three cut dimensions the last two are drawn, once for each part of the first."""
    boxes: list[Placed] = [
        (f"f{i}{j}{k}", (i, 2 * j, 3 * k), (1, 2, 3), 4 * i + 2 * j + k)
        for i in range(2)
        for j in range(2)
        for k in range(2)
    ]
    found = drawn((2, 4, 6), boxes, width=40).split("\n\n")
    assert (
        found[1]
        == """\
  dim 0 = 0:1
             0:3             3:6
      ┌───────────────┬───────────────┐
  0:2 │      A r0     │      B r1     │
      ├───────────────┼───────────────┤
  2:4 │      C r2     │      D r3     │
      └───────────────┴───────────────┘"""
    )
    assert found[2].splitlines()[0] == "  dim 0 = 1:2"
    assert "E r4" in found[2]


def test_dimensions_that_are_not_cut_are_not_drawn() -> None:
    """A tensor of three dimensions that is cut along the last is one row of boxes."""
    boxes: list[Placed] = [(f"f{k}", (0, 0, 2 * k), (2, 4, 2), k) for k in range(3)]
    assert (
        drawn((2, 4, 6), boxes).split("\n\n")[1]
        == """\
           0:2               2:4               4:6
   ┌─────────────────┬─────────────────┬─────────────────┐
   │       A r0      │       B r1      │       C r2      │
   └─────────────────┴─────────────────┴─────────────────┘"""
    )


def test_a_scalar_is_one_box() -> None:
    """A tensor without dimensions is a box without a ruler."""
    assert "A r5" in drawn((), [("f", (), (), 5)])


def test_holes_and_overlaps_are_shown() -> None:
    """A place that two boxes claim names both, one that none holds is dotted, and a sentence says so."""
    overlap = drawn((8,), [("a", (0,), (4,), 0), ("b", (2,), (4,), 1)])
    assert [line.split("│")[1].strip() for line in overlap.splitlines() if "│" in line] == [
        "A r0",
        "A+B",
        "B r1",
        "···",
    ]
    assert overlap.splitlines()[-1] == "overlap: different boxes hold the same elements, see A+B"
    hole = drawn((8,), [("a", (0,), (4,), 0)])
    assert hole.splitlines()[-1] == "hole: no box holds 4 elements, see ···"


def test_nothing_stored() -> None:
    """A tensor without boxes says so."""
    assert drawn((3,), []).splitlines()[-1] == "nothing of it is stored"


def test_many_boxes_are_listed_not_drawn() -> None:
    """A thousand bands are too many for a drawing; the list is cut and counts the rest."""
    found = drawn((3000,), [(f"f{n}", (3 * n,), (3,), n) for n in range(1000)], limit=2)
    assert "too many boxes to draw" in found
    assert found.splitlines()[-1] == "… 998 more boxes; --limit 0 shows all"


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_drawing_fits_the_terminal(width: int) -> None:
    """No line of the drawing is wider than the terminal."""
    boxes: list[Placed] = [("file", (0, n), (4, 1), n) for n in range(6)]
    lines = map_lines(shard_map((4, 6), boxes), width=width, limit=0)
    drawing = [found for found in lines if any("│" in span.text or "─" in span.text for span in found)]
    assert max((width_of(found) for found in drawing), default=0) <= width


def test_colour_only_repeats_what_the_text_says() -> None:
    """The painted map without its ANSI codes is the plain one, and each rank has a background of its own."""
    lines = map_lines(shard_map((4,), [("a", (0,), (2,), 0), ("b", (2,), (2,), 1)]), width=60, limit=None)
    painted = "\n".join(paint(found) for found in lines)
    assert "48;5;117" in painted
    assert "48;5;222" in painted
