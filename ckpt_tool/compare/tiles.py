"""Comparing is one pass over the tiles that two tensors share: bits first, values only where bits differ.

Tiles are slabs in global coordinates, so that any two layouts meet in them; each byte of either side is read once.
Knows no file and no format: whoever calls hands over something that reads tiles.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ckpt_tool.compare.differences import First, Tally, same_bits, tally
from ckpt_tool.compare.probes import Probe
from ckpt_tool.dtypes import DType
from ckpt_tool.geometry.box import Box
from ckpt_tool.geometry.columns import Int64Array
from ckpt_tool.geometry.join import Boxes
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.tables import pad_shapes
from ckpt_tool.plan.build import has_odd_strides
from ckpt_tool.plan.limits import PlanLimits
from ckpt_tool.plan.model import Tiles
from ckpt_tool.plan.tiles import cut_tiles
from ckpt_tool.records import dataclass, field
from ckpt_tool.storage.fetch import fetch_all

__all__ = ["ComparedPair", "Pair", "PairTiles", "TileSource", "common_box", "compare_tiles", "cut_pairs"]


_SIGNED_TOGETHER = 16


@dataclass(frozen=True, slots=True)
class Pair:
    """One tensor of each side that are held against each other."""

    row_a: int
    """Row of A's tensor table."""
    row_b: int


class TileSource(Protocol):
    """Reads the tiles of one side; for one thread."""

    def ahead(self, tiles: Iterable[int]) -> AbstractContextManager[None]:
        """A block in which these tiles will be read in this order."""
        ...

    def read(self, tile: int) -> npt.NDArray[Any]:
        """The raw elements of a tile, contiguous; valid until the next call."""
        ...


@dataclass(frozen=True, eq=False)
class PairTiles:
    """The same slabs, as tiles of A and as tiles of B."""

    pair: Int64Array  # int64[n_tiles], index into the pairs
    a: Tiles
    b: Tiles

    @property
    def nbytes(self) -> int:
        """Bytes of both sides together."""
        return int(self.a.nbytes.sum() + self.b.nbytes.sum())


@dataclass(slots=True)
class ComparedPair:
    """What a pass found of one pair."""

    shape_a: tuple[int, ...]
    shape_b: tuple[int, ...]
    dtype_a: DType
    dtype_b: DType
    n_tiles: int = 0
    tally: Tally = field(default_factory=Tally)
    first: First | None = None
    """Its position counts in the box that was compared."""
    first_index: tuple[int, ...] | None = None
    """Global."""
    bounds: tuple[tuple[int, int], ...] | None = None
    """Per dimension the first differing index and one past the last."""
    probe: Probe | None = None
    """None where types or shapes differ, and for pairs beyond what may be kept."""
    digests: tuple[bytes, bytes] | None = None

    @property
    def is_same(self) -> bool:
        """Whether type and shape are the same and no bit differs."""
        return self.dtype_a == self.dtype_b and self.shape_a == self.shape_b and self.tally.is_same


def common_box(shape_a: tuple[int, ...], shape_b: tuple[int, ...]) -> Box | None:
    """The box that is compared of tensors of these shapes; None where elements of equal index do not correspond.

    Where one dimension alone differs, as with padded rows, it is the part that both have.

    >>> print(common_box((4, 3), (6, 3)), common_box((4, 3), (3, 4)))
    [0:4, 0:3] None
    """
    if len(shape_a) != len(shape_b) or sum(m != n for m, n in zip(shape_a, shape_b, strict=True)) > 1:
        return None
    return Box.whole(tuple(map(min, shape_a, shape_b)))


