"""Who writes what: of every box that several ranks hold, one rank writes it, balanced by bytes.

Decided once for a structure, in columns, by the one process that has heard of all ranks; what some ranks have written
already stays as it is. Pure: the same states give the same assignment.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ckpt_tool.engine.save.columns import HeldState, Names, fqn_of
from ckpt_tool.errors import CoverageError, LayoutError
from ckpt_tool.formats.base import BoxTable
from ckpt_tool.geometry.box import Box
from ckpt_tool.geometry.cover import coverage, exact_duplicates, overlapping_pairs, volumes_match
from ckpt_tool.manifest.model import KeyPath, TensorMeta
from ckpt_tool.manifest.sections import section_of
from ckpt_tool.manifest.tables import IntArray, TensorTable
from ckpt_tool.plan.assign import choose_replicas
from ckpt_tool.records import dataclass, field

__all__ = ["Assigned", "GlobalState", "assign"]


@dataclass(frozen=True, eq=False)
class Assigned:
    """What one rank writes of what it holds."""

    held: HeldState
    rows: IntArray
    """Rows of ``held``, ascending."""
    objects: tuple[int, ...]
    """Rows of ``held.names.objects``, ascending."""

    @property
    def nbytes(self) -> int:
        """Payload."""
        return int(self.held.nbytes[self.rows].sum())


class GlobalState:
    """The tensors of all ranks under one numbering, in order of first appearance by rank."""

    def __init__(self, states: Mapping[int, HeldState]) -> None:
        self._records: dict[str, TensorMeta] = {}
        self._first_rank: dict[str, int] = {}
        self._rows_of: dict[int, IntArray] = {}
        self.objects: dict[str, KeyPath] = {}
        for rank, held in sorted(states.items()):
            if id(held.names) not in self._rows_of:
                self._rows_of[id(held.names)] = self._number(held.names, rank)
        self.tensors = TensorTable.from_records(self._records.values())

    def boxes(self, parts: Mapping[int, tuple[HeldState, IntArray]]) -> BoxTable:
        """The boxes in ``rows`` of each rank, in order of ranks, under the common numbering."""
        width = self.tensors.shape.shape[1]
        tensor, ranks = [], []
        offsets: list[IntArray] = []
        sizes: list[IntArray] = []
        for rank, (held, rows) in sorted(parts.items()):
            own = held.names.width
            tensor.append(self._rows_of[id(held.names)][held.tensor[rows]])
            for column, fill, columns in ((held.offsets, 0, offsets), (held.sizes, 1, sizes)):
                padded = np.full((len(rows), width), fill, dtype=np.int64)
                padded[:, :own] = column[rows]
                columns.append(padded)
            ranks.append(np.full(len(rows), rank, dtype=np.int32))
        if not tensor:
            empty = np.zeros((0, width), dtype=np.int64)
            return BoxTable(np.zeros(0, dtype=np.int32), empty, empty, np.zeros(0, dtype=np.int32))
        return BoxTable(
            np.concatenate(tensor).astype(np.int32), np.concatenate(offsets), np.concatenate(sizes),
            np.concatenate(ranks),
        )  # fmt: skip

    def check(self, boxes: BoxTable) -> None:
        """Nothing, when the boxes cover each tensor exactly once.

        Raises:
            CoverageError: elements that no rank has, or that boxes hold in common which are not equal.
        """
        tensors = self.tensors
        volume = np.prod(boxes.sizes, axis=1, dtype=np.int64)
        tensor = boxes.tensor.astype(np.int64)
        pairs = overlapping_pairs(boxes.offsets, boxes.sizes, tensor, limit=1)
        if len(pairs):
            first, second = pairs[0].tolist()
            held = f"{_box(boxes, first)} of rank {boxes.rank[first]} and {_box(boxes, second)} of {boxes.rank[second]}"
            raise CoverageError(f"boxes overlap without being equal: {held}", where=tensors.fqns[tensor[first]])
        for row in np.flatnonzero(~volumes_match(tensor, volume, tensors.numel))[:1].tolist():
            mine, ndim = tensor == row, int(tensors.ndim[row])
            found = coverage(tensors.shape_of(row), boxes.offsets[mine, :ndim], boxes.sizes[mine, :ndim], limit=1)
            hole = f", the first are {found.gaps[0]}" if found.gaps else ""
            raise CoverageError(
                f"no rank has {found.missing_elements:,} of {int(tensors.numel[row]):,} elements{hole}",
                where=tensors.fqns[row],
                hint="all ranks that hold a part of the state must take part in the save",
            )

    def _number(self, names: Names, rank: int) -> IntArray:
        for path, dtype, shape in zip(names.paths, names.kinds, names.shapes, strict=True):
            fqn = fqn_of(path)
            known = self._records.get(fqn)
            if known is None:
                self._records[fqn] = TensorMeta(fqn, dtype, shape, section_of(path, fqn), path)
                self._first_rank[fqn] = rank
            elif known.shape != shape or known.dtype != dtype:
                raise LayoutError(
                    f"rank {self._first_rank[fqn]} has {known.dtype.name}{list(known.shape)}, "
                    f"rank {rank} {dtype.name}{list(shape)}",
                    where=fqn,
                )
        for path in names.objects:
            self.objects.setdefault(fqn_of(path), path)
        index = {fqn: row for row, fqn in enumerate(self._records)}
        return np.array([index[fqn_of(path)] for path in names.paths], dtype=np.int64)


def _box(boxes: BoxTable, row: int) -> Box:
    return Box(tuple(boxes.offsets[row].tolist()), tuple(boxes.sizes[row].tolist()))


@dataclass
class _Objects:
    taken: set[str] = field(default_factory=set)

    def take(self, names: Names) -> tuple[int, ...]:
        """Rows of objects that nobody has taken yet."""
        rows = [row for row, path in enumerate(names.objects) if fqn_of(path) not in self.taken]
        self.taken.update(fqn_of(names.objects[row]) for row in rows)
        return tuple(rows)


def assign(
    planning: Mapping[int, HeldState], written: Mapping[int, Assigned], world_size: int
) -> tuple[GlobalState, dict[int, Assigned]]:
    """What each rank of ``planning`` writes, given what others have ``written`` already; with the common numbering.

    Boxes go to the holder with the fewest bytes, largest boxes first (`choose_replicas`); objects to the lowest rank.

    Raises:
        LayoutError: ranks disagree about a tensor.
        CoverageError: what is written and assigned together is not the whole of each tensor.
    """
    states = {**{rank: each.held for rank, each in written.items()}, **planning}
    together = GlobalState(states)
    parts = {rank: (each.held, each.rows) for rank, each in written.items()}
    parts |= {rank: (held, np.arange(len(held))) for rank, held in planning.items()}
    ranks = sorted(parts)
    boxes = together.boxes(parts)
    group = exact_duplicates(boxes.offsets, boxes.sizes, boxes.tensor.astype(np.int64))
    nbytes = np.concatenate([parts[rank][0].nbytes[parts[rank][1]] for rank in ranks])
    is_written = np.isin(boxes.rank, list(written))
    done = np.zeros(len(group), dtype=np.bool_)
    done[group[is_written]] = True  # by group
    open_rows = np.flatnonzero(is_written | ~done[group])
    kept = open_rows[
        choose_replicas(group[open_rows], boxes.rank[open_rows].astype(np.int64), nbytes[open_rows], world_size)
    ]
    starts = np.cumsum([0, *(len(parts[rank][1]) for rank in ranks)])
    objects = _Objects()
    for each in written.values():
        objects.taken.update(fqn_of(each.held.names.objects[row]) for row in each.objects)
    assigned: dict[int, Assigned] = dict(written)
    for number, rank in enumerate(ranks):
        if rank in planning:
            mine = kept[(kept >= starts[number]) & (kept < starts[number + 1])] - starts[number]
            assigned[rank] = Assigned(planning[rank], mine, objects.take(planning[rank].names))
    final = together.boxes({rank: (each.held, each.rows) for rank, each in assigned.items()})
    together.check(final)
    return together, assigned
