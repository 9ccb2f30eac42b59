"""Units on the move: workers execute them, and what is done is flushed, then journaled, every now and then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ckpt_tool.engine.base import EngineOptions, Guard
from ckpt_tool.engine.clones import Clones
from ckpt_tool.engine.journal import Journal, UnitRecord
from ckpt_tool.engine.pool import run_units
from ckpt_tool.engine.sinks import Sink
from ckpt_tool.engine.tile_digests import TileDigests
from ckpt_tool.engine.worker import Worker
from ckpt_tool.formats.base import LayOut
from ckpt_tool.plan.model import Plan
from ckpt_tool.records import dataclass
from ckpt_tool.storage.forks import can_fork
from ckpt_tool.storage.local.store import LocalStore
from ckpt_tool.storage.local.target import LocalTarget
from ckpt_tool.storage.store import Store
from ckpt_tool.storage.target import Target

__all__ = ["Job", "move_units", "unit_nbytes"]

_JOURNAL_BYTES = 1 << 30
"""Payload between two flushes to storage: at most this much is moved again after a crash."""


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A plan on its way from a store to a target."""

    plan: Plan
    layout: LayOut
    store: Store
    target: Target
    options: EngineOptions
    digests: TileDigests | None
    clones: Clones | None = None
    guard: Guard | None = None


def move_units(
    job: Job, units: Sequence[int], sink: Sink, journal: Journal | None, *, journals_all: bool
) -> Iterator[int | UnitRecord]:
    """Bytes written, as they are, and the record of each finished unit.

    ``journals_all``: at the end everything is flushed and in the journal, for other processes to see.
    """
    plan, target, options = job.plan, job.target, job.options
    n_workers = 1 if target.is_sequential else options.n_workers
    ahead_bytes = options.memory_budget_bytes // 4 // n_workers

    def make_worker() -> Worker:
        return Worker(
            plan, job.store, sink, with_crc32=job.layout.needs_crc32, digests=job.digests, ahead_bytes=ahead_bytes,
            n_workers=n_workers, clones=job.clones,
        )  # fmt: skip

    unflushed: list[UnitRecord] = []
    unflushed_nbytes = 0
    nbytes_of = unit_nbytes(plan)
    in_processes = isinstance(job.store, LocalStore) and isinstance(target, LocalTarget) and can_fork()
    for event in run_units(units, make_worker, n_workers=n_workers, in_processes=in_processes):
        if isinstance(event, UnitRecord):
            if in_processes and isinstance(target, LocalTarget):
                target.note_written(*_paths(plan, event.unit))
            unflushed.append(event)
            unflushed_nbytes += int(nbytes_of[event.unit])
            if journal is not None and options.durable and unflushed_nbytes >= _JOURNAL_BYTES:
                target.flush()
                journal.append(unflushed)
                unflushed, unflushed_nbytes = [], 0
        yield event
    if journals_all and journal is not None:
        target.flush()
        journal.append(unflushed)


def _paths(plan: Plan, unit: int) -> set[str]:
    """Target files that a unit writes to."""
    low, high = plan.writes.starts[plan.tiles.unit_bounds[unit : unit + 2]].tolist()
    return {plan.target.files.paths[row] for row in set(plan.writes.file[low:high].tolist())}


def unit_nbytes(plan: Plan) -> npt.NDArray[np.int64]:
    """int64[n_units]: bytes that each unit writes."""
    tile_nbytes = np.bincount(plan.writes.tile, weights=plan.writes.length, minlength=len(plan.tiles))
    total = np.concatenate([[0], np.cumsum(tile_nbytes)])[plan.tiles.unit_bounds]
    return np.diff(total).astype(np.int64)
