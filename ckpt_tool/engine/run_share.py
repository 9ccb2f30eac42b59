"""Runs one process's share of a plan, into a folder that another process claims and commits (see ``team``)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from ckpt_tool.engine.base import Progress, RunReport
from ckpt_tool.engine.journal import UnitRecord
from ckpt_tool.engine.moving import Job, move_units, unit_nbytes
from ckpt_tool.engine.sinks import RandomSink
from ckpt_tool.engine.team import Member, Share
from ckpt_tool.plan.assign import split_evenly
from ckpt_tool.plan.model import Plan

__all__ = ["run_share", "units_of"]

_CHECK_S = 1.0
"""Between two looks whether the first process still lives."""


def units_of(plan: Plan, share: Share | None, done: Mapping[int, UnitRecord]) -> list[int]:
    """Units that a process executes: a run of those that are not done, with about as many bytes as any other's."""
    todo = [unit for unit in range(plan.tiles.n_units) if unit not in done]
    if share is None:
        return todo
    bounds = split_evenly(unit_nbytes(plan)[todo], share.count)
    return todo[bounds[share.index] : bounds[share.index + 1]]


def run_share(job: Job, member: Member) -> Iterator[Progress | RunReport]:
    """Execute the units of a process that is not the first; yields progress, then one report.

    Raises:
        StorageError: the first process did not appear, or ended; or the storage failed.
        UsageError: it has another plan.
    """
    started = time.perf_counter()
    plan, target = job.plan, job.target
    with member:
        journal, done = member.join()
        for entry in job.layout.manifest.files:
            target.create(entry.path, entry.nbytes, is_last=entry.path == job.layout.commit_path)
        units = units_of(plan, member.share, done)
        total, moved = int(unit_nbytes(plan)[units].sum()), 0
        checked = time.monotonic()
        for event in move_units(job, units, RandomSink(target), journal, journals_all=True):
            if isinstance(event, int):
                moved += event
                yield Progress(moved, total)
            elif time.monotonic() - checked > _CHECK_S:
                member.check()
                checked = time.monotonic()
        member.check()
        member.finish()
        target.abandon()  # closes the files; the first process commits
    read_nbytes = int(plan.reads.length[_rows_of(plan, units)].sum())
    yield RunReport(read_nbytes, moved, 0, time.perf_counter() - started, ())


def _rows_of(plan: Plan, units: list[int]) -> slice:
    """Pieces read for a run of units; what earlier runs did in between is counted too."""
    if not units:
        return slice(0, 0)
    first, last = plan.tiles.unit_bounds[[units[0], units[-1] + 1]].tolist()
    return slice(int(plan.reads.starts[first]), int(plan.reads.starts[last]))
