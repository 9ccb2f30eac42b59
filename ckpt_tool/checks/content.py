"""Content is what can only be known from payload bytes: checksums, values that are no numbers, runs of zeros, repeats.

One pass reads every byte that any of these wants once; memory is one block for each worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ckpt_tool.checks.blocks import cut_blocks, stream_blocks
from ckpt_tool.checks.look import Look, Notes, Place, Scan, Seen, Unread, scans_of
from ckpt_tool.checks.repeats import repeat_findings
from ckpt_tool.checks.zeros import Run, joined_runs
from ckpt_tool.checksum import crc32_combine
from ckpt_tool.formats.base import Checksum
from ckpt_tool.geometry.columns import Int64Array
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import FileRange, Manifest
from ckpt_tool.manifest.tables import SECTIONS
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted
from ckpt_tool.storage.store import Store

__all__ = ["ContentScan", "scan_content"]

_MIN_BLOCK_BYTES = 64 << 10
_BLOCK_BYTES = 1 << 20  # as measured: threads wait for the interpreter at shorter ones, longer ones leave the cache


@dataclass(frozen=True)
class ContentScan:
    """What one pass over the payload found."""

    findings: tuple[Finding, ...]
    zeros: dict[int, tuple[Run, ...]]
    """Zero runs by row of the chunk table, for the tensors that were asked for."""
    checked_nbytes: int
    covered_nbytes: int


def scan_content(
    manifest: Manifest,
    rows: Int64Array,
    checksums: Sequence[Checksum],
    *,
    store: Store,
    wanted_zeros: Int64Array,
    memory_budget_bytes: int,
    n_workers: int,
    progress: Callable[[int, int], None] | None,
) -> ContentScan:
    """Read the payload of chunks, and what checksums are recorded for, once.

    Args:
        manifest: ``rows`` of it are resolved.
        rows: chunks to look at, those whose bytes are there.
        checksums: ranges to compare, those whose bytes are there.
        store: reads the manifest's files, decoded ones included.
        wanted_zeros: int64[n_tensors], see ``scans_of``.
        memory_budget_bytes: bounds the blocks of all workers together.
        n_workers: threads, or copies of this process (see `stream_blocks`).
        progress: gets bytes read and bytes to be read, from one thread at a time.
    """
    chunk_pass = _Pass(manifest, rows, checksums, wanted_zeros)
    n_workers = max(min(n_workers, memory_budget_bytes // _MIN_BLOCK_BYTES), 1)
    likes = max(8 * store.cost.max_gap_bytes, _BLOCK_BYTES)
    block_bytes = max(min(likes, store.cost.max_read_bytes, memory_budget_bytes // n_workers), _MIN_BLOCK_BYTES)
    blocks = cut_blocks(
        chunk_pass.file, chunk_pass.start, chunk_pass.stop,
        block_bytes=block_bytes, max_gap_bytes=min(store.cost.max_gap_bytes, block_bytes // 4),
    )  # fmt: skip
    seen = Seen()
    stream_blocks(
        blocks, chunk_pass.paths, chunk_pass.start, chunk_pass.stop,
        store=store, n_workers=n_workers, visitor=chunk_pass.look, take=seen.add, progress=progress,
    )  # fmt: skip
    found = chunk_pass.finish(seen, int((blocks.stop - blocks.start).sum()))
    repeats = repeat_findings(manifest, seen.samples, chunk_pass.step, store)
    return replace(found, findings=(*found.findings, *repeats))


class _Pass:
    """Spans of one pass, checksums first and then chunks, and what is made of all that was seen of them."""

    def __init__(
        self, manifest: Manifest, rows: Int64Array, checksums: Sequence[Checksum], wanted_zeros: Int64Array
    ) -> None:
        self._manifest = manifest
        self._checksums = checksums
        self._scans = scans_of(manifest, rows, wanted_zeros)
        self.step = max((scan.step for scan in self._scans), default=0)
        index = dict(manifest.files.index)
        for checksum in checksums:
            index.setdefault(checksum.where.path, len(index))
        self.paths = tuple(index)
        chunks = manifest.chunks
        file = [index[c.where.path] for c in checksums]
        start, stop = [c.where.offset for c in checksums], [c.where.end for c in checksums]
        self.file = np.concatenate([np.array(file, dtype=np.int64), chunks.file[rows].astype(np.int64)])
        self.start = np.concatenate([np.array(start, dtype=np.int64), chunks.offset[rows]])
        self.stop = np.concatenate([np.array(stop, dtype=np.int64), (chunks.offset + chunks.length)[rows]])

    def look(self) -> Look:
        """Takes in some of the blocks."""
        return Look(self._manifest, self._scans, n_sums=len(self._checksums))

    def finish(self, seen: Seen, n_read: int) -> ContentScan:
        """Everything put together."""
        findings = [self._unreadable(unread) for unread in seen.unread]
        lost = {span for unread in seen.unread for span in unread.spans}
        parts: list[list[tuple[int, int, int]]] = [[] for _ in self._checksums]
        for span, start, nbytes, crc in seen.sums:
            parts[span].append((start, nbytes, crc))
        covered = 0
        n_uncovered = nbytes_uncovered = 0
        for number, checksum in enumerate(self._checksums):
            if number in lost:
                continue
            got = _combined(parts[number])
            where = checksum.where
            if got == checksum.crc32:
                covered += where.length
            elif checksum.crc32 == 0:  # what writers put that were told to record none
                n_uncovered += 1
                nbytes_uncovered += where.length
            else:
                said = (
                    f"bytes {where.offset:,} to {where.end:,} of {where.path} have CRC-32 {got:08x}, expected the "
                    f"recorded {checksum.crc32:08x}"
                )
                findings.append(Finding("crc-mismatch", Severity.ERROR, said, checksum.fqn, where))
        if n_uncovered:
            said = (
                f"{counted(n_uncovered, 'part')} ({counted(nbytes_uncovered, 'byte')}) were saved without a checksum "
                "(0 is recorded)"
            )
            findings.append(Finding("crc-not-recorded", Severity.INFO, said))
        findings += self._values(seen.notes)
        zeros = {
            self._scans[number].row: tuple(joined_runs(notes.runs))
            for number, notes in seen.notes.items()
            if notes.runs
        }
        return ContentScan(tuple(findings), zeros, n_read, covered)

    def _unreadable(self, unread: Unread) -> Finding:
        where, first = unread.where, len(self._checksums)
        chunk_spans = [span for span in unread.spans if span >= first]
        fqn = (
            self._fqn(self._scans[chunk_spans[0] - first].row) if chunk_spans else self._checksums[unread.spans[0]].fqn
        )
        said = f"bytes {where.offset:,} to {where.end:,} of {where.path} cannot be read: {unread.why}"
        return Finding("unreadable", Severity.ERROR, said, fqn, where)

    def _values(self, notes: Mapping[int, Notes]) -> Iterator[Finding]:
        """One finding for each tensor with NaN, one for each with infinities."""
        by_tensor: dict[int, list[tuple[Scan, Notes]]] = {}
        for number in sorted(notes):
            if notes[number].n_nan or notes[number].n_inf:
                scan = self._scans[number]
                by_tensor.setdefault(int(self._manifest.chunks.tensor[scan.row]), []).append((scan, notes[number]))
        for tensor, found in by_tensor.items():
            is_trained = SECTIONS[self._manifest.tensors.section[tensor]] != "other"
            nans = [(each.first_nan, scan) for scan, each in found if each.first_nan is not None]
            infs = [(each.first_inf, scan) for scan, each in found if each.first_inf is not None]
            if nans:
                severity = Severity.ERROR if is_trained else Severity.WARNING
                yield self._value("nan", "NaN", severity, sum(each.n_nan for _, each in found), nans)
            if infs:
                severity = Severity.WARNING if is_trained else Severity.INFO  # the best score so far starts there
                yield self._value("inf", "infinite", severity, sum(each.n_inf for _, each in found), infs)

    def _value(self, kind: str, word: str, severity: Severity, n: int, firsts: list[tuple[Place, Scan]]) -> Finding:
        (index, position), scan = min(firsts, key=lambda pair: pair[0])
        chunks = self._manifest.chunks
        width = scan.nbytes * scan.components
        path = self._manifest.files.paths[chunks.file[scan.row]]
        where = FileRange(path, int(chunks.offset[scan.row]) + position * width, width)
        numel = int(self._manifest.tensors.numel[chunks.tensor[scan.row]])
        said = (
            f"{n:,} of {counted(numel, 'element')} {'is' if n == 1 else 'are'} {word}, the first at index "
            f"{list(index)}, byte {where.offset:,} of {path}"
        )
        return Finding(kind, severity, said, self._fqn(scan.row), where)

    def _fqn(self, row: int) -> str:
        return self._manifest.tensors.fqns[int(self._manifest.chunks.tensor[row])]


def _combined(parts: list[tuple[int, int, int]]) -> int:
    """CRC of a span from those of its parts, given in any order."""
    value = 0
    for _, length, crc in sorted(parts):
        value = crc32_combine(value, crc, length)
    return value
