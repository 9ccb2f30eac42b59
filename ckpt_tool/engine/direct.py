"""Direct reads take runs of bytes from files straight to their place in live memory, without a buffer between.

Which parts of a plan can be read so is found once, in columns; what is left is copied once (`strided`), or goes through
tiles. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ckpt_tool.engine.landing import Landing
from ckpt_tool.engine.strided import NO_STRIDED, StridedReads, long_runs, loops_of, strided_reads
from ckpt_tool.geometry.columns import BoolArray
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.tables import IntArray
from ckpt_tool.plan.build import plan_reads
from ckpt_tool.plan.model import Pieces, Plan, Tiles
from ckpt_tool.records import dataclass
from ckpt_tool.storage.store import ReadCost, Store

__all__ = ["DirectReads", "batches", "find_direct", "find_direct_boxes", "read_direct"]

_PART_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class DirectReads:
    """Runs of files and where in which landing they go, in file order."""

    path: tuple[str, ...]
    file_offset: tuple[int, ...]
    landing: tuple[int, ...]
    landing_offset: tuple[int, ...]
    """Bytes from the landing's first element."""
    length: tuple[int, ...]

    def __len__(self) -> int:
        """Number of reads."""
        return len(self.length)

    def __add__(self, other: DirectReads) -> DirectReads:
        """Both, one after the other."""
        columns = ("path", "file_offset", "landing", "landing_offset", "length")
        return DirectReads(*(getattr(self, name) + getattr(other, name) for name in columns))

    @property
    def nbytes(self) -> int:
        """Bytes in all."""
        return sum(self.length)


