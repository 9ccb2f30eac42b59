"""A digest pass reads tensors tile by tile, each byte once, and sums their content digests.

A tile is a run of its tensor's row-major bytes however the tensor is stored, so that its digest needs no cutting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ckpt_tool.checksum import crc32
from ckpt_tool.engine.tile_reader import TileReader
from ckpt_tool.errors import CkptError, CoverageError, Unsupported
from ckpt_tool.geometry.columns import Int64Array, distinct
from ckpt_tool.geometry.join import Boxes
from ckpt_tool.geometry.runs import contiguous_strides_columns
from ckpt_tool.manifest.digest import ContentDigest, Part, content_digest, linear_forms, wide_sums
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.plan.build import has_odd_strides, plan_reads
from ckpt_tool.plan.limits import PlanLimits
from ckpt_tool.plan.model import Pieces, Tiles
from ckpt_tool.plan.tiles import cut_tiles
from ckpt_tool.records import dataclass, field
from ckpt_tool.storage.mapped import mapped
from ckpt_tool.storage.shares import can_share, share_out
from ckpt_tool.storage.store import Store
from ckpt_tool.storage.summing import SummingStore

__all__ = ["DigestPass", "digest_tensors"]

_AHEAD_BYTES = 64 << 20
"""Fetched before it is needed, by all workers together, where storage is slow to answer."""

_LEAST_MAPPED_BYTES = 256 << 10
"""Less is read: a mapping costs as much as copying so many bytes. Gaps up to here are mapped over."""


@dataclass(frozen=True)
class DigestPass:
    """What a pass found."""

    digests: dict[int, ContentDigest]
    """By row of the tensor table."""
    unread: dict[int, CkptError]
    """Tensors that have no digest, by row, and why."""
    read_nbytes: int


@dataclass(slots=True)
class _Sums:
    """What is known of tiles that were read."""

    rows: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Tensor, first byte in it, bytes, CRC-32."""
    lanes: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Wide sums by tensor."""
    unread: dict[int, CkptError] = field(default_factory=dict)
    nbytes: int = 0
    stretches: list[tuple[str, int, int, int]] = field(default_factory=list)
    """Of files, where another process has read them: as `SummingStore.drained`."""

    def add(self, other: _Sums) -> None:
        """What is known of other tiles."""
        self.rows += other.rows
        for row, lanes in other.lanes.items():
            self.add_lanes(row, lanes)
        self.unread |= other.unread
        self.nbytes += other.nbytes

    def add_lanes(self, row: int, lanes: tuple[int, int]) -> None:
        """Wide sums of some bytes of a tensor."""
        self.lanes[row] = (Part(lanes=self.lanes.get(row, (0, 0))) + Part(lanes=lanes)).lanes


def digest_tensors(
    manifest: Manifest,
    rows: Sequence[int],
    store: Store,
    *,
    limits: PlanLimits,
    wide: bool,
    n_workers: int,
    summing: SummingStore | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> DigestPass:
    """The digests of some tensors; what cannot be read does not stop the others.

    Cost: each byte once, in the order of the files; of boxes that are stored more than once the first copy is read.
    Memory is a tile for each worker, and a line for each tile.

    Args:
        manifest: the chunks of these tensors are resolved.
        rows: of its tensor table.
        store: reads the manifest's files.
        limits: sizes of tiles and units.
        wide: whether the wide sums are taken.
        n_workers: threads, or copies of this process that map files where it can be copied.
        summing: what ``store`` reads through, if sums of files are wanted: it gets to know all that is read.
        progress: gets the bytes read and those to be read, from one thread at a time.
    """
    sums = _Sums()
    total = int(manifest.tensors.nbytes[np.asarray(rows, dtype=np.int64)].sum())

    def take(found: _Sums) -> None:
        sums.add(found)
        for stretch in found.stretches:
            if summing is not None:
                summing.note(*stretch)
        if progress is not None:
            progress(sums.nbytes, total)

    for tiles, reads in _planned(manifest, list(rows), limits, sums):
        work = _Work(manifest, tiles, reads, _starts(manifest, tiles), store, summing, wide, n_workers)
        paths = {manifest.files.paths[file] for file in distinct(reads.file).tolist()}
        in_copies = can_share(store, paths, int(tiles.nbytes.sum()))
        share_out(range(tiles.n_units), partial(_summer, work), take, n_workers=n_workers, in_copies=in_copies)
    return DigestPass(_digests(manifest, rows, sums, wide=wide), sums.unread, sums.nbytes)


def _planned(manifest: Manifest, rows: list[int], limits: PlanLimits, sums: _Sums) -> list[tuple[Tiles, Pieces]]:
    """Plans of all tensors that have one; those in the way of the others are noted."""
    try:
        tiles = _tiles(manifest, rows, limits)
        return [(tiles, plan_reads(manifest, tiles))]
    except (CoverageError, Unsupported) as error:
        if len(rows) == 1:
            sums.unread[rows[0]] = error
            return []
    middle = len(rows) // 2
    return [*_planned(manifest, rows[:middle], limits, sums), *_planned(manifest, rows[middle:], limits, sums)]


def _tiles(manifest: Manifest, rows: Sequence[int], limits: PlanLimits) -> Tiles:
    """Slabs of whole tensors, in the order of the files."""
    tensors = manifest.tensors
    chosen = np.asarray(rows, dtype=np.int64)
    chosen = chosen[tensors.numel[chosen] > 0]
    chosen = chosen[np.argsort(_places(manifest)[chosen], kind="stable")]
    shape, bits = tensors.shape[chosen], tensors.bits[chosen]
    is_odd = has_odd_strides(manifest)[chosen] & (tensors.nbytes[chosen] <= limits.max_odd_tile_bytes)
    whole = (bits % 8 != 0) | is_odd
    regions = Boxes(chosen, np.zeros_like(shape), shape)
    cut = cut_tiles(regions, bits=bits, max_tile_bytes=limits.max_tile_bytes, whole=whole.astype(np.int64))
    nbytes = (np.prod(cut.sizes, axis=1, dtype=np.int64) * bits[cut.key] + 7) // 8
    unit = np.cumsum(nbytes) // max(limits.unit_bytes, 1)
    bounds = np.concatenate([[0], np.flatnonzero(np.diff(unit)) + 1, [len(nbytes)]]).astype(np.int64)
    return Tiles(chosen[cut.key], cut.offsets, cut.sizes, nbytes, distinct(bounds))


def _places(manifest: Manifest) -> Int64Array:
    """int64[n_tensors]: turn of each tensor in the order of the first bytes of its chunks."""
    chunks = manifest.chunks
    tensor, first = np.unique(chunks.tensor[np.lexsort((chunks.offset, chunks.file))], return_index=True)
    places = np.zeros(len(manifest.tensors), dtype=np.int64)
    places[tensor] = first
    return places


def _starts(manifest: Manifest, tiles: Tiles) -> list[int]:
    """First byte of each tile in its tensor."""
    strides = contiguous_strides_columns(manifest.tensors.shape[tiles.tensor])
    starts: list[int] = ((tiles.offsets * strides).sum(axis=1) * manifest.tensors.bits[tiles.tensor] // 8).tolist()
    return starts


@dataclass(frozen=True, eq=False)
class _Work:
    """What there is to be summed."""

    manifest: Manifest
    tiles: Tiles
    reads: Pieces
    starts: list[int]
    store: Store
    summing: SummingStore | None
    wide: bool
    n_workers: int


def _summer(work: _Work, is_copy: bool) -> Callable[[int], _Sums]:  # noqa: FBT001 - as `share_out` asks for it
    return _Summer(work, is_copy=is_copy).unit


class _Summer:
    """Sums units of tiles, one at a time; for one thread.

    In a copy of the process, what lies in a file as in its tensor is mapped.
    """

    def __init__(self, work: _Work, *, is_copy: bool) -> None:
        self._work = work
        self._tiles = work.tiles
        self._starts = work.starts
        self._is_copy = is_copy
        self._reader = TileReader(
            work.manifest, work.tiles, work.reads, work.store,
            ahead_bytes=_AHEAD_BYTES // work.n_workers, n_workers=work.n_workers,
        )  # fmt: skip

    def unit(self, unit: int) -> _Sums:
        """What is known of the tiles of a unit."""
        first, last = self._tiles.unit_bounds[unit : unit + 2].tolist()
        sums = _Sums()
        windows = self._mapped(first, last) if self._is_copy and last > first else {}
        with self._reader.ahead(range(first, last)):
            for tile in range(first, last):
                row = int(self._tiles.tensor[tile])
                sums.nbytes += int(self._tiles.nbytes[tile])
                if row in sums.unread:
                    continue
                try:
                    if not (windows and self._look_at(tile, windows, sums)):
                        self._read(tile, sums)
                except CkptError as error:
                    sums.unread[row] = error
        if self._is_copy and self._work.summing is not None:
            sums.stretches = self._work.summing.drained()
        return sums

    def _mapped(self, first: int, last: int) -> dict[int, npt.NDArray[np.uint8]]:
        """The bytes of the pieces of some tiles, those that can be mapped; neighbours of one file at once.

        What lies between neighbours is summed for the file, since it is there.
        """
        reads, summing = self._work.reads, self._work.summing
        rows = np.arange(reads.starts[first], reads.starts[last])
        if not len(rows):
            return {}
        rows = rows[np.lexsort((reads.file_offset[rows], reads.file[rows]))]
        file, start = reads.file[rows], reads.file_offset[rows]
        stop = start + reads.length[rows]
        is_next = (file[1:] == file[:-1]) & (start[1:] <= stop[:-1] + _LEAST_MAPPED_BYTES)
        bounds = np.concatenate([[0], np.flatnonzero(~is_next) + 1, [len(rows)]])
        found: dict[int, npt.NDArray[np.uint8]] = {}
        for low, high in pairwise(bounds.tolist()):
            begin, end = int(start[low]), int(stop[low:high].max(initial=0))
            path = self._work.manifest.files.paths[file[low]]
            window = mapped(self._work.store, path, begin, end) if end - begin >= _LEAST_MAPPED_BYTES else None
            if window is None:
                continue
            reach = begin
            for row, at, past in zip(*(column[low:high].tolist() for column in (rows, start, stop)), strict=True):
                found[row] = window[at - begin : past - begin]
                if at > reach and summing is not None:
                    summing.note(path, reach, at - reach, crc32(window[reach - begin : at - begin].data))
                reach = max(reach, past)
        return found

    def _look_at(self, tile: int, windows: Mapping[int, npt.NDArray[np.uint8]], sums: _Sums) -> bool:
        """Sum the mapped pieces of a tile; False where one is not mapped, or has to be put into place first."""
        pieces, reads = self._plain_pieces(tile), self._work.reads
        rows = range(int(reads.starts[tile]), int(reads.starts[tile + 1]))
        if pieces is None or any(each not in windows for each in rows):
            return False
        row, start = int(self._tiles.tensor[tile]), self._starts[tile]
        for number, (at, path, offset, length) in zip(rows, pieces, strict=True):
            crc = crc32(windows[number].data)
            sums.rows.append((row, start + at, length, crc))
            if self._work.summing is not None:
                self._work.summing.note(path, offset, length, crc)
            if self._work.wide:
                sums.add_lanes(row, wide_sums(windows[number], start + at))
        return True

    def _read(self, tile: int, sums: _Sums) -> None:
        """Read a tile and sum it, by the sums of its pieces where the store has taken them."""
        row, start = int(self._tiles.tensor[tile]), self._starts[tile]
        data = self._reader.read(tile).reshape(-1).view(np.uint8)
        known = self._known(tile)
        if known is None:
            sums.rows.append((row, start, len(data), crc32(data.data)))
        else:
            sums.rows += [(row, start + at, length, crc) for at, length, crc in known]
        if self._work.wide:
            sums.add_lanes(row, wide_sums(data, start))

    def _known(self, tile: int) -> list[tuple[int, int, int]] | None:
        """(byte of the tile, length, CRC-32) of the runs that a tile was read in, if the store has summed them all."""
        summing = self._work.summing
        pieces = None if summing is None else self._plain_pieces(tile)
        if pieces is None or summing is None:
            return None
        found: list[tuple[int, int, int]] = []
        for at, path, offset, length in pieces:
            crc = summing.recent_crc32(path, offset, length)
            if crc is None:
                return None
            found.append((at, length, crc))
        return found

    def _plain_pieces(self, tile: int) -> list[tuple[int, str, int, int]] | None:
        """(byte of the tile, path, offset, length) of its pieces, None where one is not a run of both, as it is."""
        reads, manifest = self._work.reads, self._work.manifest
        found: list[tuple[int, str, int, int]] = []
        for row in range(int(reads.starts[tile]), int(reads.starts[tile + 1])):
            if (
                not (reads.is_contiguous[row] and reads.is_packed_in_tile[row])
                or manifest.chunks.flags[reads.chunk[row]]
            ):
                return None
            path, length = manifest.files.paths[reads.file[row]], int(reads.length[row])
            found.append((int(reads.tile_offset[row]), path, int(reads.file_offset[row]), length))
        return found


def _digests(manifest: Manifest, rows: Sequence[int], sums: _Sums, *, wide: bool) -> dict[int, ContentDigest]:
    """Sums put together, tensors that lack a tile left out."""
    tensors = manifest.tensors
    table = np.array(sums.rows, dtype=np.int64).reshape(-1, 4)
    tensor, start, nbytes, crc = table.T
    forms = linear_forms(crc.astype(np.uint32), nbytes, tensors.nbytes[tensor] - start - nbytes)
    linear = np.zeros(len(tensors), dtype=np.uint32)
    np.bitwise_xor.at(linear, tensor, forms)
    summed = np.zeros(len(tensors), dtype=np.int64)
    np.add.at(summed, tensor, nbytes)
    found: dict[int, ContentDigest] = {}
    for row in rows:
        if row not in sums.unread:
            part = Part(int(summed[row]), int(linear[row]), sums.lanes.get(row, (0, 0)))
            name, shape = tensors.dtypes[row].name, tensors.shape_of(row)
            found[row] = content_digest(part, name, shape, int(tensors.nbytes[row]), wide=wide)
    return found
