"""Partitions: every element of every parameter in exactly one rank's vector, at the place where it is stored."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.errors import FormatError
from ckpt_tool.formats.deepspeed.partition import (
    Slices,
    contiguous_slices,
    cut_at,
    flat_starts,
    partition_length,
    per_parameter_slices,
)

NUMELS = st.lists(st.integers(0, 23), min_size=1, max_size=8)
WORLDS = st.integers(1, 7)


def column(values: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """int64[n]."""
    return np.array(values, dtype=np.int64)


def labels(numels: list[int]) -> list[list[tuple[int, int]]]:
    """Every element of every parameter as (parameter, flat position)."""
    return [[(i, e) for e in range(n)] for i, n in enumerate(numels)]


def held(slices: Slices, vector: list[tuple[int, int] | None]) -> list[tuple[int, int]]:
    """The elements that slices claim, checked against the vector that really has them."""
    found = []
    for parameter, start, stop, position in zip(
        slices.parameter, slices.start, slices.stop, slices.position, strict=True
    ):
        claimed = [(int(parameter), e) for e in range(int(start), int(stop))]
        assert vector[int(position) : int(position) + len(claimed)] == claimed
        found += claimed
    return found


@given(NUMELS, WORLDS, st.lists(st.integers(0, 5), min_size=8, max_size=8))
def test_contiguous_slices_are_a_partition(numels: list[int], world_size: int, padding: list[int]) -> None:
    """Each element lies in one rank's vector, where the slices say; padding lies in no slice."""
    flat: list[tuple[int, int] | None] = []
    for own, pad in zip(labels(numels), padding, strict=False):
        flat += [*own, *([None] * pad)]
    starts = flat_starts(column(numels), column(padding[: len(numels)]))
    length = -(-len(flat) // world_size)
    flat += [None] * (length * world_size - len(flat))
    found = []
    for rank in range(world_size):
        vector = flat[rank * length : (rank + 1) * length]
        found += held(contiguous_slices(starts, column(numels), length, rank), vector)
    assert sorted(found) == [element for own in labels(numels) for element in own]


@given(NUMELS, WORLDS)
def test_per_parameter_slices_are_a_partition(numels: list[int], world_size: int) -> None:
    """Each parameter is cut by itself, the last ranks' parts shorter or empty, and padded in place."""
    found = []
    for rank in range(world_size):
        vector: list[tuple[int, int] | None] = []
        for own in labels(numels):
            per_rank = -(-len(own) // world_size)
            part = own[rank * per_rank : (rank + 1) * per_rank]
            vector += [*part, *([None] * (per_rank - len(part)))]
        found += held(per_parameter_slices(column(numels), world_size, rank), vector)
    assert sorted(found) == [element for own in labels(numels) for element in own]


@given(NUMELS, WORLDS, st.data())
def test_cuts_at_segments_lose_nothing(numels: list[int], world_size: int, data: st.DataObject) -> None:
    """A vector stored in segments holds the same elements, each slice in one segment."""
    total = sum(-(-n // world_size) for n in numels)
    bounds = sorted(data.draw(st.lists(st.integers(0, total), max_size=4)))
    lengths = [b - a for a, b in zip([0, *bounds], [*bounds, total], strict=True)]
    slices = per_parameter_slices(column(numels), world_size, 0)
    cut, segment = cut_at(slices, lengths)
    assert bool((cut.position + cut.stop - cut.start <= column(lengths)[segment]).all())
    begins = np.cumsum(column(lengths)) - column(lengths)

    def elements(rows: Slices, offset: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[tuple[int, int, int]]:
        return [
            (int(p), e, int(at) + e - int(a))
            for p, a, b, at in zip(rows.parameter, rows.start, rows.stop, rows.position + offset, strict=True)
            for e in range(int(a), int(b))
        ]

    assert elements(cut, begins[segment]) == elements(slices, column([0] * len(slices)))


def test_a_vector_that_is_too_short_is_refused() -> None:
    """A slice that ends behind the last segment is an error with both numbers."""
    slices = per_parameter_slices(column([10]), 2, 0)
    with pytest.raises(FormatError, match="ends at element 5 of 4"):
        cut_at(slices, [4])


@pytest.mark.parametrize(
    ("total", "held", "expected"),
    [
        (10, [4, 4, 2], 4),  # stripped
        (10, [4, 4, 4], 4),  # not stripped, as BF16_Optimizer
        (10, [4, 5, 2], None),  # one element too many
        (10, [4, 3, 2], None),  # one too few
        (9, [3, 3, 3], 3),  # aligned to one element, as before 0.4
        (4, [6, 6, 6], None),  # more than any padding
        (0, [0, 0, 0], 0),
    ],
)
def test_partition_length(total: int, held: list[int], expected: int | None) -> None:
    """The length is found whatever the alignment and whether padding is stored, or nothing fits and none is."""
    assert partition_length(total, 3, held, [0, 1, 2]) == expected
