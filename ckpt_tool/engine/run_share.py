"""Runs one process's share of a plan, into a target that another process commits (see ``team``, ``remote_team``)."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from ckpt_tool.engine.around import early_segments, files_of, rest_of, sent_units
from ckpt_tool.engine.base import Progress, RunReport
from ckpt_tool.engine.journal import UnitRecord
from ckpt_tool.engine.moving import Job, move_units, unit_nbytes
from ckpt_tool.engine.sinks import OrderedSink, RandomSink
from ckpt_tool.engine.team import Member, Share
from ckpt_tool.plan.assign import split_evenly
from ckpt_tool.plan.model import Plan

if TYPE_CHECKING:
    from ckpt_tool.engine.remote_team import RemoteMember
    from ckpt_tool.storage.parts.target import PartTarget

__all__ = ["run_remote_share", "run_share", "units_of", "units_of_files"]

_CHECK_S = 1.0
"""Between two looks whether the first process still lives."""


def units_of(plan: Plan, share: Share | None, done: Mapping[int, UnitRecord]) -> list[int]:
    """Units that a process executes: a run of those that are not done, with about as many bytes as any other's."""
    todo = [unit for unit in range(plan.tiles.n_units) if unit not in done]
    if share is None:
        return todo
    bounds = split_evenly(unit_nbytes(plan)[todo], share.count)
    return todo[bounds[share.index] : bounds[share.index + 1]]


def units_of_files(plan: Plan, own: Collection[str], done: Mapping[int, UnitRecord]) -> list[int]:
    """Units that write ``own`` files and are not done; each unit of the plan writes files of one owner."""
    is_own = np.array([path in own for path in plan.target.files.paths], dtype=bool)
    first = plan.writes.starts[plan.tiles.unit_bounds[:-1]] if len(plan.writes) else np.zeros(0, dtype=np.int64)
    return [unit for unit in np.flatnonzero(is_own[plan.writes.file[first]]).tolist() if unit not in done]


def run_remote_share(job: Job, target: PartTarget, member: RemoteMember) -> Iterator[Progress | RunReport]:
    """Send the files of a process that is not the first; yields progress, then one report.

    Raises:
        StorageError: the first process did not appear, or ended; or the storage failed.
        UsageError: it has another plan.
    """
    started = time.perf_counter()
    plan, layout = job.plan, job.layout
    own = files_of(layout, member.share) or frozenset()
    with member:
        journal, earlier = member.join()
        for entry in layout.manifest.files:
            if entry.path in own:
                target.create(entry.path, entry.nbytes)
        done = sent_units(plan, earlier, target, own)
        units = units_of_files(plan, own, done)
        sink = OrderedSink(target, early_segments(layout, own))
        total, moved = int(unit_nbytes(plan)[units].sum()), 0
        checked = time.monotonic()
        for event in move_units(job, units, sink, journal, journals_all=True):
            if isinstance(event, int):
                moved += event
                yield Progress(moved, total)
                continue
            done[event.unit] = event
            if time.monotonic() - checked > _CHECK_S:
                member.check()
                checked = time.monotonic()
        sink.finish([segment for segment in rest_of(plan, layout, done) if segment.path in own])
        target.flush()
        member.check()
        member.finish(sorted(own))
        target.abandon()  # the first process joins the parts
    unit_of_read = np.searchsorted(plan.tiles.unit_bounds, plan.reads.tile, side="right") - 1
    read_nbytes = int(plan.reads.length[np.isin(unit_of_read, units)].sum())
    yield RunReport(read_nbytes, moved, 0, time.perf_counter() - started, ())


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
