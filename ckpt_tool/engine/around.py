"""What lies around the payload of a run: who writes which file, segments and seals, and what was sent before."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt

from ckpt_tool.checksum import crc32_combine
from ckpt_tool.engine.journal import UnitRecord
from ckpt_tool.engine.team import Share
from ckpt_tool.formats.base import LayOut, Segment
from ckpt_tool.manifest.tables import IntArray
from ckpt_tool.plan.assign import file_owners
from ckpt_tool.plan.model import Plan
from ckpt_tool.storage.target import Target

__all__ = ["early_segments", "files_of", "owners_of", "rest_of", "segment_files", "sent_units"]


def owners_of(layout: LayOut, count: int) -> IntArray:
    """int64[n_files]: which of ``count`` processes writes each file of a target without seek.

    The first one writes what holds no payload, and the file that makes it a checkpoint.
    """
    files = layout.manifest.files
    holds = np.zeros(len(files), dtype=bool)
    holds[layout.manifest.chunks.file] = True
    if layout.commit_path in files.paths:
        holds[files.paths.index(layout.commit_path)] = False
    return file_owners(files.nbytes, count, first=np.flatnonzero(~holds))


def files_of(layout: LayOut, share: Share | None) -> frozenset[str] | None:
    """Files of a target without seek that a process writes; None where it is the only one."""
    if share is None:
        return None
    owners = owners_of(layout, share.count).tolist()
    return frozenset(path for path, n in zip(layout.manifest.files.paths, owners, strict=True) if n == share.index)


def early_segments(layout: LayOut, own: Collection[str] | None) -> list[Segment]:
    """Segments of files with payload, which a target without seek needs between the pieces; of ``own`` files only."""
    with_payload = {layout.manifest.files.paths[file] for file in set(layout.manifest.chunks.file.tolist())}
    known = with_payload | (set(layout.manifest.files.paths) - {layout.commit_path})
    return [segment for segment in layout.segments if segment.path in known and (own is None or segment.path in own)]


def rest_of(plan: Plan, layout: LayOut, done: Mapping[int, UnitRecord]) -> list[Segment]:
    """All segments by file and offset, seals too; those of the file that makes it a checkpoint last.

    Where two begin at a place, the seal has the checksums that the other lacks; what it leaves of that one stays.
    """
    late = list(layout.seal(_chunk_crc32s(plan, done))) if layout.seal is not None else []
    latest: dict[tuple[str, int], Segment] = {}
    for segment in (*layout.segments, *late):
        place = (segment.path, segment.offset)
        earlier = latest.get(place)
        if earlier is not None and len(earlier.data) > len(segment.data):
            rest = earlier.data[len(segment.data) :]
            latest[place] = Segment(segment.path, segment.offset, segment.data + rest)
        else:
            latest[place] = segment
    return sorted(latest.values(), key=lambda s: (s.path == layout.commit_path, s.path, s.offset))


def segment_files(segments: list[Segment], *, known: frozenset[str]) -> dict[str, int]:
    """Sizes of the files that hold no payload, only segments (metadata, indexes)."""
    sizes: dict[str, int] = {}
    for segment in segments:
        if segment.path not in known:
            sizes[segment.path] = max(sizes.get(segment.path, 0), segment.offset + len(segment.data))
    return sizes


def sent_units(
    plan: Plan, done: Mapping[int, UnitRecord], target: Target, own: Collection[str] | None = None
) -> dict[int, UnitRecord]:
    """The finished units whose bytes have all left the buffers of the run that wrote them.

    Of the files of a target without seek ``own`` are looked at; the others may not be known here.
    """
    if not done:
        return {}
    paths = plan.target.files.paths
    starts = np.array(
        [target.start_of(path) if own is None or path in own else 0 for path in paths], dtype=np.int64
    )  # fmt: skip
    is_there = plan.writes.file_offset + plan.writes.length <= starts[plan.writes.file]
    unit = np.searchsorted(plan.tiles.unit_bounds, plan.writes.tile, side="right") - 1
    n_missing = np.bincount(unit[~is_there], minlength=plan.tiles.n_units)
    return {number: record for number, record in done.items() if not n_missing[number]}


def _chunk_crc32s(plan: Plan, done: Mapping[int, UnitRecord]) -> npt.NDArray[np.uint32]:
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
