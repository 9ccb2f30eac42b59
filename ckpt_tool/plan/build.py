"""Builds a plan: target boxes to tiles, tiles to source bytes and to target bytes, all in columns."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ckpt_tool.errors import CoverageError, LayoutError, Unsupported
from ckpt_tool.geometry.box import Box, difference
from ckpt_tool.geometry.columns import distinct, kept
from ckpt_tool.geometry.join import Boxes, Pairs, is_packed_in, join_boxes
from ckpt_tool.geometry.overlaps import exact_duplicates, overlapping_pairs
from ckpt_tool.geometry.runs import contiguous_strides_columns
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.tables import ChunkTable, IntArray
from ckpt_tool.plan import sequence
from ckpt_tool.plan.assign import split_evenly
from ckpt_tool.plan.limits import PlanLimits
from ckpt_tool.plan.model import Cast, Pieces, Plan, PlanStats, Tiles
from ckpt_tool.plan.tiles import cut_tiles
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted, shell_word

__all__ = ["has_odd_strides", "make_plan", "plan_reads"]


def make_plan(source: Manifest, target: Manifest, *, limits: PlanLimits, owners: IntArray | None = None) -> Plan:
    """The plan that fills every chunk of ``target`` from the chunks of ``source`` with the same fqn.

    Where the source holds a box more than once, the first copy is read. With ``owners`` (int64[n_target_files], see
    `assign.file_owners`; in file order only) every unit writes files of one owner.

    Raises:
        LayoutError: a target tensor has no source, or another shape than it.
        CoverageError: the source's chunks overlap, or leave a hole where the target needs data.
        Unsupported: a cast between types that have no arithmetic, or a sub-byte tensor cut into pieces.
    """
    source_tensor = _match_tensors(source, target)
    casts = _casts(source, target, source_tensor)
    width = max(source.tensors.shape.shape[1], target.tensors.shape.shape[1])
    available = _distinct_sources(source, source_tensor, width)
    needed_key = source_tensor[target.chunks.tensor]
    needed = Boxes(needed_key, _pad(target.chunks.offsets, width, 0), _pad(target.chunks.sizes, width, 1))
    owner = None if owners is None else owners[target.chunks.file]
    regions, region_of_chunk = _regions(needed, target.chunks, in_file_order=limits.in_file_order, owner=owner)
    region_owner = None
    if owner is not None:
        region_owner = np.zeros(len(regions), dtype=np.int64)
        region_owner[region_of_chunk[region_of_chunk >= 0]] = owner[region_of_chunk >= 0]
    tiles, tile_region = _tiles(source, regions, limits, region_owner)

    reads = join_boxes(available.boxes, Boxes(tiles.tensor, tiles.offsets, tiles.sizes))
    _check_covered(source, available.boxes, reads, tiles)
    if limits.one_read_per_tile:
        tiles, tile_region, reads = _cut_at_chunks(source, tiles, tile_region, reads)
    writes = join_boxes(
        Boxes(region_of_chunk, needed.offsets, needed.sizes), Boxes(tile_region, tiles.offsets, tiles.sizes)
    )
    read_bits = source.tensors.bits[tiles.tensor[reads.right]]
    read_pieces = _pieces(reads, source.chunks, available.rows[reads.left], tiles, read_bits, width)
    write_bits = target.tensors.bits[target.chunks.tensor[writes.left]]
    write_pieces = _pieces(writes, target.chunks, writes.left, tiles, write_bits, width)
    _check_sub_byte(source, tiles, reads, writes)
    stats = PlanStats(
        n_tensors=len(target.tensors),
        n_tiles=len(tiles),
        n_units=tiles.n_units,
        read_nbytes=int(read_pieces.length.sum()),
        needed_nbytes=int((reads.volume * source.tensors.bits[tiles.tensor[reads.right]] // 8).sum()),
        n_reads=len(read_pieces),
        n_source_files=len(distinct(read_pieces.file)),
        written_nbytes=int(write_pieces.length.sum()),
        n_writes=len(write_pieces),
        n_target_files=len(target.files),
        target_nbytes=int(target.files.nbytes.sum()) if len(target.files) else 0,
        max_tile_nbytes=int(tiles.nbytes.max(initial=0)),
    )
    return Plan(source, target, tiles, read_pieces, write_pieces, source_tensor, casts, stats)


def plan_reads(source: Manifest, tiles: Tiles) -> Pieces:
    """What to read for given tiles of a manifest's tensors, however they are stored.

    Of boxes that are stored more than once the first copy is read. Chunks must be resolved.

    Raises:
        CoverageError: the chunks of a tensor overlap, or leave a hole where a tile needs data.
        Unsupported: a tile cuts a tensor of elements narrower than a byte.
    """
    width = tiles.offsets.shape[1]
    available = _distinct_sources(source, tiles.tensor, width)
    pairs = join_boxes(available.boxes, Boxes(tiles.tensor, tiles.offsets, tiles.sizes))
    _check_covered(source, available.boxes, pairs, tiles)
    _check_sub_byte(source, tiles, pairs)
    bits = source.tensors.bits[tiles.tensor[pairs.right]]
    return _pieces(pairs, source.chunks, available.rows[pairs.left], tiles, bits, width)


def has_odd_strides(source: Manifest) -> npt.NDArray[np.bool_]:
    """bool[n_tensors]: some chunk is not stored in row-major order, so that a slab of it is a wide span."""
    is_odd = np.zeros(len(source.tensors), dtype=bool)
    is_odd[source.chunks.tensor[~_is_row_major(source.chunks)]] = True
    return is_odd


def _match_tensors(source: Manifest, target: Manifest) -> IntArray:
    """int64[n_target_tensors]: the source row of each target tensor."""
    rows = np.array([source.tensors.index.get(fqn, -1) for fqn in target.tensors.fqns], dtype=np.int64)
    if len(missing := np.flatnonzero(rows < 0)):
        names = ", ".join(repr(target.tensors.fqns[i]) for i in missing[:3])
        raise LayoutError(f"{counted(len(missing), 'target tensor', 'have')} no source: {names}", where=source.root)
    shapes = source.tensors.shapes
    for fqn, wanted, source_row in zip(target.tensors.fqns, target.tensors.shapes, rows.tolist(), strict=True):
        if wanted != shapes[source_row]:
            raise LayoutError(f"shapes differ, expected {list(wanted)}, got {list(shapes[source_row])}", where=fqn)
    return rows


def _casts(source: Manifest, target: Manifest, source_tensor: IntArray) -> tuple[Cast, ...]:
    casts = []
    for target_row, source_row in enumerate(source_tensor.tolist()):
        before, after = source.tensors.dtypes[source_row], target.tensors.dtypes[target_row]
        if before == after:
            continue
        fqn = target.tensors.fqns[target_row]
        if before.numpy is None or after.numpy is None:
            raise Unsupported(f"no arithmetic cast from {before.name} to {after.name}", where=fqn)
        casts.append(Cast(fqn, before, after))
    return tuple(casts)


@dataclass(frozen=True, eq=False)
class _Available:
    """The source's distinct boxes and the chunk row that each is read from."""

    boxes: Boxes
    rows: IntArray


