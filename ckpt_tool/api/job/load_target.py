"""The target of a load: which boxes of which saved tensors the live state of this rank is to be filled with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ckpt_tool.api.convert.published import ENDS_IN_ONE
from ckpt_tool.api.job.load_match import Expected, Match, NameMap, Problem, SavedValues, match_tensors
from ckpt_tool.api.job.load_settle import settled, tied_leaves
from ckpt_tool.engine.landing import Landing, Memory, box_rows
from ckpt_tool.errors import Unsupported
from ckpt_tool.geometry.box import Box, intersect
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.tables import IntArray
from ckpt_tool.records import dataclass

if TYPE_CHECKING:
    from ckpt_tool.engine.distributed_group import Device
    from ckpt_tool.frameworks.state import LiveState

__all__ = [
    "Memories", "StateKey", "Target", "device_of", "fill_from_objects", "matched", "memories_of", "names_in_one",
    "state_key", "target_of",
]  # fmt: skip

StateKey: TypeAlias = tuple[Any, ...]
Memories: TypeAlias = list[list[Memory | None]]


@dataclass(frozen=True, slots=True)
class Target:
    """This rank's side of the join; holds no tensor, so that it outlives a load."""

    match: Match
    places: tuple[tuple[int, int, int, Box], ...]
    """(leaf, part of it, row of the checkpoint's tensors, box) of what is to be filled; the box is the part's, or the
    start of it where the saved tensor is shorter."""
    rows: IntArray
    """`box_rows` of ``places``, and of the tensors of which this rank holds nothing."""
    filled_nbytes: int

    def problems(self, *, strict: bool) -> list[Problem]:
        """What does not fit on this rank."""
        return [each for each in self.match.problems if strict or each.kind not in {"missing", "unexpected"}]

    def landings(self, live: LiveState, memories: Memories | None = None) -> dict[int, Landing]:
        """The memory of ``live`` that ``places`` are, by position; ``live`` must have the structure of this target.

        Raises:
            Unsupported: memory that cannot be filled.
        """
        from ckpt_tool.frameworks.memory import memory_of

        found: dict[int, Landing] = {}
        for number, (leaf_number, position, row, box) in enumerate(self.places):
            leaf = live.leaves[leaf_number]
            part = leaf.parts[position]
            memory = None if memories is None or part.box.sizes != box.sizes else memories[leaf_number][position]
            if memory is None:
                cut = tuple([slice(size) for size in box.sizes])
                memory = memory_of(part.view if part.box.sizes == box.sizes else part.view[cut], leaf.fqn)
            found[number] = Landing(row, box, leaf.dtype, memory)
        return found


def memories_of(live: LiveState) -> Memories:
    """The memory of each part of each leaf, for `Target.landings`: what can be done before any checkpoint is known.

    None for what cannot be filled, which is no failure where no checkpoint has it.
    """
    return [[_memory(part.view, leaf.fqn) for part in leaf.parts] for leaf in live.leaves]


def names_in_one(live: LiveState | None, names: NameMap | None) -> list[str]:
    """Names of this rank's tensors that hold all experts of a layer; none where the caller maps names."""
    return [] if live is None or names is not None else [e.fqn for e in live.leaves if e.fqn.endswith(ENDS_IN_ONE)]


def _memory(view: Any, where: str) -> Memory | None:
    from ckpt_tool.frameworks.memory import memory_of

    try:
        return memory_of(view, where)
    except Unsupported:
        return None


def device_of(live: LiveState | None) -> Device | None:
    """The device on which this rank's tensors are, the first of them; None where all are in the host's memory."""
    parts = () if live is None else (part for leaf in live.leaves for part in leaf.parts)
    return next((part.view.device for part in parts if part.view.device.type != "cpu"), None)


def state_key(live: LiveState) -> StateKey:
    """Equal for states that differ in nothing but their numbers and where in memory these are."""
    leaves = [
        (
            leaf.path, leaf.dtype.name, leaf.shape,
            tuple([(part.box.offsets, part.box.sizes, part.view.stride(), part.view.device.type)
                   for part in leaf.parts]),
        )
        for leaf in live.leaves
    ]  # fmt: skip
    empty = tuple(isinstance(slot.value, Mapping) and not slot.value for slot in live.slots)
    made = tuple(entry.path for entry in live.made)
    return (tuple(leaves), tuple(slot.path for slot in live.slots), empty, made, tuple(tied_leaves(live).items()))


def matched(live: LiveState, manifest: Manifest, names: NameMap | None, *, cast: bool, rank: int) -> Match:
    """The checkpoint's row of each tensor of the state, on one rank."""
    expected = [Expected(leaf.path, leaf.fqn, leaf.shape, leaf.dtype, leaf.may_differ) for leaf in live.leaves]
    match = match_tensors(manifest, expected, names=names, cast=cast, rank=rank)
    return settled(live, manifest, match, rank)


def fill_from_objects(live: LiveState, match: Match, saved: SavedValues, *, cast: bool) -> list[Problem]:
    """Fill the tensors in tuples, which are part of an object where a state was saved as DCP does it.

    Returns what does not fit, or is not in that object.
    """
    from ckpt_tool.frameworks.tensors import fill_whole

    problems = []
    for leaf, row in zip(live.leaves, match.rows, strict=True):
        if row < 0 and leaf.path in live.in_tuples and saved.has_above(leaf.path):
            misfit = fill_whole(leaf, saved.find(leaf.path)[1], cast=cast)
            if misfit is not None:
                problems.append(Problem(misfit[0], leaf.fqn, misfit[1]))
    return problems


def target_of(live: LiveState, manifest: Manifest, match: Match) -> Target:
    """What is to be filled of ``live``, where it fits."""
    bad = {problem.fqn for problem in match.problems}
    width = manifest.tensors.shape.shape[1]
    places: list[tuple[int, int, int, Box]] = []
    filled = 0
    for number, (leaf, row) in enumerate(zip(live.leaves, match.rows, strict=True)):
        if row < 0 or (bad and leaf.fqn in bad):
            continue
        saved = Box.whole(manifest.tensors.shape_of(row)) if leaf.may_differ else None
        for position, part in enumerate(leaf.parts):
            box = part.box if saved is None else intersect(part.box, saved)
            if box is not None and box.volume:
                places.append((number, position, row, box))
                filled += leaf.dtype.nbytes(box.volume)
    absent = sorted({row for row in match.rows if row >= 0} - {row for _, _, row, _ in places})
    empty = np.zeros((len(absent), 1 + 2 * width), dtype=np.int64)
    empty[:, 0] = absent
    rows = np.concatenate([box_rows([(row, box) for _, _, row, box in places], width), empty])
    return Target(match, tuple(places), rows, filled)
