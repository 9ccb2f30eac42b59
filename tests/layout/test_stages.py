"""Layers over pipeline stages."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_tool.errors import LayoutError
from ckpt_tool.layout.stages import StageOptions, layer_stages


@given(st.integers(0, 30), st.integers(1, 5), st.integers(1, 3))
@settings(max_examples=80)
def test_every_layer_has_one_place(n_layers: int, pp: int, vpp: int) -> None:
    """Layers 0 to n-1 run through chunk 0 of all stages, then chunk 1; stages differ by one layer at most."""
    stages = layer_stages(n_layers, pp, StageOptions(vpp=vpp))
    slots = (stages.chunk * pp + stages.stage).tolist()
    assert slots == sorted(slots)
    assert len(slots) == n_layers
    assert not slots or max(slots) < pp * vpp
    counts = [stages.stage.tolist().count(stage) for stage in range(pp)]
    assert max(counts) - min(counts) <= 1


def test_uneven_stages_and_virtual_ones() -> None:
    """5 layers on 2 stages are 3 and 2, and with 2 chunks each (2, 1) and (1, 1): nothing is lost or held twice."""
    assert str(layer_stages(5, 2, StageOptions())) == "stage 0: layers 0-2, stage 1: layers 3-4"
    virtual = layer_stages(5, 2, StageOptions(vpp=2))
    assert str(virtual) == (
        "stage 0 chunk 0: layers 0-1, stage 0 chunk 1: layer 3, stage 1 chunk 0: layer 2, stage 1 chunk 1: layer 4"
    )


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [(2, None, [2, 4, 4]), (None, 2, [4, 4, 2]), (1, 3, [1, 6, 3]), (0, 0, [0, 10, 0])],
)
def test_first_and_last_stage_may_be_given(first: int | None, last: int | None, expected: list[int]) -> None:
    """Given numbers are kept, the other stages share the rest."""
    options = StageOptions(first_stage_layers=first, last_stage_layers=last)
    stage = layer_stages(10, 3, options).stage.tolist()
    assert [stage.count(i) for i in range(3)] == expected


@pytest.mark.parametrize(
    ("n_layers", "pp", "first", "last"), [(4, 2, 3, 3), (4, 2, 1, 1), (4, 2, -1, None), (3, 1, 2, 2)]
)
def test_numbers_that_do_not_add_up_are_refused(n_layers: int, pp: int, first: int, last: int | None) -> None:
    """80 layers must not quietly become 64."""
    with pytest.raises(LayoutError, match="do not fit"):
        layer_stages(n_layers, pp, StageOptions(first_stage_layers=first, last_stage_layers=last))


def test_there_must_be_a_stage() -> None:
    """pp=0 is refused."""
    with pytest.raises(LayoutError, match="pp and vpp must be at least 1"):
        layer_stages(4, 0, StageOptions())
