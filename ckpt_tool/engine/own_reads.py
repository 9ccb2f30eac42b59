"""Own reads are what a rank reads for itself alone: straight into its memory where that can be, else through tiles.

What is read how is found once, and executed for any memory of the same structure. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt_tool.engine.direct import DirectReads, batches, find_direct, find_direct_boxes, read_direct
from ckpt_tool.engine.journal import UnitRecord
from ckpt_tool.engine.landing import Filler, Landing, Places, rank_manifest
from ckpt_tool.engine.pool import run_units
from ckpt_tool.engine.strided import NO_STRIDED, StridedReads, all_bytes, read_strided
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.tables import IntArray
from ckpt_tool.plan.build import make_plan
from ckpt_tool.plan.limits import PlanLimits
from ckpt_tool.plan.model import Plan
from ckpt_tool.records import dataclass
from ckpt_tool.storage.read_buffer import ReadBuffer
from ckpt_tool.storage.store import ReadCost, Store

__all__ = ["OwnReads", "plan_own_boxes", "plan_own_reads", "run_own_reads"]

_UNIT_BYTES = 16 << 20


@dataclass(frozen=True)
class OwnReads:
    """Some boxes, or tiles of a plan, all of whose pieces are this rank's."""

    plan: Plan | None
    """None where all is direct."""
    direct: DirectReads
    strided: StridedReads
    tiles: IntArray
    """int64[n]: tiles that go through a buffer."""

    @cached_property
    def places(self) -> Places | None:
        """Where the pieces of ``tiles`` lie."""
        if self.plan is None or not len(self.tiles):
            return None
        return Places(self.plan, np.flatnonzero(np.isin(self.plan.writes.tile, self.tiles)))

    @cached_property
    def units(self) -> tuple[tuple[str, range], ...]:
        """Work of about 16 MiB each: ``direct`` or ``strided`` and reads of it, or ``tiles`` and positions in these."""
        lengths: dict[str, Sequence[int] | IntArray] = {"direct": self.direct.length, "strided": self.strided.length}
        if self.plan is not None:
            lengths["tiles"] = self.plan.tiles.nbytes[self.tiles]
        return tuple([(kind, run) for kind, nbytes in lengths.items() for run in batches(nbytes, _UNIT_BYTES)])


def plan_own_reads(plan: Plan, landings: Mapping[int, Landing], tiles: IntArray, *, max_read_bytes: int) -> OwnReads:
    """How to read ``tiles`` for ``landings``, or for other memory of the same structure."""
    direct, left = find_direct(plan, landings, tiles, max_read_bytes=max_read_bytes)
    return OwnReads(plan, direct, NO_STRIDED, left)


def plan_own_boxes(
    source: Manifest, boxes: IntArray, landings: Mapping[int, Landing], limits: PlanLimits, cost: ReadCost
) -> OwnReads:
    """How to read ``boxes``, `landing.box_rows` of one rank whose first are its landings.

    Only what can neither be read directly nor be copied once is planned as tiles.
    """
    direct, strided, is_direct = find_direct_boxes(
        source, boxes, landings, cost=cost, max_span_bytes=limits.max_tile_bytes
    )
    width = (boxes.shape[1] - 1) // 2
    own = slice(len(landings))
    if is_direct[own][boxes[own, 1 + width :].all(axis=1)].all():
        return OwnReads(None, direct, strided, np.zeros(0, dtype=np.int64))
    rest = boxes.copy()
    if width:
        rest[is_direct, 1 + width :] = 0  # an empty box keeps the number of its landing
    else:  # numbers without dimensions cannot be empty
        direct = DirectReads((), (), (), (), ())
    plan = make_plan(source, rank_manifest(source, {0: rest}, 1), limits=limits)
    tiles = plan_own_reads(plan, landings, np.arange(len(plan.tiles)), max_read_bytes=cost.max_read_bytes)
    return OwnReads(plan, direct + tiles.direct, strided, tiles.tiles)


def run_own_reads(reads: OwnReads, store: Store, landings: Mapping[int, Landing], *, n_workers: int) -> Iterator[int]:
    """Fill the landings; yields the bytes read by each finished unit."""
    named = {*reads.direct.landing, *reads.strided.landing}
    memory = {number: array for number in named if (array := landings[number].memory.array) is not None}
    flat = {number: all_bytes(memory[number]) for number in set(reads.direct.landing)}

    def worker() -> _Worker:
        return _Worker(reads, store, landings, memory, flat)

    for event in run_units(range(len(reads.units)), worker, n_workers=n_workers):
        if isinstance(event, int):
            yield event


class _Worker:
    """Does units, one at a time."""

    def __init__(
        self,
        reads: OwnReads,
        store: Store,
        landings: Mapping[int, Landing],
        memory: Mapping[int, npt.NDArray[Any]],
        flat: Mapping[int, npt.NDArray[np.uint8]],
    ) -> None:
        self._reads, self._store, self._memory, self._flat = reads, store, memory, flat
        self._spans = ReadBuffer()
        plan, places = reads.plan, reads.places
        self._filler = None if plan is None or places is None else Filler(plan, store, landings, places)

    def ahead(self, units: Sequence[int]) -> AbstractContextManager[None]:
        """A block in which these units are done in this order."""
        if self._filler is None:
            return nullcontext()
        runs = (run for unit in units for kind, run in [self._reads.units[unit]] if kind == "tiles")
        return self._filler.ahead(tile for run in runs for tile in self._reads.tiles[run.start : run.stop].tolist())

    def run_unit(self, unit: int, progress: Callable[[int], None]) -> UnitRecord:
        """Read one unit; ``progress`` gets the bytes read."""
        kind, rows = self._reads.units[unit]
        if kind == "direct":
            read_direct(self._reads.direct, rows, self._store, self._flat)
            progress(sum(self._reads.direct.length[rows.start : rows.stop]))
        elif kind == "strided":
            read_strided(self._reads.strided, rows, self._store, self._memory, self._spans)
            progress(sum(self._reads.strided.length[rows.start : rows.stop]))
        elif self._filler is not None:
            before = self._filler.read_nbytes
            with self.ahead([unit]):
                for tile in self._reads.tiles[rows.start : rows.stop].tolist():
                    self._filler.fill(tile)
            progress(self._filler.read_nbytes - before)
        return UnitRecord(unit, (), ())
