"""A look takes in some blocks: CRCs of recorded ranges, what is no number, runs of zeros, samples.

What several looks have seen of one chunk is put together afterwards, so that none waits for another.
"""

from __future__ import annotations

import numpy as np

from ckpt_tool.checks.bits import BitPatterns, bit_patterns, hold_numbers, scan_non_finite
from ckpt_tool.checks.blocks import Clip
from ckpt_tool.checks.places import global_indices, is_packed
from ckpt_tool.checks.repeats import Samples, sample_step, sampled_chunks, take_samples
from ckpt_tool.checks.zeros import Run, shortest_run, zero_runs
from ckpt_tool.checksum import crc32
from ckpt_tool.errors import CkptError
from ckpt_tool.geometry.columns import Int64Array, distinct
from ckpt_tool.manifest.model import FileRange, Manifest
from ckpt_tool.manifest.tables import ChunkFlag
from ckpt_tool.records import dataclass, field

__all__ = ["Look", "Notes", "Place", "Scan", "Seen", "Unread", "scans_of"]

Place = tuple[tuple[int, ...], int]
"""Global index of an element, and its position in the chunk."""


@dataclass(frozen=True, slots=True)
class Scan:
    """What is looked for in one chunk."""

    row: int
    nbytes: int
    """Bytes of a component."""
    components: int
    """Components of an element: 2 for complex types."""
    is_big_endian: bool
    patterns: BitPatterns | None
    min_run: int | None
    """Shortest run of zeros, None where they are not looked for."""
    step: int = 0
    """Bytes from one sample to the next, 0 where none are taken."""


@dataclass(slots=True)
class Notes:
    """What was found in one chunk."""

    n_nan: int = 0
    n_inf: int = 0
    first_nan: Place | None = None
    first_inf: Place | None = None
    runs: list[Run] = field(default_factory=list)

    def add(self, other: Notes) -> None:
        """What was found in other blocks of the chunk."""
        self.n_nan += other.n_nan
        self.n_inf += other.n_inf
        self.first_nan = _first(self.first_nan, other.first_nan)
        self.first_inf = _first(self.first_inf, other.first_inf)
        self.runs += other.runs


@dataclass(frozen=True, slots=True)
class Unread:
    """A block that could not be read."""

    where: FileRange
    spans: list[int]
    why: str


@dataclass(slots=True)
class Seen:
    """What was seen."""

    sums: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Span, first byte in it, bytes, CRC-32 of them."""
    notes: dict[int, Notes] = field(default_factory=dict)
    """By number of the scan; of chunks that something was found in."""
    unread: list[Unread] = field(default_factory=list)
    samples: list[Samples] = field(default_factory=list)

    def add(self, other: Seen) -> None:
        """What was seen in other blocks."""
        self.sums += other.sums
        self.samples += other.samples
        self.unread += other.unread
        for number, notes in other.notes.items():
            self.notes.setdefault(number, Notes()).add(notes)


class Look:
    """Takes in blocks over spans: first those whose CRC is wanted, then one for each scan.

    Args:
        manifest: has the chunks of the scans.
        scans: what to look for.
        n_sums: spans whose CRC is wanted.
    """

    def __init__(self, manifest: Manifest, scans: list[Scan], *, n_sums: int) -> None:
        self._manifest = manifest
        self._scans = scans
        self._n_sums = n_sums
        self._seen = Seen()

    def visit(self, clips: list[Clip]) -> None:
        """Take in one block."""
        for clip in clips:
            if clip.span < self._n_sums:
                self._seen.sums.append((clip.span, clip.start, len(clip.data), crc32(clip.data.data)))
            else:
                self._look(clip.span - self._n_sums, clip)

    def failed(self, where: FileRange, spans: list[int], error: CkptError) -> None:
        """Note a block that could not be read."""
        self._seen.unread.append(Unread(where, spans, str(error)))

    def seen(self) -> Seen:
        """Everything."""
        return self._seen

    def _look(self, number: int, clip: Clip) -> None:
        scan = self._scans[number]
        if scan.step:
            offset = int(self._manifest.chunks.offset[scan.row])
            self._seen.samples += take_samples(scan.row, clip.data, clip.start, offset, scan.step)
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
        if scan.patterns is not None and not hold_numbers(bits, scan.patterns):
            found = scan_non_finite(bits, scan.patterns)
            if found is not None:
                self._note(number, (found.nan + first) // scan.components, is_nan=True)
                self._note(number, (found.inf + first) // scan.components, is_nan=False)
        if scan.min_run is not None:
            runs = zero_runs(bits, scan.min_run)
            if runs:
                self._notes(number).runs += [(start + first, stop + first) for start, stop in runs]

    def _notes(self, number: int) -> Notes:
        return self._seen.notes.setdefault(number, Notes())

    def _note(self, number: int, positions: Int64Array, *, is_nan: bool) -> None:
        positions = distinct(positions)  # both parts of a complex element are one element
        row, chunks = self._scans[number].row, self._manifest.chunks
        ndim = int(self._manifest.tensors.ndim[chunks.tensor[row]])
        index, is_element = global_indices(chunks, row, ndim, positions)
        index, positions = index[is_element], positions[is_element]
        if not len(index):
            return
        best = int(np.lexsort(index.T[::-1])[0]) if ndim else 0
        first = (tuple(index[best].tolist()), int(positions[best]))
        self._notes(number).add(
            Notes(n_nan=len(index), first_nan=first) if is_nan else Notes(n_inf=len(index), first_inf=first)
        )


def scans_of(manifest: Manifest, rows: Int64Array, wanted_zeros: Int64Array) -> list[Scan]:
    """What to look for in each chunk of ``rows``.

    ``wanted_zeros``, int64[n_tensors]: the shortest run of zeros that is looked for in a tensor, in elements; 0 for
    none, -1 for a share of the tensor.
    """
    chunks, tensors = manifest.chunks, manifest.tensors
    dtypes, of_tensor = tensors.kinds
    patterns = [bit_patterns(dtype) for dtype in dtypes]
    tensor = chunks.tensor[rows]
    volume = chunks.volume[rows]
    packed = is_packed(chunks, rows)
    is_sampled = sampled_chunks(manifest, rows, packed)
    step = sample_step(int(chunks.length[rows][is_sampled].sum()))
    looks_for_zeros = (wanted_zeros[tensor] != 0) & packed & np.isin(tensors.bits[tensor], [8, 16, 32, 64])
    looks_for_zeros &= volume >= shortest_run(0, 0)
    is_big_endian = (chunks.flags[rows] & np.uint8(ChunkFlag.BIG_ENDIAN)) != 0
    wanted = np.where(looks_for_zeros, wanted_zeros[tensor], 0)
    columns = (rows, of_tensor[tensor], volume, tensors.numel[tensor], wanted, is_big_endian, is_sampled)
    scans = []
    for row, kind, n, numel, run, is_big, samples in zip(*(column.tolist() for column in columns), strict=True):
        found, bits = patterns[kind], dtypes[kind].bits
        scans.append(
            Scan(
                row=row,
                nbytes=found.nbytes if found else bits // 8 if bits in {8, 16, 32, 64} else 1,
                components=bits // 8 // found.nbytes if found else 1,
                is_big_endian=is_big,
                patterns=found,
                min_run=shortest_run(numel, n) if run < 0 else run or None,
                step=step if samples else 0,
            )
        )
    return scans


def _first(one: Place | None, other: Place | None) -> Place | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)
