"""Content is what can only be known from payload bytes: recorded checksums, values that are no numbers, runs of zeros.

One pass reads every byte that any of these wants once; memory is one block for each worker.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ckpt_tool.checks.bits import (
    BitPatterns,
    bit_patterns,
    granules,
    hold_numbers,
    scan_non_finite,
)
from ckpt_tool.checks.blocks import Clip, cut_blocks, stream_blocks
from ckpt_tool.checks.places import global_indices, is_packed
from ckpt_tool.checks.zeros import Run, joined_runs, shortest_run, zero_runs
from ckpt_tool.checksum import crc32, crc32_combine
from ckpt_tool.errors import CkptError
from ckpt_tool.formats.base import Checksum
from ckpt_tool.geometry.columns import BoolArray, Int64Array
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import FileRange, Manifest
from ckpt_tool.manifest.tables import SECTIONS, ChunkFlag
from ckpt_tool.records import dataclass, field
from ckpt_tool.storage.store import Store

__all__ = ["ContentScan", "scan_content"]

_MIN_BLOCK_BYTES = 64 << 10
_BLOCK_BYTES = 3 << 19  # as measured: threads wait for the interpreter at shorter ones, longer ones leave the cache


@dataclass(slots=True)
class _Scan:
    """What is looked for in one chunk, and what was found; one lock guards all of them."""

    row: int
    nbytes: int
    """Bytes of a component."""
    components: int
    """Components of an element: 2 for complex types."""
    is_big_endian: bool
    patterns: BitPatterns | None
    min_run: int | None
    """Shortest run of zeros, None where they are not looked for."""
    n_nan: int = 0
    n_inf: int = 0
    first_nan: tuple[tuple[int, ...], int] | None = None
    """Global index, and position in the chunk."""
    first_inf: tuple[tuple[int, ...], int] | None = None
    runs: list[Run] = field(default_factory=list)


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
    wants_zeros: BoolArray,
    memory_budget_bytes: int,
    n_workers: int,
    progress: Callable[[int, int], None] | None = None,
) -> ContentScan:
    """Read the payload of chunks, and what checksums are recorded for, once.

    Args:
        manifest: ``rows`` of it are resolved.
        rows: chunks to look at, those whose bytes are there.
        checksums: ranges to compare, those whose bytes are there.
        store: reads the manifest's files, decoded ones included.
        wants_zeros: bool[n_tensors], whether runs of zeros are of interest.
        memory_budget_bytes: bounds the blocks of all workers together.
        n_workers: threads.
        progress: gets bytes read and bytes to be read, from one thread at a time.
    """
    chunk_pass = _Pass(manifest, rows, checksums, wants_zeros)
    n_workers = max(min(n_workers, memory_budget_bytes // _MIN_BLOCK_BYTES), 1)
    likes = max(8 * store.cost.max_gap_bytes, _BLOCK_BYTES)
    block_bytes = max(min(likes, store.cost.max_read_bytes, memory_budget_bytes // n_workers), _MIN_BLOCK_BYTES)
    blocks = cut_blocks(
        chunk_pass.file, chunk_pass.start, chunk_pass.stop,
        block_bytes=block_bytes, max_gap_bytes=min(store.cost.max_gap_bytes, block_bytes // 4),
    )  # fmt: skip
    stream_blocks(
        blocks,
        chunk_pass.paths,
        chunk_pass.start,
        chunk_pass.stop,
        store=store,
        n_workers=n_workers,
        visitor=chunk_pass,
        progress=progress,
    )
    return chunk_pass.finish(int((blocks.stop - blocks.start).sum()))


class _Pass:
    """Spans of one pass, checksums first and then chunks, and what has been seen of them."""

    def __init__(
        self, manifest: Manifest, rows: Int64Array, checksums: Sequence[Checksum], wants_zeros: BoolArray
    ) -> None:
        self._manifest = manifest
        self._checksums = checksums
        self._scans = _scans(manifest, rows, wants_zeros)
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
        self._parts: list[list[tuple[int, int, int]]] = [[] for _ in checksums]
        self._unread: set[int] = set()
        self._findings: list[Finding] = []
        self._lock = threading.Lock()

    def visit(self, clips: list[Clip]) -> None:
        """Take in one block; called from several threads."""
        for clip in clips:
            if clip.span < len(self._checksums):
                self._parts[clip.span].append((clip.start, len(clip.data), crc32(clip.data.data)))
            else:
                self._look(self._scans[clip.span - len(self._checksums)], clip)

    def failed(self, where: FileRange, spans: list[int], error: CkptError) -> None:
        """Note a block that could not be read."""
        chunk_spans = [span - len(self._checksums) for span in spans if span >= len(self._checksums)]
        fqn = self._fqn(self._scans[chunk_spans[0]].row) if chunk_spans else self._checksums[spans[0]].fqn
        said = f"bytes {where.offset:,} to {where.end:,} of {where.path} cannot be read: {error}"
        with self._lock:
            self._unread.update(spans)
            self._findings.append(Finding("unreadable", Severity.ERROR, said, fqn, where))

    def _look(self, scan: _Scan, clip: Clip) -> None:
        if scan.patterns is None and scan.min_run is None:
            return
        width = scan.nbytes
        data, first = clip.data, -(-clip.start // width)  # an element that a block cuts belongs to neither
        begin, rest = first * width - clip.start, (clip.start + len(data)) % width
        bits = data[begin : len(data) - rest].view(f"u{width}") if begin or rest else data.view(f"u{width}")
        if not len(bits):
            return
        if scan.is_big_endian and width > 1:
            bits = bits.byteswap()
        reduced = granules(bits, scan.patterns)
        if scan.patterns is not None and not hold_numbers(bits, reduced, scan.patterns):
            found = scan_non_finite(bits, scan.patterns)
            if found is not None:
                self._note(scan, (found.nan + first) // scan.components, is_nan=True)
                self._note(scan, (found.inf + first) // scan.components, is_nan=False)
        if scan.min_run is not None:
            runs = zero_runs(bits, scan.min_run, reduced)
            if runs:
                with self._lock:
                    scan.runs += [(start + first, stop + first) for start, stop in runs]

    def _note(self, scan: _Scan, positions: Int64Array, *, is_nan: bool) -> None:
        positions = np.unique(positions)  # both parts of a complex element are one element
        tensor = int(self._manifest.chunks.tensor[scan.row])
        ndim = int(self._manifest.tensors.ndim[tensor])
        index, is_element = global_indices(self._manifest.chunks, scan.row, ndim, positions)
        index, positions = index[is_element], positions[is_element]
        if not len(index):
            return
        best = int(np.lexsort(index.T[::-1])[0]) if ndim else 0
        first = (tuple(index[best].tolist()), int(positions[best]))
        with self._lock:
            if is_nan:
                scan.n_nan += len(index)
                scan.first_nan = first if scan.first_nan is None else min(scan.first_nan, first)
            else:
                scan.n_inf += len(index)
                scan.first_inf = first if scan.first_inf is None else min(scan.first_inf, first)

    def finish(self, n_read: int) -> ContentScan:
        """Everything put together."""
        findings = list(self._findings)
        covered = 0
        n_uncovered = nbytes_uncovered = 0
        for number, checksum in enumerate(self._checksums):
            if number in self._unread:
                continue
            got = _combined(self._parts[number])
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
            said = f"{n_uncovered:,} parts ({nbytes_uncovered:,} bytes) were saved without a checksum (0 is recorded)"
            findings.append(Finding("crc-not-recorded", Severity.INFO, said))
        findings += self._values()
        zeros = {scan.row: tuple(joined_runs(scan.runs)) for scan in self._scans if scan.runs}
        return ContentScan(tuple(findings), zeros, n_read, covered)

    def _values(self) -> Iterator[Finding]:
        """One finding for each tensor with NaN, one for each with infinities."""
        by_tensor: dict[int, list[_Scan]] = {}
        for scan in self._scans:
            if scan.n_nan or scan.n_inf:
                by_tensor.setdefault(int(self._manifest.chunks.tensor[scan.row]), []).append(scan)
        for tensor, scans in by_tensor.items():
            is_trained = SECTIONS[self._manifest.tensors.section[tensor]] != "other"
            nans = [(scan.first_nan, scan) for scan in scans if scan.first_nan is not None]
            infs = [(scan.first_inf, scan) for scan in scans if scan.first_inf is not None]
            if nans:
                severity = Severity.ERROR if is_trained else Severity.WARNING
                yield self._value("nan", "NaN", severity, sum(s.n_nan for s in scans), nans)
            if infs:
                yield self._value("inf", "infinite", Severity.WARNING, sum(s.n_inf for s in scans), infs)

    def _value(
        self, kind: str, word: str, severity: Severity, n: int, firsts: list[tuple[tuple[tuple[int, ...], int], _Scan]]
    ) -> Finding:
        (index, position), scan = min(firsts, key=lambda pair: pair[0])
        chunks = self._manifest.chunks
        width = scan.nbytes * scan.components
        path = self._manifest.files.paths[chunks.file[scan.row]]
        where = FileRange(path, int(chunks.offset[scan.row]) + position * width, width)
        numel = int(self._manifest.tensors.numel[chunks.tensor[scan.row]])
        said = (
            f"{n:,} of {numel:,} elements {'is' if n == 1 else 'are'} {word}, the first at index {list(index)}, byte "
            f"{where.offset:,} of {path}"
        )
        return Finding(kind, severity, said, self._fqn(scan.row), where)

    def _fqn(self, row: int) -> str:
        return self._manifest.tensors.fqns[int(self._manifest.chunks.tensor[row])]


def _scans(manifest: Manifest, rows: Int64Array, wants_zeros: BoolArray) -> list[_Scan]:
    """What to look for in each chunk of ``rows``."""
    chunks, tensors = manifest.chunks, manifest.tensors
    patterns = [bit_patterns(dtype) for dtype in tensors.dtypes]
    tensor = chunks.tensor[rows]
    volume = chunks.volume[rows]
    looks_for_zeros = wants_zeros[tensor] & is_packed(chunks, rows) & np.isin(tensors.bits[tensor], [8, 16, 32, 64])
    looks_for_zeros &= volume >= shortest_run(0, 0)
    is_big_endian = (chunks.flags[rows] & np.uint8(ChunkFlag.BIG_ENDIAN)) != 0
    columns = (rows, tensor, volume, tensors.numel[tensor], looks_for_zeros, is_big_endian)
    scans = []
    for row, number, n, numel, looks, is_big in zip(*(column.tolist() for column in columns), strict=True):
        found, bits = patterns[number], tensors.dtypes[number].bits
        scans.append(
            _Scan(
                row=row,
                nbytes=found.nbytes if found else bits // 8 if bits in {8, 16, 32, 64} else 1,
                components=bits // 8 // found.nbytes if found else 1,
                is_big_endian=is_big,
                patterns=found,
                min_run=shortest_run(numel, n) if looks else None,
            )
        )
    return scans


def _combined(parts: list[tuple[int, int, int]]) -> int:
    """CRC of a span from those of its parts, given in any order."""
    value = 0
    for _, length, crc in sorted(parts):
        value = crc32_combine(value, crc, length)
    return value
