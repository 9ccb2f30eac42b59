"""Who writes what: of every box that several ranks hold, one rank writes it, or several a part each: evenly by bytes.

Decided once for a structure, in columns, by the one process that has heard of all ranks; what some ranks have written
already stays as it is. Pure: the same states give the same assignment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from ckpt_tool.engine.save.columns import HeldState, Names, fqn_of
from ckpt_tool.errors import CoverageError, LayoutError
from ckpt_tool.formats.base import BoxTable
from ckpt_tool.geometry.box import Box
from ckpt_tool.geometry.columns import distinct
from ckpt_tool.geometry.cover import coverage, exact_duplicates, gaps, overlapping_pairs, volumes_match
from ckpt_tool.manifest.model import KeyPath, TensorMeta
from ckpt_tool.manifest.sections import section_of
from ckpt_tool.manifest.tables import IntArray, TensorTable
from ckpt_tool.plan.shared_boxes import shared_boxes
from ckpt_tool.records import dataclass, field
from ckpt_tool.sizes import counted

__all__ = ["Assigned", "GlobalState", "MayCut", "assign"]

MayCut = Callable[[TensorTable], npt.NDArray[np.bool_]]
"""bool[n_tensors]: whose boxes may be written in parts; see `CuttingWriter`."""
_ALL = 1 << 62


@dataclass(frozen=True, eq=False)
class Assigned:
    """What one rank writes of what it holds."""

    held: HeldState
    rows: IntArray
    """Rows of ``held``, ascending; one comes again where the rank writes several parts of a box."""
    boxes: HeldState
    """One for each of ``rows``: that box, or a part of it."""
    objects: tuple[int, ...]
    """Rows of ``held.names.objects``, ascending."""

    @property
    def nbytes(self) -> int:
        """Payload."""
        return int(self.boxes.nbytes.sum())


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

    def boxes(self, parts: Mapping[int, HeldState]) -> BoxTable:
        """The boxes of each rank, in order of ranks, under the common numbering."""
        width = self.tensors.shape.shape[1]
        tensor, ranks = [], []
        offsets: list[IntArray] = []
        sizes: list[IntArray] = []
        for rank, held in sorted(parts.items()):
            own = held.names.width
            tensor.append(self._rows_of[id(held.names)][held.tensor])
            for column, fill, columns in ((held.offsets, 0, offsets), (held.sizes, 1, sizes)):
                padded = np.full((len(held), width), fill, dtype=np.int64)
                padded[:, :own] = column
                columns.append(padded)
            ranks.append(np.full(len(held), rank, dtype=np.int32))
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
                f"no rank has {found.missing_elements:,} of {counted(int(tensors.numel[row]), 'element')}{hole}",
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
    planning: Mapping[int, HeldState],
    written: Mapping[int, Assigned],
    world_size: int,
    may_cut: MayCut | None = None,
) -> tuple[GlobalState, dict[int, Assigned]]:
    """What each rank of ``planning`` writes, given what others have ``written`` already; with the common numbering.

    Boxes are stored once, whole or in parts (`shared_boxes`), objects by the lowest rank.

    Raises:
        LayoutError: ranks disagree about a tensor.
        CoverageError: what is written and assigned together is not the whole of each tensor.
    """
    states = {**{rank: each.held for rank, each in written.items()}, **planning}
    together = GlobalState(states)
    done = together.boxes({rank: each.boxes for rank, each in written.items()})
    held = together.boxes(planning)
    row, offsets, sizes = _open(
        held, done, together.boxes({r: each.held.take(each.rows) for r, each in written.items()})
    )
    table = _joined(BoxTable(held.tensor[row], offsets, sizes, held.rank[row]), done)
    tensor = table.tensor.astype(np.int64)
    group = exact_duplicates(table.offsets, table.sizes, tensor)
    group[len(row) :] = np.arange(len(row), len(group))  # what is written already is nobody else's
    bits = together.tensors.bits
    is_cut = np.zeros(len(bits), dtype=np.bool_) if may_cut is None else may_cut(together.tensors) & (bits % 8 == 0)
    nbytes = np.prod(table.sizes, axis=1, dtype=np.int64) * bits[tensor] // 8
    stored = shared_boxes(
        group, table.rank.astype(np.int64), table.offsets, table.sizes, nbytes, is_cut[tensor], world_size
    )
    starts = np.cumsum([0, *(len(planning[rank]) for rank in sorted(planning))])
    own = np.flatnonzero(stored.row < len(row))
    box = row[stored.row[own]]
    objects = _Objects()
    for each in written.values():
        objects.taken.update(fqn_of(each.held.names.objects[number]) for number in each.objects)
    assigned: dict[int, Assigned] = dict(written)
    for number, rank in enumerate(sorted(planning)):
        state, width = planning[rank], planning[rank].names.width
        mine = np.flatnonzero((box >= starts[number]) & (box < starts[number + 1]))
        rows = box[mine] - starts[number]
        columns = (stored.offsets[own[mine], :width], stored.sizes[own[mine], :width])
        boxes = HeldState(state.names, state.tensor[rows], *columns)
        assigned[rank] = Assigned(state, rows, boxes, objects.take(state.names))
    together.check(together.boxes({rank: each.boxes for rank, each in assigned.items()}))
    return together, assigned


def _open(held: BoxTable, done: BoxTable, whole: BoxTable) -> tuple[IntArray, IntArray, IntArray]:
    """What nobody has written of the boxes ``held``: rows of it, and offsets and sizes, of boxes or parts of them.

    Args:
        held: boxes, by rank.
        done: what was written.
        whole: the box that each of ``done`` is, or is a part of.
    """
    n = len(held)
    both = _joined(held, whole)
    first = exact_duplicates(both.offsets, both.sizes, both.tensor.astype(np.int64))
    is_touched = np.zeros(len(first), dtype=np.bool_)
    is_touched[first[n:]] = True
    volume = np.zeros(len(first), dtype=np.int64)
    np.add.at(volume, first[n:], np.prod(done.sizes, axis=1, dtype=np.int64))
    is_open = volume[first[:n]] < np.prod(held.sizes, axis=1, dtype=np.int64)
    row = np.flatnonzero(~is_touched[first[:n]])
    found = [(row, held.offsets[row], held.sizes[row])]
    partly = np.flatnonzero(is_touched[first[:n]] & is_open)
    for box in distinct(first[partly]).tolist():
        parts = np.flatnonzero(first[n:] == box)
        start, shape = held.offsets[box], tuple(held.sizes[box].tolist())
        holes = gaps(shape, done.offsets[parts] - start, done.sizes[parts], _ALL)
        rows = np.repeat(partly[first[partly] == box], len(holes))
        turns = len(rows) // len(holes)
        offsets = np.tile(np.array([hole.offsets for hole in holes], dtype=np.int64) + start, (turns, 1))
        found.append((rows, offsets, np.tile(np.array([hole.sizes for hole in holes], dtype=np.int64), (turns, 1))))
    row, offsets, sizes = (np.concatenate(column) for column in zip(*found, strict=True))
    order = np.argsort(row, kind="stable")
    return row[order], offsets[order], sizes[order]


def _joined(first: BoxTable, second: BoxTable) -> BoxTable:
    return BoxTable(
        *(
            np.concatenate([getattr(first, name), getattr(second, name)])
            for name in ("tensor", "offsets", "sizes", "rank")
        )
    )