def batches(nbytes: npt.ArrayLike, limit: int) -> list[range]:
    """Consecutive positions of about ``limit`` bytes in all, at least one in each batch.

    >>> batches([3, 3, 3, 9], 6)
    [range(0, 1), range(1, 3), range(3, 4)]
    """
    ends = np.cumsum(np.asarray(nbytes, dtype=np.int64))
    starts = np.flatnonzero(np.diff(ends // limit, prepend=-1)).tolist()
    return [range(low, high) for low, high in pairwise([*starts, len(ends)])]


def find_direct_boxes(
    source: Manifest, boxes: IntArray, landings: Mapping[int, Landing], *, cost: ReadCost, max_span_bytes: int
) -> tuple[DirectReads, StridedReads, BoolArray]:
    """How to read those of ``boxes``, `landing.box_rows` whose first are the landings, that need no tiles; and which.

    Those are boxes whose memory has the element type that is stored, and whose stored parts are of bits that need no
    change and of runs that are long or lie close together. A plan of tiles for them would be most of what planning
    costs, and have their bytes copied once more.

    Args:
        source: the manifest.
        boxes: of one rank.
        landings: its memory.
        cost: of the storage.
        max_span_bytes: what a buffer may hold.

    Raises:
        CoverageError: the source's chunks overlap, or leave a hole in such a box.
        Unsupported: a tensor of elements narrower than a byte is cut.
    """
    width = (boxes.shape[1] - 1) // 2
    nbytes = np.prod(boxes[:, 1 + width :], axis=1) * source.tensors.bits[boxes[:, 0]] // 8
    is_run = _are_plain(source, len(boxes), landings, any_strides=False)
    is_direct = _are_plain(source, len(boxes), landings, any_strides=True) & (nbytes > 0)
    at = np.flatnonzero(is_direct)
    tensor, offsets, sizes = boxes[at, 0], boxes[at, 1 : 1 + width], boxes[at, 1 + width :]
    reads = plan_reads(source, Tiles(tensor, offsets, sizes, nbytes[at], np.array([0, len(at)], dtype=np.int64)))
    box = at[reads.tile]
    is_direct[box[source.chunks.flags[reads.chunk] != 0]] = False
    in_loops = ~(reads.is_contiguous & reads.is_packed_in_tile & is_run[box])
    if cost.read_ahead_bytes:  # of far storage pieces of tiles are fetched ahead, which counts for more than a copy
        is_direct[box[in_loops]] = False
    if not (in_loops & is_direct[box]).any():
        rows = np.flatnonzero(is_direct[box])
        runs = (rows, reads.file_offset[rows], reads.tile_offset[rows], reads.length[rows])
        return _direct_runs(source, reads, box, *runs, cost.max_read_bytes), NO_STRIDED, is_direct
    loops = loops_of(source, reads, box, offsets[reads.tile], sizes[reads.tile], landings)
    is_close = (loops.max_gap >= 0) & (loops.max_gap <= cost.max_gap_bytes) & (loops.run <= max_span_bytes)
    is_direct[box[in_loops & ~loops.are_long & ~is_close]] = False
    is_mine = is_direct[box]
    rows, (long, in_file, in_memory) = (
        np.flatnonzero(is_mine & ~in_loops), long_runs(loops, np.flatnonzero(is_mine & in_loops & loops.are_long))
    )  # fmt: skip
    direct = _direct_runs(
        source, reads, box, np.concatenate([rows, long]),
        np.concatenate([reads.file_offset[rows], reads.file_offset[long] + in_file]),
        np.concatenate([reads.tile_offset[rows], loops.start[long] + in_memory]),
        np.concatenate([reads.length[rows], loops.run[long]]), cost.max_read_bytes,
    )  # fmt: skip
    rows = np.flatnonzero(is_mine & in_loops & ~loops.are_long)
    return direct, strided_reads(source, reads, box, loops, rows, max_span_bytes), is_direct


def _direct_runs(
    source: Manifest, reads: Pieces, box: IntArray, row: IntArray, file_offset: IntArray, at: IntArray,
    length: IntArray, max_read_bytes: int,
) -> DirectReads:  # fmt: skip
    """Runs of the pieces ``row``, in parts as long as tiles would be, for reads that end now and then."""
    parts = -(-length // _PART_BYTES)
    start = (np.arange(int(parts.sum())) - np.repeat(np.cumsum(parts) - parts, parts)) * _PART_BYTES
    row, file_offset, at = np.repeat(row, parts), np.repeat(file_offset, parts) + start, np.repeat(at, parts) + start
    length = np.minimum(np.repeat(length, parts) - start, _PART_BYTES)
    return _in_file_order(source, reads.file[row], file_offset, box[row], at, length, max_read_bytes)


def find_direct(
    plan: Plan, landings: Mapping[int, Landing], candidates: IntArray, *, max_read_bytes: int
) -> tuple[DirectReads, IntArray]:
    """What can be read directly of the tiles ``candidates``, and the candidates of which nothing is.

    A tile is direct when it goes to one landing only, as one run of bytes of memory in row-major order and of the same
    element type, and is stored as runs of its own that need no change. Runs that continue each other on both sides are
    one read, up to ``max_read_bytes``.
    """
    writes, reads, tiles = plan.writes, plan.reads, plan.tiles
    is_plain = _are_plain(plan.source, len(plan.target.chunks), landings, any_strides=False)
    n_writes = np.bincount(writes.tile, minlength=len(tiles))
    is_whole = np.prod(writes.sizes, axis=1) == np.prod(tiles.sizes, axis=1)[writes.tile]
    is_good = (n_writes[writes.tile] == 1) & is_whole & writes.is_contiguous & is_plain[writes.chunk]
    write_of_tile = np.full(len(tiles), -1, dtype=np.int64)
    write_of_tile[writes.tile[is_good]] = np.flatnonzero(is_good)
    write_of_tile[reads.tile[_are_odd(plan.source, reads)]] = -1
    is_direct = np.zeros(len(tiles), dtype=bool)
    is_direct[candidates] = write_of_tile[candidates] >= 0

    rows = np.flatnonzero(is_direct[reads.tile] & (reads.length > 0))
    write = write_of_tile[reads.tile[rows]]
    landing_of_row = writes.chunk[write]
    at = writes.file_offset[write] - plan.target.chunks.offset[landing_of_row] + reads.tile_offset[rows]
    found = _in_file_order(
        plan.source, reads.file[rows], reads.file_offset[rows], landing_of_row, at, reads.length[rows], max_read_bytes
    )
    return found, candidates[~is_direct[candidates]]


def _are_plain(source: Manifest, n: int, landings: Mapping[int, Landing], *, any_strides: bool) -> BoolArray:
    """bool[n]: landings whose memory has numbers of the type that is stored: as one run, or with ``any_strides``."""
    is_plain = np.zeros(n, dtype=bool)
    dtypes = source.tensors.dtypes
    for number, landing in landings.items():
        array, dtype = landing.memory.array, landing.dtype
        is_plain[number] = (
            array is not None
            and dtype == dtypes[landing.tensor]
            and (array.flags.c_contiguous or (any_strides and array.itemsize * 8 == dtype.bits))
        )
    return is_plain


def _are_odd(source: Manifest, reads: Pieces) -> BoolArray:
    """bool[m]: pieces that are no run of their file, or of their tile, or whose bits change on the way."""
    are_odd: BoolArray = source.chunks.flags[reads.chunk] != 0
    are_odd |= ~(reads.is_contiguous & reads.is_packed_in_tile)
    return are_odd


def _in_file_order(
    source: Manifest, file: npt.NDArray[np.int32], offset: IntArray, landing: IntArray, at: IntArray, length: IntArray,
    max_read_bytes: int,
) -> DirectReads:  # fmt: skip
    merged = _merged(file.astype(np.int64), offset, landing, at, length, max_read_bytes)
    paths = source.files.paths
    file_of_read, *others = (column.tolist() for column in merged)
    return DirectReads(tuple([paths[each] for each in file_of_read]), *map(tuple, others))


def _merged(
    file: IntArray, offset: IntArray, landing: IntArray, at: IntArray, length: IntArray, max_read_bytes: int
) -> tuple[IntArray, ...]:
    """The same reads in file order, with those joined that continue each other."""
    order = np.lexsort((offset, file))
    file, offset, landing, at, length = (column[order] for column in (file, offset, landing, at, length))
    if not len(order):
        return file, offset, landing, at, length
    goes_on = np.zeros(len(order), dtype=bool)
    goes_on[1:] = (
        (file[1:] == file[:-1])
        & (landing[1:] == landing[:-1])
        & (offset[1:] == (offset + length)[:-1])
        & (at[1:] == (at + length)[:-1])
    )
    run = np.cumsum(~goes_on) - 1
    run_start = offset[~goes_on][run]
    part = (offset - run_start) // max_read_bytes  # a run is cut where it has grown too long for one request
    first = np.flatnonzero(~goes_on | (part != np.r_[-1, part[:-1]]))
    return file[first], offset[first], landing[first], at[first], np.add.reduceat(length, first)


def read_direct(
    reads: DirectReads, rows: Sequence[int], store: Store, memory: Mapping[int, npt.NDArray[np.uint8]]
) -> None:
    """Do some of the reads; ``memory`` are the bytes of the landings that they go to."""
    for row in rows:
        start = reads.landing_offset[row]
        buffer = memory[reads.landing[row]][start : start + reads.length[row]]
        store.read_into(reads.path[row], reads.file_offset[row], buffer.data)
