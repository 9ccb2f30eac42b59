"""Runs a plan on this machine: a few threads take units of tiles, a journal remembers what is done, a commit ends it.

The state of a run: planned -> files created -> units moved (each: moved, flushed, journaled) -> headers written ->
commit file written -> named. A run killed in any state leaves nothing that reads as a checkpoint, and goes on from the
last journaled unit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import astuple

import numpy as np
import numpy.typing as npt

from ckpt_tool.checksum import crc32_combine
from ckpt_tool.engine.base import CastEffect, CastReport, EngineOptions, Progress, RunReport
from ckpt_tool.engine.journal import Journal, UnitRecord
from ckpt_tool.engine.moving import Job, move_units, unit_nbytes
from ckpt_tool.engine.run_share import run_share, units_of
from ckpt_tool.engine.sinks import OrderedSink, RandomSink, Sink
from ckpt_tool.engine.team import Leader, Member, Share, records_of_processes
from ckpt_tool.engine.tile_digests import TileDigests
from ckpt_tool.errors import StorageError, UsageError
from ckpt_tool.formats.base import LayOut, Segment
from ckpt_tool.layout.origins import Origins
from ckpt_tool.plan.model import Plan
from ckpt_tool.sizes import format_bytes
from ckpt_tool.storage.local_target import LocalTarget
from ckpt_tool.storage.store import Store
from ckpt_tool.storage.target import Target

__all__ = ["run_plan"]


def run_plan(
    plan: Plan,
    layout: LayOut,
    store: Store,
    target: Target,
    options: EngineOptions,
    origins: Origins | None = None,
    share: Share | None = None,
) -> Iterator[Progress | RunReport]:
    """Execute ``plan`` and commit the target; yields progress, then one report.

    With digests, ``origins`` says what the plan's tensors were made of, where that is of interest too. With a ``share``
    of several processes, this one executes that, and the first of them commits when all are done.

    Raises:
        StorageError: no space, or the storage failed, or another process did; the unfinished target stays and can be
            resumed.
        UsageError: several processes, and a target that is no local folder; or they do not fit together.
    """
    if share is not None and not isinstance(target, LocalTarget):
        raise UsageError(
            "several processes write into one local or shared folder only",
            where=target.url,
            hint="run one process (--split 0/1), which has as many threads as are asked for with --workers",
        )
    try:
        if share is None or not share.index:
            _check_space(plan, target)
    except StorageError:
        target.abandon(discard=not target.is_resumed)  # nothing was written yet
        raise
    try:
        job = Job(plan, layout, store, target, options, TileDigests(plan, origins) if options.digests else None)
        if share is None or not isinstance(target, LocalTarget):
            yield from _run(job, None)
        elif share.index:
            yield from run_share(job, Member(target.root, share, plan.fingerprint, has_digests=options.digests))
        else:
            with Leader(target.root, share, plan.fingerprint, has_digests=options.digests) as leader:
                yield from _run(job, leader)
    except BaseException:
        target.abandon()
        raise


def _run(job: Job, leader: Leader | None) -> Iterator[Progress | RunReport]:
    started = time.perf_counter()
    plan, layout, target = job.plan, job.layout, job.target
    files = layout.manifest.files
    journal = None
    if target.journal is not None:
        journal = Journal(target.journal, plan.fingerprint, where=target.url, has_digests=job.digests is not None)
    done = dict(journal.load()) if journal is not None and target.is_resumed else {}
    if isinstance(target, LocalTarget) and target.is_resumed:
        done |= records_of_processes(target.root, plan.fingerprint, has_digests=job.digests is not None)
    if journal is not None and target.is_sequential:
        journal.append([])  # parts that are found later are trusted because of it
    for entry in files:
        target.create(entry.path, entry.nbytes, is_last=entry.path == layout.commit_path)
    if target.is_sequential:
        done = _sent(plan, done, target)
    if leader is not None:
        journal = leader.open(done)
    sink: Sink = OrderedSink(target, _early(layout)) if target.is_sequential else RandomSink(target)
    total = plan.stats.written_nbytes
    nbytes_of = unit_nbytes(plan)
    resumed = int(sum(nbytes_of[unit] for unit in done))
    units = units_of(plan, None if leader is None else leader.share, done)
    moved = 0
    for event in move_units(job, units, sink, journal, journals_all=leader is not None):
        if isinstance(event, int):
            moved += event
            yield Progress(resumed + moved, total)
        else:
            done[event.unit] = event
    for records in leader.others() if leader is not None else ():
        done |= records
        moved += int(sum(nbytes_of[unit] for unit in records))
        yield Progress(resumed + moved, total)
    late = list(layout.seal(_chunk_crc32s(plan, done))) if layout.seal is not None else []
    rest = _in_commit_order([*layout.segments, *late], layout.commit_path)
    for path, nbytes in _segment_files(rest, known=frozenset(files.paths)).items():
        target.create(path, nbytes, is_last=path == layout.commit_path)
    sink.finish(rest)
    target.commit(layout.commit_path)
    casts = _cast_reports(plan, done)
    taken = None
    if job.digests is not None:
        taken = job.digests.digests([row for record in done.values() for row in record.digests])
    yield RunReport(plan.stats.read_nbytes, moved, resumed, time.perf_counter() - started, casts, taken)


def _sent(plan: Plan, done: dict[int, UnitRecord], target: Target) -> dict[int, UnitRecord]:
    """The finished units whose bytes have all left the buffers of the run that wrote them."""
    if not done:
        return {}
    starts = np.array([target.start_of(path) for path in plan.target.files.paths], dtype=np.int64)
    is_there = plan.writes.file_offset + plan.writes.length <= starts[plan.writes.file]
    unit = np.searchsorted(plan.tiles.unit_bounds, plan.writes.tile, side="right") - 1
    n_missing = np.bincount(unit[~is_there], minlength=plan.tiles.n_units)
    return {number: record for number, record in done.items() if not n_missing[number]}


def _check_space(plan: Plan, target: Target) -> None:
    free = target.free_bytes()
    if free is not None and not target.is_resumed and plan.stats.target_nbytes > free:
        raise StorageError(
            f"needs {format_bytes(plan.stats.target_nbytes)}, {format_bytes(free)} are free "
            f"({plan.stats.target_nbytes:,} and {free:,} bytes)",
            where=target.url,
        )


def _early(layout: LayOut) -> list[Segment]:
    """Segments of files with payload, which a target without seek needs between the pieces."""
    with_payload = {layout.manifest.files.paths[file] for file in set(layout.manifest.chunks.file.tolist())}
    known = with_payload | (set(layout.manifest.files.paths) - {layout.commit_path})
    return [segment for segment in layout.segments if segment.path in known]


def _in_commit_order(segments: list[Segment], commit_path: str | None) -> list[Segment]:
    """All segments by file and offset, those of the file that makes it a checkpoint last.

    Where two begin at a place, the later one has the checksums that the other lacks; what it leaves of that one stays.
    """
    latest: dict[tuple[str, int], Segment] = {}
    for segment in segments:
        place = (segment.path, segment.offset)
        earlier = latest.get(place)
        if earlier is not None and len(earlier.data) > len(segment.data):
            rest = earlier.data[len(segment.data) :]
            latest[place] = Segment(segment.path, segment.offset, segment.data + rest)
        else:
            latest[place] = segment
    return sorted(latest.values(), key=lambda s: (s.path == commit_path, s.path, s.offset))


def _segment_files(segments: list[Segment], *, known: frozenset[str]) -> dict[str, int]:
    """Sizes of the files that hold no payload, only segments (metadata, indexes)."""
    sizes: dict[str, int] = {}
    for segment in segments:
        if segment.path not in known:
            sizes[segment.path] = max(sizes.get(segment.path, 0), segment.offset + len(segment.data))
    return sizes


def _chunk_crc32s(plan: Plan, done: dict[int, UnitRecord]) -> npt.NDArray[np.uint32]:
    """uint32[n_chunks]: CRC-32 of each target chunk, joined from its pieces; zeros where none were taken."""
    crc32s = np.zeros(len(plan.target.chunks), dtype=np.uint32)
    by_piece = np.zeros(len(plan.writes), dtype=np.int64)
    for record in done.values():
        for row, crc in record.crc32:
            by_piece[row] = crc
    order = np.lexsort((plan.writes.file_offset, plan.writes.chunk))
    joined: dict[int, int] = {}
    for chunk, crc, length in zip(
        plan.writes.chunk[order].tolist(), by_piece[order].tolist(), plan.writes.length[order].tolist(), strict=True
    ):
        joined[chunk] = crc32_combine(joined[chunk], crc, length) if chunk in joined else crc
    if joined:
        crc32s[np.fromiter(joined, dtype=np.int64)] = np.fromiter(joined.values(), dtype=np.uint32)
    return crc32s


def _cast_reports(plan: Plan, done: dict[int, UnitRecord]) -> tuple[CastReport, ...]:
    merged: dict[str, CastEffect] = {}
    for record in done.values():
        for fqn, effect in record.casts:
            merged[fqn] = merged.get(fqn, CastEffect()).merged(effect)
    return tuple(
        CastReport(c.fqn, c.source.name, c.target.name, *astuple(merged.get(c.fqn, CastEffect()))) for c in plan.casts
    )
