"""Runs a plan on this machine: a few threads take units of tiles, a journal remembers what is done, a commit ends it.

The state of a run: planned -> files created -> units moved (each: moved, flushed, journaled) -> headers written ->
commit file written -> named. A run killed in any state leaves nothing that reads as a checkpoint, and goes on from the
last journaled unit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import astuple
from typing import TYPE_CHECKING

import numpy as np

from ckpt_tool.engine.around import early_segments, files_of, rest_of, segment_files, sent_units
from ckpt_tool.engine.base import CastEffect, CastReport, EngineOptions, Guard, Progress, RunReport
from ckpt_tool.engine.clones import Clones
from ckpt_tool.engine.journal import Journal, UnitRecord
from ckpt_tool.engine.moving import Job, move_units, unit_nbytes
from ckpt_tool.engine.recorded import check_recorded
from ckpt_tool.engine.run_share import run_remote_share, run_share, units_of, units_of_files
from ckpt_tool.engine.sinks import OrderedSink, RandomSink, Sink
from ckpt_tool.engine.team import Leader, Member, Share, records_of_processes
from ckpt_tool.engine.tile_digests import TileDigests
from ckpt_tool.errors import StorageError, UsageError
from ckpt_tool.formats.base import LayOut
from ckpt_tool.plan.model import Plan
from ckpt_tool.sizes import counted, format_bytes
from ckpt_tool.storage.local.store import LocalStore
from ckpt_tool.storage.local.target import LocalTarget
from ckpt_tool.storage.store import Store
from ckpt_tool.storage.target import Target

if TYPE_CHECKING:
    from ckpt_tool.engine.remote_team import RemoteLeader
    from ckpt_tool.layout.origins import Origins

__all__ = ["run_plan"]


def run_plan(
    plan: Plan,
    layout: LayOut,
    store: Store,
    target: Target,
    options: EngineOptions,
    origins: Origins | None = None,
    share: Share | None = None,
    guard: Guard | None = None,
) -> Iterator[Progress | RunReport]:
    """Execute ``plan`` and commit the target; yields progress, then one report.

    With digests, ``origins`` says what the plan's tensors were made of, where that is of interest too. With a ``share``
    of several processes, this one executes that, and the first of them commits when all are done. It asks ``guard``
    before that whether what all have read is still the same.

    Raises:
        StorageError: no space, or the storage failed, or another process did; the unfinished target stays and can be
            resumed. Or the source has changed.
        IntegrityError: what was read is not what the source's files record of it; needs digests.
        UsageError: several processes, and a target that knows one only; or they do not fit together.
    """
    clones = None
    if isinstance(store, LocalStore) and isinstance(target, LocalTarget):
        clones = Clones(plan, store, target)
    try:
        if share is None or not share.index:
            _check_space(plan, target, 0 if clones is None else _leave_to_share(clones, plan, target))
    except StorageError:
        target.abandon(discard=not target.is_resumed)  # nothing was written yet
        raise
    try:
        digests = TileDigests(plan, origins) if options.digests else None
        job = Job(plan, layout, store, target, options, digests, clones, guard)
        if share is None:
            yield from _run(job, None)
        elif not isinstance(target, LocalTarget):
            yield from _run_remote(job, share)
        elif share.index:
            yield from run_share(job, Member(target.root, share, plan.fingerprint, has_digests=options.digests))
        else:
            stamp = None if guard is None else guard.stamp
            with Leader(target.root, share, plan.fingerprint, has_digests=options.digests, stamp=stamp) as leader:
                yield from _run(job, leader)
    except BaseException:
        target.abandon()
        raise


def _run_remote(job: Job, share: Share) -> Iterator[Progress | RunReport]:
    """One of several processes that write to a target without seek."""
    from ckpt_tool.engine.remote_team import RemoteLeader, RemoteMember  # local runs do without their 10 ms
    from ckpt_tool.storage.parts.target import PartTarget

    target, plan = job.target, job.plan
    if not isinstance(target, PartTarget):
        hint = "run one process (--split 0/1), which has as many threads as are asked for with --workers"
        raise UsageError("several processes write to a local folder, S3 or HDFS only", where=target.url, hint=hint)
    if share.index:
        yield from run_remote_share(
            job, target, RemoteMember(target, share, plan.fingerprint, has_digests=job.digests is not None)
        )
    else:
        with RemoteLeader(target, share, plan.fingerprint, has_digests=job.digests is not None) as leader:
            yield from _run(job, leader)


def _run(job: Job, leader: Leader | RemoteLeader | None) -> Iterator[Progress | RunReport]:
    started = time.perf_counter()
    plan, layout, target = job.plan, job.layout, job.target
    share = None if leader is None else leader.share
    own = files_of(layout, share) if target.is_sequential else None
    journal, done = _begun(job, leader)
    sink: Sink = OrderedSink(target, early_segments(layout, own)) if target.is_sequential else RandomSink(target)
    total = plan.stats.written_nbytes
    nbytes_of = unit_nbytes(plan)
    resumed = int(sum(nbytes_of[unit] for unit in done))
    units = units_of(plan, share, done) if own is None else units_of_files(plan, own, done)
    moved = 0
    for event in move_units(job, units, sink, journal, journals_all=leader is not None):
        len(layout.segments)  # made while the workers move bytes, not when they have ended
        if isinstance(event, int):
            moved += event
            yield Progress(resumed + moved, total)
        else:
            done[event.unit] = event
    for records in leader.others() if leader is not None else ():
        moved += int(sum(nbytes_of[unit] for unit in records.keys() - done.keys()))
        done |= records
        yield Progress(resumed + moved, total)
    rest = rest_of(plan, layout, done)
    known = frozenset(layout.manifest.files.paths)
    for path, nbytes in segment_files(rest, known=known).items():
        target.create(path, nbytes, is_last=path == layout.commit_path)
    sink.finish(
        rest if own is None else [segment for segment in rest if segment.path in own or segment.path not in known]
    )
    if job.guard is not None:
        job.guard.check()
    taken, proven = None, 0
    if job.digests is not None:
        taken = job.digests.digests([row for record in done.values() for row in record.digests])
        proven = check_recorded(plan, job.store, taken)
    target.commit(layout.commit_path)
    casts = _cast_reports(plan, done)
    shared = 0 if job.clones is None else int(job.clones.shared_nbytes().sum())
    yield RunReport(plan.stats.read_nbytes, moved, resumed, time.perf_counter() - started, casts, taken, shared, proven)


def _begun(job: Job, leader: Leader | RemoteLeader | None) -> tuple[Journal | None, dict[int, UnitRecord]]:
    """Create the files and let others begin; the journal, and the units that an earlier run has finished."""
    plan, layout, target = job.plan, job.layout, job.target
    has_digests = job.digests is not None
    journal = None
    stamp = None if job.guard is None else job.guard.stamp
    if target.journal is not None:
        journal = Journal(
            target.journal, lambda: plan.fingerprint, where=target.url, has_digests=has_digests, stamp=stamp
        )
    done = dict(journal.load()) if journal is not None and target.is_resumed else {}
    if isinstance(target, LocalTarget) and target.is_resumed:
        done |= records_of_processes(target.root, plan.fingerprint, has_digests=has_digests, stamp=stamp)
    elif leader is not None and not isinstance(leader, Leader) and target.is_resumed:
        done |= leader.earlier()
    if journal is not None and target.is_sequential:
        journal.append([])  # parts that are found later are trusted because of it
    for entry in layout.manifest.files:
        target.create(entry.path, entry.nbytes, is_last=entry.path == layout.commit_path)
    if target.is_sequential:
        done = sent_units(plan, done, target)
    if isinstance(leader, Leader):
        journal = leader.open(done)
    elif leader is not None:
        leader.open()
    return journal, done


def _leave_to_share(clones: Clones, plan: Plan, target: Target) -> int:
    """Let files that are mostly shared reserve no room; bytes that need none."""
    if not isinstance(target, LocalTarget):
        return 0
    files, shared = plan.target.files, clones.shared_nbytes()
    target.reserve_nothing_for(files.paths[row] for row in np.flatnonzero(2 * shared > files.nbytes).tolist())
    return int(shared.sum())


def _check_space(plan: Plan, target: Target, shared_nbytes: int) -> None:
    free, needed = target.free_bytes(), plan.stats.target_nbytes - shared_nbytes
    if free is not None and not target.is_resumed and needed > free:
        raise StorageError(
            f"needs {format_bytes(needed)}, {format_bytes(free)} are free ({needed:,} and {counted(free, 'byte')})",
            where=target.url,
        )


def _cast_reports(plan: Plan, done: dict[int, UnitRecord]) -> tuple[CastReport, ...]:
    merged: dict[str, CastEffect] = {}
    for record in done.values():
        for fqn, effect in record.casts:
            merged[fqn] = merged.get(fqn, CastEffect()).merged(effect)
    return tuple(
        CastReport(c.fqn, c.source.name, c.target.name, *astuple(merged.get(c.fqn, CastEffect()))) for c in plan.casts
    )
