"""A digest pass reads tensors tile by tile, each byte once, and sums their content digests.

A tile is a run of its tensor's row-major bytes however the tensor is stored, so that its digest needs no cutting.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from ckpt_tool.checksum import crc32
from ckpt_tool.engine.tile_reader import TileReader
from ckpt_tool.errors import CkptError, CoverageError, Unsupported
from ckpt_tool.geometry.columns import Int64Array, distinct
from ckpt_tool.geometry.join import Boxes
from ckpt_tool.geometry.runs import contiguous_strides_columns
from ckpt_tool.manifest.digest import ContentDigest, Part, content_digest, linear_forms, wide_sums
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.plan.build import PlanLimits, has_odd_strides, plan_reads
from ckpt_tool.plan.model import Pieces, Tiles
from ckpt_tool.plan.tiles import cut_tiles
from ckpt_tool.records import dataclass, field
from ckpt_tool.storage.fetch import fetch_all
from ckpt_tool.storage.store import Store

__all__ = ["DigestPass", "RecentCrc32", "digest_tensors"]

_AHEAD_BYTES = 64 << 20
"""Fetched before it is needed, by all workers together, where storage is slow to answer."""

RecentCrc32 = Callable[[str, int, int], int | None]
"""The CRC-32 of a file's range (path, offset, length), None where it is not known."""


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
    """A line for each tile that was read; lists are appended to by several threads."""

    rows: list[tuple[int, int, int, int]] = field(default_factory=list)
    """Tensor, first byte in it, bytes, CRC-32."""
    lanes: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Wide sums by tensor."""
    unread: dict[int, CkptError] = field(default_factory=dict)


def digest_tensors(
    manifest: Manifest,
    rows: Sequence[int],
    store: Store,
    *,
    limits: PlanLimits,
    wide: bool,
    n_workers: int,
    recent_crc32: RecentCrc32 | None = None,
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
        n_workers: threads.
        recent_crc32: what ``store`` knows of a range (file, offset, length) that this thread read lately, if it does.
        progress: gets the bytes read and those to be read, from one thread at a time.
    """
    sums = _Sums()
    total = int(manifest.tensors.nbytes[np.asarray(rows, dtype=np.int64)].sum())
    done = 0
    lock = threading.Lock()

    def moved(nbytes: int) -> None:
        nonlocal done
        with lock:
            done += nbytes
            if progress is not None:
                progress(done, total)

    for tiles, reads in _planned(manifest, list(rows), limits, sums):
        _run(
            manifest, tiles, reads, store, sums, wide=wide, n_workers=n_workers, recent_crc32=recent_crc32, moved=moved
        )
    return DigestPass(_digests(manifest, rows, sums, wide=wide), sums.unread, done)


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


def _run(  # noqa: PLR0913 - what a thread needs
    manifest: Manifest,
    tiles: Tiles,
    reads: Pieces,
    store: Store,
    sums: _Sums,
    *,
    wide: bool,
    n_workers: int,
    recent_crc32: RecentCrc32 | None,
    moved: Callable[[int], None],
) -> None:
    """Read all tiles."""
    shape = manifest.tensors.shape[tiles.tensor]
    strides = contiguous_strides_columns(shape)
    starts = ((tiles.offsets * strides).sum(axis=1) * manifest.tensors.bits[tiles.tensor] // 8).tolist()
    local = threading.local()
    lock = threading.Lock()

    def work(unit: int) -> None:
        reader: TileReader | None = getattr(local, "reader", None)
        if reader is None:
            reader = local.reader = TileReader(
                manifest, tiles, reads, store, ahead_bytes=_AHEAD_BYTES // n_workers, n_workers=n_workers
            )
        first, last = tiles.unit_bounds[unit : unit + 2].tolist()
        read = 0
        with reader.ahead(range(first, last)):
            for tile in range(first, last):
                row, nbytes = int(tiles.tensor[tile]), int(tiles.nbytes[tile])
                read += nbytes
                if row in sums.unread:
                    continue
                try:
                    data = reader.read(tile).reshape(-1).view(np.uint8)
                except CkptError as error:
                    sums.unread[row] = error
                    continue
                known = _known(manifest, reads, tile, recent_crc32)
                if known is None:
                    sums.rows.append((row, starts[tile], nbytes, crc32(data.data)))
                else:
                    sums.rows += [(row, starts[tile] + at, length, crc) for at, length, crc in known]
                if wide:
                    added = Part(lanes=wide_sums(data, starts[tile]))
                    with lock:
                        sums.lanes[row] = (Part(lanes=sums.lanes.get(row, (0, 0))) + added).lanes
        moved(read)

    fetch_all(work, range(tiles.n_units), concurrency=n_workers)


def _known(
    manifest: Manifest, reads: Pieces, tile: int, recent_crc32: RecentCrc32 | None
) -> list[tuple[int, int, int]] | None:
    """(byte of the tile, length, CRC-32) of the runs that a tile was read in, where the store has taken all of them."""
    if recent_crc32 is None:
        return None
    found: list[tuple[int, int, int]] = []
    for row in range(int(reads.starts[tile]), int(reads.starts[tile + 1])):
        if not (reads.is_contiguous[row] and reads.is_packed_in_tile[row]) or manifest.chunks.flags[reads.chunk[row]]:
            return None
        length = int(reads.length[row])
        crc = recent_crc32(manifest.files.paths[reads.file[row]], int(reads.file_offset[row]), length)
        if crc is None:
            return None
        found.append((int(reads.tile_offset[row]), length, crc))
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