def _distinct_sources(source: Manifest, wanted: IntArray, width: int) -> _Available:
    """First chunk of each distinct box of the wanted tensors; replicas are left out."""
    is_wanted = np.zeros(len(source.tensors), dtype=bool)
    is_wanted[wanted] = True
    rows = np.flatnonzero(is_wanted[source.chunks.tensor])
    offsets, sizes = (
        _pad(kept(column, rows), width, fill) for column, fill in ((source.chunks.offsets, 0), (source.chunks.sizes, 1))
    )
    key = kept(source.chunks.tensor, rows).astype(np.int64)
    first = np.flatnonzero(exact_duplicates(offsets, sizes, key) == np.arange(len(rows)))
    return _Available(Boxes(kept(key, first), kept(offsets, first), kept(sizes, first)), kept(rows, first))


def _regions(
    needed: Boxes, chunks: ChunkTable, *, in_file_order: bool, owner: IntArray | None
) -> tuple[Boxes, IntArray]:
    """Boxes to be read, keyed by source tensor, in the order in which the target's files want them.

    A tensor whose distinct target boxes fill their bounding box is one region, so that its bytes are read once
    whatever the cut; else every distinct box is a region of its own. No region is of chunks of two owners. Also
    int64[n_chunks]: the region of each chunk, -1 for empty chunks.
    """
    live = np.flatnonzero((needed.sizes > 0).all(axis=1))
    key, offsets, sizes = needed.key[live], needed.offsets[live], needed.sizes[live]
    box = exact_duplicates(offsets, sizes, key)
    first = np.flatnonzero(box == np.arange(len(live)))
    n, tensor_of_chunk = _numbered(key)
    low = np.full((n, offsets.shape[1]), np.iinfo(np.int64).max, dtype=np.int64)
    high = np.zeros_like(low)
    np.minimum.at(low, tensor_of_chunk, offsets)
    np.maximum.at(high, tensor_of_chunk, offsets + sizes)
    distinct_volume = np.bincount(
        tensor_of_chunk[first], weights=np.prod(sizes[first], axis=1).astype(np.float64), minlength=n
    )
    clash = overlapping_pairs(offsets[first], sizes[first], tensor_of_chunk[first])
    has_overlap = np.bincount(tensor_of_chunk[first][clash[:, 0]], minlength=n) > 0
    fills = (distinct_volume == np.prod(high - low, axis=1).astype(np.float64)) & ~has_overlap

    # region label per live chunk: the tensor's own region, or the box's
    label = np.where(fills[tensor_of_chunk], tensor_of_chunk, n + box)
    position = np.lexsort((chunks.offset[live], chunks.file[live]))
    if in_file_order:
        own = None if owner is None else owner[live]
        label, turn = sequence.in_file_order(label, chunks.file[live], chunks.offset[live], own)
        position = np.lexsort((chunks.offset[live], chunks.file[live], turn))
    n_labels, region = _numbered(label)
    first_position = np.full(n_labels, len(live), dtype=np.int64)
    first_position[region[position[::-1]]] = np.arange(len(live))[::-1]  # of equal ones the last assignment stays
    order = np.argsort(first_position, kind="stable")
    new_number = np.empty(n_labels, dtype=np.int64)
    new_number[order] = np.arange(n_labels)
    representative = position[first_position[order]]
    whole = label[representative] < n
    region_low = np.where(whole[:, None], low[tensor_of_chunk[representative]], offsets[representative])
    region_high = np.where(whole[:, None], high[tensor_of_chunk[representative]], (offsets + sizes)[representative])
    region_of_chunk = np.full(len(needed), -1, dtype=np.int64)
    region_of_chunk[live] = new_number[region]
    return Boxes(key[representative], region_low, region_high - region_low), region_of_chunk