def cut_pairs(a: Manifest, b: Manifest, pairs: Sequence[Pair], limits: PlanLimits) -> PairTiles:
    """Tiles of the boxes that pairs share, in the order of A's bytes."""
    boxes = [
        common_box(a.tensors.shape_of(pair.row_a), b.tensors.shape_of(pair.row_b)) if _is_alike(a, b, pair) else None
        for pair in pairs
    ]
    live = [number for number, box in enumerate(boxes) if box is not None and box.volume]
    place = _places(a)
    live.sort(key=lambda number: place[pairs[number].row_a])
    number = np.array(live, dtype=np.int64)
    sizes = [box.sizes for n in live if (box := boxes[n]) is not None]
    width = max((len(each) for each in sizes), default=0)
    rows_a = np.array([pairs[n].row_a for n in live], dtype=np.int64)
    rows_b = np.array([pairs[n].row_b for n in live], dtype=np.int64)
    bits_a, bits_b = a.tensors.bits[rows_a], b.tensors.bits[rows_b]
    bits = np.maximum(bits_a, bits_b)
    regions = Boxes(rows_a, np.zeros((len(live), width), dtype=np.int64), pad_shapes(sizes, width, 1))
    nbytes = np.prod(regions.sizes, axis=1) * bits // 8
    is_odd = has_odd_strides(a)[rows_a] | has_odd_strides(b)[rows_b]
    whole = (bits_a % 8 != 0) | (bits_b % 8 != 0) | (is_odd & (nbytes <= limits.max_odd_tile_bytes))
    cut = cut_tiles(regions, bits=bits, max_tile_bytes=limits.max_tile_bytes, whole=whole.astype(np.int64))
    volume = np.prod(cut.sizes, axis=1, dtype=np.int64)
    bounds = _unit_bounds(volume * (bits_a + bits_b)[cut.key] // 8, limits.unit_bytes)
    sides = [
        Tiles(rows[cut.key], cut.offsets, cut.sizes, (volume * width_bits[cut.key] + 7) // 8, bounds)
        for rows, width_bits in ((rows_a, bits_a), (rows_b, bits_b))
    ]
    return PairTiles(number[cut.key], *sides)


def _is_alike(a: Manifest, b: Manifest, pair: Pair) -> bool:
    """Whether elements can be held against each other: those narrower than a byte only against their own type."""
    kind_a, kind_b = a.tensors.dtypes[pair.row_a], b.tensors.dtypes[pair.row_b]
    if kind_a == kind_b:
        return kind_a.bits % 8 == 0 or a.tensors.shape_of(pair.row_a) == b.tensors.shape_of(pair.row_b)
    return kind_a.bits % 8 == 0 and kind_b.bits % 8 == 0


def _places(manifest: Manifest) -> list[tuple[int, int]]:
    """(file, byte) of the first chunk of each tensor."""
    chunks = manifest.chunks
    order = np.lexsort((chunks.offset, chunks.file))
    tensor, first = np.unique(chunks.tensor[order], return_index=True)
    places = [(0, 0)] * len(manifest.tensors)
    rows = order[first]
    for row, file, offset in zip(
        tensor.tolist(), chunks.file[rows].tolist(), chunks.offset[rows].tolist(), strict=True
    ):
        places[row] = (file, offset)
    return places


def _unit_bounds(nbytes: Int64Array, unit_bytes: int) -> Int64Array:
    """Bounds of runs of tiles of about ``unit_bytes``."""
    unit = np.cumsum(nbytes) // max(unit_bytes, 1)
    inner = np.flatnonzero(np.diff(unit)) + 1
    return np.concatenate([[0], inner, [len(nbytes)]]).astype(np.int64)


def compare_tiles(
    a: Manifest,
    b: Manifest,
    pairs: Sequence[Pair],
    tiles: PairTiles,
    *,
    open_readers: Callable[[], tuple[TileSource, TileSource]],
    probe_budget_bytes: int,
    n_workers: int,
    progress: Callable[[int, int], None] | None,
) -> list[ComparedPair]:
    """What each pair amounts to, in the order of ``pairs``; reads every tile of both sides once.

    Of pairs that differ in places, A's other tiles are read once more, for samples of them.

    Args:
        a: A's manifest.
        b: B's manifest.
        pairs: what is compared.
        tiles: their tiles.
        open_readers: readers of A's and of B's tiles, for one thread.
        probe_budget_bytes: samples kept of pairs that differ take no more than this; 0 for none.
        n_workers: threads.
        progress: gets the bytes read and those to be read, from one thread at a time.
    """
    comparison = _Comparison(a, b, pairs, tiles, probe_budget_bytes)
    local = threading.local()
    lock = threading.Lock()
    done = 0

    def own_readers() -> tuple[TileSource, TileSource]:
        readers: tuple[TileSource, TileSource] | None = getattr(local, "readers", None)
        if readers is None:
            readers = local.readers = open_readers()
        return readers

    def work(unit: int) -> None:
        nonlocal done
        readers = own_readers()
        first, last = tiles.a.unit_bounds[unit : unit + 2].tolist()
        with readers[0].ahead(range(first, last)), readers[1].ahead(range(first, last)):
            for tile in range(first, last):
                comparison.take(tile, readers[0].read(tile), readers[1].read(tile))
                if progress is not None:
                    with lock:
                        done += int(tiles.a.nbytes[tile] + tiles.b.nbytes[tile])
                        progress(done, tiles.nbytes)

    def sign(group: Sequence[int]) -> None:
        reader = own_readers()[0]
        with reader.ahead(group):
            for tile in group:
                comparison.sign(tile, reader.read(tile))

    fetch_all(work, range(tiles.a.n_units), concurrency=n_workers)
    fetch_all(sign, comparison.unsigned(), concurrency=n_workers)
    return comparison.found


class _Comparison:
    """Collects tiles into pairs; safe to use from several threads."""

    def __init__(
        self, a: Manifest, b: Manifest, pairs: Sequence[Pair], tiles: PairTiles, probe_budget_bytes: int
    ) -> None:
        self._tiles = tiles
        self._lock = threading.Lock()
        self._takes_probes = probe_budget_bytes > 0
        self._left_bytes = probe_budget_bytes
        self.found = [
            ComparedPair(
                a.tensors.shape_of(pair.row_a),
                b.tensors.shape_of(pair.row_b),
                a.tensors.dtypes[pair.row_a],
                b.tensors.dtypes[pair.row_b],
            )
            for pair in pairs
        ]
        self._same: list[list[int]] = [[] for _ in pairs]
        """Tiles of each pair that are the same."""
        self._left = np.bincount(tiles.pair, minlength=len(pairs)).tolist()
        for found, n in zip(self.found, self._left, strict=True):
            found.n_tiles = n

    def take(self, tile: int, a: npt.NDArray[Any], b: npt.NDArray[Any]) -> None:
        """Compare one tile."""
        number = int(self._tiles.pair[tile])
        found = self.found[number]
        offsets, sizes = self._slab(tile, len(found.shape_a))
        is_alike = found.dtype_a == found.dtype_b
        is_same = is_alike and same_bits(a, b)
        probe: Probe | None = None
        if self._takes_probes and is_alike and found.shape_a == found.shape_b and found.dtype_a.bits % 8 == 0:
            probe = self._probe(found)
            probe.add(a, b, offsets, sizes, same=is_same)
        if is_same:
            self._same[number].append(tile)
            counts = Tally(n_compared=a.size)
            with self._lock:
                found.tally.add(counts)
        else:
            if probe is not None:
                probe.sign(a, b, offsets, sizes)
            self._differing(found, a, b, offsets, sizes)
        with self._lock:
            self._left[number] -= 1
            if not self._left[number]:
                self._finish(found)

    def unsigned(self) -> list[list[int]]:
        """Tiles whose rows a probe that is kept lacks, in groups of neighbours."""
        kept = [sorted(same) for same, found in zip(self._same, self.found, strict=True) if found.probe is not None]
        return [same[at : at + _SIGNED_TOGETHER] for same in kept for at in range(0, len(same), _SIGNED_TOGETHER)]

    def sign(self, tile: int, same: npt.NDArray[Any]) -> None:
        """Take in a tile that both sides have."""
        found = self.found[int(self._tiles.pair[tile])]
        if found.probe is not None:
            found.probe.sign(same, same, *self._slab(tile, len(found.shape_a)))

    def _slab(self, tile: int, ndim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offsets and sizes of a tile."""
        tiles = self._tiles.a
        return tuple(tiles.offsets[tile, :ndim].tolist()), tuple(tiles.sizes[tile, :ndim].tolist())

    def _probe(self, found: ComparedPair) -> Probe:
        with self._lock:
            if found.probe is None:
                found.probe = Probe(found.shape_a)
            return found.probe

    def _differing(
        self,
        found: ComparedPair,
        a: npt.NDArray[Any],
        b: npt.NDArray[Any],
        offsets: tuple[int, ...],
        sizes: tuple[int, ...],
    ) -> None:
        counts, first, mask = tally(a, b, found.dtype_a, found.dtype_b)
        index: tuple[int, ...] | None = None
        bounds: tuple[tuple[int, int], ...] | None = None
        if first is not None and mask.size == _volume(sizes):
            index = tuple(int(i) + o for i, o in zip(np.unravel_index(first.position, sizes), offsets, strict=True))
            bounds = _bounds(mask.reshape(sizes), offsets)
        with self._lock:
            found.tally.add(counts)
            if first is not None and (found.first is None or (index or ()) < (found.first_index or ())):
                found.first, found.first_index = first, index
            found.bounds = _joined(found.bounds, bounds)

    def _finish(self, found: ComparedPair) -> None:
        """Let go of samples that are not needed, or not affordable."""
        if found.probe is None:
            return
        found.digests = (found.probe.digest(0), found.probe.digest(1))
        if found.is_same or found.probe.nbytes > self._left_bytes:
            found.probe = None
        else:
            self._left_bytes -= found.probe.nbytes


def _volume(sizes: tuple[int, ...]) -> int:
    return Box.whole(sizes).volume


def _bounds(mask: npt.NDArray[np.bool_], offsets: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The smallest box around the elements that are set, in global coordinates, as a range for each dimension."""
    ranges = []
    for dim in range(mask.ndim):
        hit = np.flatnonzero(mask.any(axis=tuple(d for d in range(mask.ndim) if d != dim)))
        ranges.append((offsets[dim] + int(hit[0]), offsets[dim] + int(hit[-1]) + 1))
    return tuple(ranges)


def _joined(
    one: tuple[tuple[int, int], ...] | None, other: tuple[tuple[int, int], ...] | None
) -> tuple[tuple[int, int], ...] | None:
    if one is None or other is None:
        return one or other
    return tuple((min(p[0], q[0]), max(p[1], q[1])) for p, q in zip(one, other, strict=True))
