"""The boxes that the ranks' files of a target hold, numbered one by one, each in the storage where it will lie.

The same request gives the same numbers, so that they can be counted before the files are laid out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from ckpt_tool.errors import LayoutError, Unsupported
from ckpt_tool.formats._torch_file.written import Storage
from ckpt_tool.formats.base import BoxTable
from ckpt_tool.formats.megatron.rank_target import SLOTS, Flat, Held, RankTarget, rank_targets
from ckpt_tool.formats.megatron.target_common import COMMON_STEP, is_common, is_distributed
from ckpt_tool.formats.megatron.target_grid import TargetGrid
from ckpt_tool.formats.megatron.target_random import SavedStates, state_number
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.model import KeyPath
from ckpt_tool.manifest.tables import TensorTable, pad_shapes
from ckpt_tool.records import dataclass, field

__all__ = ["Buffer", "ParameterState", "Rank", "RankRows"]


@dataclass(frozen=True)
class Buffer:
    """A gradient buffer's state: flat storages by slot."""

    chunk: int
    weights: str
    """Element type of the weights."""
    numel: int
    slots: Mapping[str, Storage]


@dataclass(frozen=True)
class ParameterState:
    """What an optimizer that is not the distributed one has of one parameter."""

    held: Held
    slots: Mapping[str, tuple[int, Storage]]
    """Row of the request's tensors and storage, by slot; ``step`` where it is a tensor."""


@dataclass
class Rank:
    """One rank's storages."""

    target: RankTarget
    chunks: list[list[tuple[Held, Storage]]] = field(default_factory=list)
    optimizers: list[list[Buffer] | None] = field(default_factory=list)
    """Of the dense optimizer and the experts', or of one for both; None for what another rank has."""
    states: list[ParameterState] = field(default_factory=list)
    """Without the distributed optimizer, by parameter in the order of registration."""
    common: dict[int, Storage] = field(default_factory=dict)
    """Tensors of the common state, by row of the request."""
    extras: dict[str, tuple[int, Storage]] = field(default_factory=dict)
    """Row and storage of modules' extra states that are tensors, by key."""
    random: list[Storage] = field(default_factory=list)
    """Tensors of the rank's random state, in order."""
    random_number: int | None = None
    """Which rank of the source's per-rank files has that state."""


