"""Meshes: rank order and their text form."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tool.errors import LayoutError
from ckpt_tool.layout.mesh import Mesh, default_mesh, parse_mesh


@given(st.lists(st.integers(1, 4), max_size=4))
@settings(max_examples=40)
def test_ranks_are_row_major(sizes: list[int]) -> None:
    """coords() lists coord(rank) of every rank, the last axis fastest, and the text form reads back."""
    mesh = Mesh(("pp", "dp", "cp", "tp")[: len(sizes)], tuple(sizes))
    assert [dict(zip(mesh.axes, row, strict=True)) for row in mesh.coords().tolist()] == [
        mesh.coord(rank) for rank in range(mesh.world_size)
    ]
    for rank in range(mesh.world_size):
        number = 0
        for axis in mesh.axes:
            number = number * mesh.size(axis) + mesh.coord(rank)[axis]
        assert number == rank
    assert parse_mesh(str(mesh)) == mesh


def test_megatron_order() -> None:
    """The tp axis is fastest, then cp, then dp; pp is slowest; with experts dp is edp x ep, ep faster."""
    mesh = default_mesh(tp=2, pp=2, dp=4, cp=3)
    assert mesh.coord(1) == {"pp": 0, "dp": 0, "cp": 0, "tp": 1}
    assert mesh.coord(2) == {"pp": 0, "dp": 0, "cp": 1, "tp": 0}
    assert mesh.coord(6) == {"pp": 0, "dp": 1, "cp": 0, "tp": 0}
    assert mesh.coord(24) == {"pp": 1, "dp": 0, "cp": 0, "tp": 0}
    moe = default_mesh(tp=2, dp=4, ep=2)
    assert (str(moe), moe.world_size, moe.coord(2)["ep"]) == ("pp=1,edp=2,ep=2,cp=1,tp=2", 8, 1)
    assert (moe.size("ep"), moe.size("dp")) == (2, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp=4,tp", "'tp' in mesh 'dp=4,tp' is not an axis with its size"),
        ("dp=0", "must be at least 1, got dp=0"),
        ("dp=2,dp=2", "names an axis twice"),
    ],
)
def test_a_text_that_is_no_mesh_is_refused(text: str, message: str) -> None:
    """The error quotes the part that is wrong."""
    with pytest.raises(LayoutError, match=message):
        parse_mesh(text)


def test_experts_need_data_parallel_ranks() -> None:
    """The size of ep must divide dp; the hint names numbers that work."""
    with pytest.raises(LayoutError, match=r"ep must divide dp; got ep=4, dp=6") as caught:
        default_mesh(dp=6, ep=4)
    assert caught.value.hint == "use --ep 3, or --dp 8"


def test_axes_and_ranks_are_checked() -> None:
    """Sizes go with axes, and a rank must exist."""
    with pytest.raises(LayoutError, match=r"1 axes .* 2 sizes"):
        Mesh(("dp",), (1, 2))
    with pytest.raises(LayoutError, match="ranks 0 to 3, there is no rank 4"):
        Mesh(("dp",), (4,)).coord(4)
