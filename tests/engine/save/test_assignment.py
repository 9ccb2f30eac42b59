"""Who writes what: each box once, balanced, the same on every machine, around what is written already."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from ckpt_tool.engine.save.assignment import assign
from ckpt_tool.engine.save.columns import HeldState, Names
from ckpt_tool.engine.save.shares import shares_message, shares_of, told
from ckpt_tool.errors import CoverageError, LayoutError
from ckpt_tool.manifest.model import KeyPath
from ckpt_tool.manifest.tables import TensorTable

Boxes = list[tuple[int, KeyPath, KeyPath]]


def state(boxes: Boxes, shapes: list[tuple[int, ...]], objects: tuple[KeyPath, ...] = ()) -> HeldState:
    """A rank's columns; tensors are called ``t.0``, ``t.1`` ... and hold bytes."""
    names = Names(tuple(("t", str(i)) for i in range(len(shapes))), ("uint8",) * len(shapes), tuple(shapes), objects)
    return HeldState.of(names, [row for row, _, _ in boxes], [(start, extent) for _, start, extent in boxes])


def replicated(sizes: list[int]) -> HeldState:
    """A rank that holds whole tensors of these bytes."""
    return state([(i, (0,), (size,)) for i, size in enumerate(sizes)], [(size,) for size in sizes])


def test_replicas_are_balanced() -> None:
    """Of 200 tensors that four ranks hold, each is written once, and no rank writes 5% more than the mean."""
    sizes = np.random.default_rng(3).integers(1, 10_000, 200).tolist()
    _, assigned = assign({rank: replicated(sizes) for rank in range(4)}, {}, 4)
    rows = np.concatenate([assigned[rank].rows for rank in range(4)])
    assert sorted(rows.tolist()) == list(range(200))
    loads = [assigned[rank].nbytes for rank in range(4)]
    assert max(loads) <= 1.05 * sum(loads) / 4
    again = assign({rank: replicated(sizes) for rank in (3, 1, 0, 2)}, {}, 4)[1]
    assert all(again[rank].rows.tolist() == assigned[rank].rows.tolist() for rank in range(4))


def cut_all(tensors: TensorTable) -> npt.NDArray[np.bool_]:
    """Every box may be cut."""
    return np.ones(len(tensors), dtype=np.bool_)


def test_few_large_replicas_are_cut() -> None:
    """Three tensors on four ranks: each writes three quarters of one, and what it is told says so on the way."""
    shapes: list[tuple[int, ...]] = [(100, 1 << 10), (1 << 10, 100), (2, 51_200)]
    held = state([(i, (0, 0), shape) for i, shape in enumerate(shapes)], shapes)
    together, assigned = assign(dict.fromkeys(range(4), held), {}, 4, cut_all)
    loads = [assigned[rank].nbytes for rank in range(4)]
    assert sum(loads) == 307_200
    assert max(loads) <= 1.05 * 307_200 / 4
    shares = shares_of(shares_message(7, {rank: told(each) for rank, each in assigned.items()}, range(4)))
    received = {rank: share.of(held) for rank, share in shares.items()}
    assert all(received[rank].rows.tolist() == assigned[rank].rows.tolist() for rank in range(4))
    together.check(together.boxes({rank: each.boxes for rank, each in received.items()}))
    whole = assign(dict.fromkeys(range(4), held), {}, 4)[1]
    assert sorted(whole[rank].nbytes for rank in range(4)) == [0, 102_400, 102_400, 102_400]


@pytest.mark.parametrize("changing", [(0,), (2,), (1, 3), (0, 1, 2), (0, 1, 2, 3)])
def test_around_parts_that_are_written(changing: tuple[int, ...]) -> None:
    """Ranks whose structure is new share what they had before among them, however it was cut; `assign` checks it."""
    sizes = [300_000, 200_000, 100_000]
    _, before = assign(dict.fromkeys(range(4), replicated(sizes)), {}, 4, cut_all)
    kept = {rank: each for rank, each in before.items() if rank not in changing}
    grown = replicated([*sizes, 40_000])
    _, assigned = assign(dict.fromkeys(changing, grown), kept, 4, cut_all)
    assert all(assigned[rank] is before[rank] for rank in kept)
    assert sum(each.nbytes for each in assigned.values()) == 640_000
    _, once_more = assign({1: replicated([*sizes, 40_000, 8])}, {r: assigned[r] for r in (0, 2, 3)}, 4, cut_all)
    assert sum(each.nbytes for each in once_more.values()) == 640_008


def test_shards_stay_where_they_are() -> None:
    """What one rank alone holds it writes; what two share evens the loads out."""
    shapes = [(10, 4), (8,)]
    first = state([(0, (0, 0), (7, 4)), (1, (0,), (8,))], shapes)
    second = state([(0, (7, 0), (3, 4)), (1, (0,), (8,))], shapes)
    _, assigned = assign({0: first, 1: second}, {}, 2)
    assert assigned[0].rows.tolist() == [0]
    assert assigned[1].rows.tolist() == [0, 1]


def test_objects_go_to_the_lowest_rank() -> None:
    """An object that several ranks have is written once; one of a single rank by that."""
    objects: tuple[KeyPath, ...] = (("step",), ("mine@rank1",))
    held = {0: state([(0, (0,), (4,))], [(4,)], objects[:1]), 1: state([(0, (0,), (4,))], [(4,)], objects)}
    _, assigned = assign(held, {}, 2)
    assert [assigned[rank].objects for rank in (0, 1)] == [(0,), (1,)]


def test_around_what_is_written() -> None:
    """A rank whose structure is new gets what nobody has written; what the others wrote stays theirs."""
    _, before = assign({rank: replicated([6, 6, 6, 6]) for rank in range(2)}, {}, 2)
    grown = replicated([6, 6, 6, 6, 9])
    _, assigned = assign({1: grown}, {0: before[0]}, 2)
    assert assigned[0] is before[0]
    assert sorted([*before[0].rows.tolist(), *assigned[1].rows.tolist()]) == [0, 1, 2, 3, 4]


def test_ranks_may_name_different_tensors() -> None:
    """Pipeline stages hold tensors that others have not heard of, in orders of their own."""
    names = Names((("b",), ("a",)), ("uint8", "uint8"), ((3,), (2, 2)), ())
    other = HeldState.of(names, [0, 1], [((0,), (3,)), ((0, 0), (2, 2))])
    together, assigned = assign({0: replicated([5]), 1: other}, {}, 2)
    assert together.tensors.fqns == ("t.0", "b", "a")
    assert assigned[1].rows.tolist() == [0, 1]
    boxes = together.boxes({rank: each.boxes for rank, each in assigned.items()})
    assert boxes.tensor.tolist() == [0, 1, 2]
    assert boxes.sizes.tolist() == [[5, 1], [3, 1], [2, 2]]


@pytest.mark.parametrize(
    ("second", "error", "words"),
    [
        (state([(0, (7,), (2,))], [(10,)]), CoverageError, "t.0: no rank has 1 of 10 elements"),
        (state([(0, (6,), (4,))], [(10,)]), CoverageError, "t.0: boxes overlap without being equal"),
        (state([(0, (7,), (3,))], [(11,)]), LayoutError, r"t.0: rank 0 has uint8\[10\], rank 1 uint8\[11\]"),
    ],
)
def test_refused(second: HeldState, error: type[Exception], words: str) -> None:
    """States that are no whole together are no checkpoint."""
    with pytest.raises(error, match=words):
        assign({0: state([(0, (0,), (7,))], [(10,)]), 1: second}, {}, 2)