@dataclass
class RankRows:
    """Boxes of all ranks, numbered as they are made."""

    tensors: TensorTable
    index: Mapping[KeyPath, int]
    ranks: list[Rank] = field(default_factory=list)
    columns: list[tuple[int, Box, int]] = field(default_factory=list)
    """Tensor, box, rank."""

    @classmethod
    def of(cls, tensors: TensorTable, grid: TargetGrid, info: Mapping[str, Any]) -> RankRows:
        """The boxes of all ranks.

        Raises:
            LayoutError: layers or weights cannot be cut so, or a weight has no state.
            Unsupported: see ``rank_targets``; or state of an element type that files of this form do not have.
        """
        args = info.get("args", {})
        paths = tensors.paths or ()
        found = cls(tensors, {path: row for row, path in enumerate(paths)})
        common = [row for row, path in enumerate(paths) if is_common(tensors.fqns[row], path)]
        steps = [row for row in common if paths[row][-1] == COMMON_STEP]
        saved = SavedStates.of(tensors, ())
        has_state = any(path[:2] == ("optimizer", "state") for path in paths)
        for number, target in enumerate(rank_targets(tensors, grid, args)):
            rank = Rank(target)
            for chunk in target.chunks:
                rank.chunks.append([(held, found._of_weight("", held, number)) for held in chunk])
            is_apart = grid.parts_experts(args) and bool(target.experts)
            if has_state and is_distributed(info):
                for is_expert in (False, True) if is_apart else (None,):
                    # Whoever is the first of its data-parallel group, or of that of experts, gathers the state.
                    n_holders = target.n_experts_holders if is_expert else grid.tp
                    flats = target.flats(grid, args, experts=is_expert) if target.number < n_holders else None
                    rank.optimizers.append(None if flats is None else found._buffers(flats, number))
            elif has_state:
                for held in (held for chunk in target.chunks for held in chunk if held.is_parameter):
                    own_steps = steps[-1:] if held.is_expert and is_apart else steps[:1]
                    rank.states.append(found._state(held, own_steps, number))
            rank.common = {row: found._whole(row, number) for row in common if row not in steps}
            for key in dict.fromkeys(held.extra_key for chunk in target.chunks for held in chunk):
                extra = None if key is None else found.index.get(("model", key))
                if key is not None and extra is not None:
                    rank.extras[key] = (extra, found._whole(extra, number))
            rank.random_number = state_number(
                saved.rows, args, grid, target.stage, target.tensor_rank, target.expert_rank
            )
            if rank.random_number is not None:
                rank.random = [found._whole(row, number) for row in saved.rows[rank.random_number]]
            found.ranks.append(rank)
        return found

    def boxes(self) -> BoxTable:
        """All boxes as columns."""
        width = self.tensors.shape.shape[1]
        return BoxTable(
            np.array([row for row, _, _ in self.columns], dtype=np.int32),
            pad_shapes([box.offsets for _, box, _ in self.columns], width, 0),
            pad_shapes([box.sizes for _, box, _ in self.columns], width, 1),
            np.array([rank for _, _, rank in self.columns], dtype=np.int32),
        )

    def _whole(self, row: int, rank: int) -> Storage:
        """A storage that a whole tensor fills."""
        nbytes = int(self.tensors.nbytes[row])
        self.columns.append((row, Box.whole(self.tensors.shape_of(row)), rank))
        return Storage.of_row(len(self.columns) - 1, nbytes)

    def _of_weight(self, slot: str, held: Held, rank: int, start: int = 0) -> Storage:
        """The storage of a weight, or of a slot of its state, from the byte of element ``start`` on."""
        row = self.index.get(("optimizer", "state", slot, held.key) if slot else ("model", held.key))
        if row is None:
            raise LayoutError(f"has no {slot} in the optimizer's state", where=held.key)
        itemsize = self.tensors.dtypes[row].bits // 8
        rows, starts, end = range(len(self.columns), len(self.columns) + len(held.boxes)), [], start * itemsize
        for box in held.boxes:
            starts.append(end)
            self.columns.append((row, box, rank))
            end += box.volume * itemsize
        return Storage(end, tuple(rows), tuple(starts), tuple(box.volume * itemsize for box in held.boxes))

    def _buffers(self, flats: Sequence[Flat], rank: int) -> list[Buffer]:
        """State of one optimizer."""
        found = []
        for flat in flats:
            kinds = {self.tensors.dtypes[self.index["model", held.key]].name for held, _ in flat.parts}
            if len(kinds) > 1:
                raise Unsupported(
                    f"weights of {' and '.join(sorted(kinds))} have buffers of their own, whose order is not known",
                    hint="write the weights alone: --include 'model.*'",
                )
            slots = {}
            for slot in SLOTS:
                own = [self._of_weight(slot, held, rank, start) for held, start in flat.parts]
                row = self.index["optimizer", "state", slot, flat.parts[0][0].key]
                if self.tensors.dtypes[row].name != "float32":
                    raise Unsupported(
                        f"is {self.tensors.dtypes[row].name}, expected float32", where=self.tensors.fqns[row]
                    )
                slots[slot] = Storage.joined(flat.numel * 4, own)
            found.append(Buffer(flat.chunk, kinds.pop(), flat.numel, slots))
        return found

    def _state(self, held: Held, steps: Sequence[int], rank: int) -> ParameterState:
        """State of one parameter."""
        slots: dict[str, tuple[int, Storage]] = {}
        for slot in self._slots:
            row = self.index.get(("optimizer", "state", slot, held.key))
            if row is not None:
                slots[slot] = (row, self._of_weight(slot, held, rank))
        if not slots:
            raise LayoutError("has no state in the optimizer", where=held.key)
        for row in steps:
            slots["step"] = (row, self._whole(row, rank))
        return ParameterState(held, slots)

    @cached_property
    def _slots(self) -> tuple[str, ...]:
        """Names of the states that weights have; Adam's in its order, then those of others."""
        found = {str(path[2]) for path in self.index if path[:2] == ("optimizer", "state") and len(path) == 4}
        return (*(slot for slot in SLOTS if slot in found), *sorted(found - set(SLOTS)))