def _numbered(labels: IntArray) -> tuple[int, IntArray]:
    """How many different labels (from 0) there are, and each one's place among them in ascending order."""
    used = np.zeros(int(labels.max(initial=-1)) + 1, dtype=bool)
    used[labels] = True
    return int(used.sum()), (np.cumsum(used) - 1)[labels]


def _tiles(
    source: Manifest, regions: Boxes, limits: PlanLimits, region_owner: IntArray | None
) -> tuple[Tiles, IntArray]:
    """Tiles of all regions and the region of each; a unit ends where the owner changes."""
    bits = source.tensors.bits[regions.key] if len(regions) else np.zeros(0, dtype=np.int64)
    region_nbytes = np.prod(regions.sizes, axis=1) * bits // 8
    whole = (bits % 8 != 0) | (has_odd_strides(source)[regions.key] & (region_nbytes <= limits.max_odd_tile_bytes))
    cut = cut_tiles(regions, bits=bits, max_tile_bytes=limits.max_tile_bytes, whole=whole.astype(np.int64))
    nbytes = np.prod(cut.sizes, axis=1) * bits[cut.key] // 8
    n_units = max(1, int(-(-int(nbytes.sum()) // limits.unit_bytes)))
    bounds = distinct(split_evenly(nbytes, n_units))
    if region_owner is not None:
        bounds = distinct(np.concatenate([bounds, np.flatnonzero(np.diff(region_owner[cut.key])) + 1]))
    return Tiles(regions.key[cut.key], cut.offsets, cut.sizes, nbytes, bounds), cut.key


def _cut_at_chunks(
    source: Manifest, tiles: Tiles, tile_region: IntArray, reads: Pairs
) -> tuple[Tiles, IntArray, Pairs]:
    """The overlaps of tiles and chunks as tiles of their own, in one unit, and the join with them."""
    bits = source.tensors.bits[tiles.tensor[reads.right]]
    nbytes = reads.volume * bits // 8
    cut = Tiles(
        tiles.tensor[reads.right], reads.offsets, reads.sizes, nbytes, np.array([0, len(reads)], dtype=np.int64)
    )
    return cut, tile_region[reads.right], Pairs(reads.left, np.arange(len(reads)), reads.offsets, reads.sizes)


def _is_packed(chunks: ChunkTable) -> npt.NDArray[np.bool_]:
    """bool[n]: whether each chunk's bytes are its elements in row-major order without gaps."""
    if chunks.strides is None:
        return np.ones(len(chunks), dtype=bool)
    usual = contiguous_strides_columns(chunks.sizes)
    packed: npt.NDArray[np.bool_] = np.all((chunks.strides == usual) | (chunks.sizes <= 1), axis=1)
    return packed


def _is_row_major(chunks: ChunkTable) -> npt.NDArray[np.bool_]:
    """bool[n]: whether each chunk's elements lie in row-major order, gaps allowed, so that a slab is a narrow span."""
    if chunks.strides is None:
        return np.ones(len(chunks), dtype=bool)
    is_wide = chunks.sizes > 1  # a dimension of size 1 may have any stride
    extent = np.where(is_wide, chunks.strides * chunks.sizes, 0)
    behind = np.maximum.accumulate(extent[:, :0:-1], axis=1)[:, ::-1]
    row_major: npt.NDArray[np.bool_] = np.all(~is_wide[:, :-1] | (chunks.strides[:, :-1] >= behind), axis=1)
    return row_major


def _pieces(pairs: Pairs, chunks: ChunkTable, row: IntArray, tiles: Tiles, bits: IntArray, width: int) -> Pieces:
    """Byte positions of overlaps of chunks, by their ``row``, and tiles, which ``pairs.right`` names."""
    sizes = _pad(chunks.sizes[row], width, 1)
    strides = contiguous_strides_columns(sizes)
    contiguous = is_packed_in(pairs.sizes, sizes)
    if chunks.strides is not None:
        packed = _is_packed(chunks)[row]
        strides = np.where(packed[:, None], strides, _pad(chunks.strides[row], width, 1))
        contiguous &= packed
    del sizes
    span = ((pairs.sizes - 1) * strides).sum(axis=1) + 1
    local = pairs.offsets - _pad(chunks.offsets[row], width, 0)
    local *= strides
    file_offset = chunks.offset[row] + local.sum(axis=1) * bits // 8
    del local, strides
    tile_sizes = tiles.sizes[pairs.right]
    tile_local = pairs.offsets - tiles.offsets[pairs.right]
    tile_local *= contiguous_strides_columns(tile_sizes)
    return Pieces(
        tile=pairs.right,
        chunk=row,
        offsets=pairs.offsets,
        sizes=pairs.sizes,
        file=chunks.file[row],
        file_offset=file_offset,
        length=np.where(contiguous, pairs.volume, span) * bits // 8,
        is_contiguous=contiguous,
        tile_offset=tile_local.sum(axis=1) * bits // 8,
        is_packed_in_tile=is_packed_in(pairs.sizes, tile_sizes),
    )


def _check_covered(source: Manifest, available: Boxes, reads: Pairs, tiles: Tiles) -> None:
    """Raise CoverageError unless every tile is covered exactly once."""
    clash = overlapping_pairs(available.offsets, available.sizes, available.key, limit=1)
    if len(clash):
        tensor = int(available.key[clash[0, 0]])
        one, other = (_box(available.offsets[row], available.sizes[row], source, tensor) for row in clash[0])
        raise CoverageError(
            f"stored boxes {one} and {other} overlap: which of them is right is not recorded",
            where=source.tensors.fqns[tensor],
            hint=f'run "ckpt verify {shell_word(source.where)}" for the full list',
        )
    covered = np.zeros(len(tiles), dtype=np.int64)
    np.add.at(covered, reads.right, reads.volume)
    if len(short := np.flatnonzero(covered != np.prod(tiles.sizes, axis=1))):
        tile = int(short[0])
        tensor = int(tiles.tensor[tile])
        holes = [_box(tiles.offsets[tile], tiles.sizes[tile], source, tensor)]
        for row in np.flatnonzero(reads.right == tile):
            piece = _box(reads.offsets[row], reads.sizes[row], source, tensor)
            holes = [rest for hole in holes for rest in difference(hole, piece)]
        names = {source.tensors.fqns[t] for t in distinct(tiles.tensor[short]).tolist()}
        raise CoverageError(
            f"no stored data for {', '.join(str(h) for h in holes[:3])} ({counted(len(names), 'tensor', 'are')} "
            "incomplete)",
            where=source.tensors.fqns[tensor],
            hint=f'run "ckpt verify {shell_word(source.where)}" to see what is missing',
        )


def _box(offsets: IntArray, sizes: IntArray, source: Manifest, tensor: int) -> Box:
    ndim = int(source.tensors.ndim[tensor])
    return Box(tuple(offsets[:ndim].tolist()), tuple(sizes[:ndim].tolist()))


def _check_sub_byte(source: Manifest, tiles: Tiles, *joins: Pairs) -> None:
    """Raise Unsupported where a tensor of elements narrower than a byte would be cut."""
    odd = source.tensors.bits[tiles.tensor] % 8 != 0
    for pairs in joins:
        cut = odd[pairs.right] & (pairs.volume != np.prod(tiles.sizes, axis=1)[pairs.right])
        if cut.any():
            tensor = int(tiles.tensor[pairs.right[np.argmax(cut)]])
            raise Unsupported(
                f"{source.tensors.dtypes[tensor].name} elements are narrower than a byte, so the tensor cannot be cut",
                where=source.tensors.fqns[tensor],
                hint="give it a rule that replicates it",
            )


def _pad(columns: IntArray, width: int, fill: int) -> IntArray:
    """``columns`` widened behind to ``width``."""
    have = columns.shape[1]
    if have == width:
        return columns
    if have > width:  # only padding is cut off
        return columns[:, :width]
    return np.concatenate([columns, np.full((len(columns), width - have), fill, dtype=np.int64)], axis=1)
