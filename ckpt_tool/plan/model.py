"""A plan says which bytes of which source file go to which bytes of which target file, by way of which tiles.

It is a value: it can be printed, saved, compared and executed by any engine. Byte positions are exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ckpt_tool.dtypes import DType
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.tables import IntArray
from ckpt_tool.records import dataclass

__all__ = ["Cast", "Pieces", "Plan", "PlanStats", "Tiles"]


@dataclass(frozen=True, eq=False)
class Tiles:
    """Slabs of source tensors that pass through one buffer each, in the order of work."""

    tensor: IntArray  # int64[n], row of the source's TensorTable
    offsets: IntArray  # int64[n, D], global coordinates
    sizes: IntArray  # int64[n, D]
    nbytes: IntArray  # int64[n], in the source's dtype
    unit_bounds: IntArray  # int64[n_units + 1]: tiles of unit u are bounds[u]:bounds[u + 1]

    def __len__(self) -> int:
        """Number of tiles."""
        return len(self.tensor)

    @property
    def n_units(self) -> int:
        """Number of units: runs of tiles that are executed, journaled and resumed together."""
        return len(self.unit_bounds) - 1

    def of_units(self, units: Iterable[int]) -> Iterator[int]:
        """Tiles of some units, in the order of work."""
        for unit in units:
            yield from range(int(self.unit_bounds[unit]), int(self.unit_bounds[unit + 1]))


@dataclass(frozen=True, eq=False)
class Pieces:
    """Parts of tiles in chunks of one manifest: what to read, or what to write, grouped by tile."""

    tile: IntArray  # int64[m], ascending
    chunk: IntArray  # int64[m], row of the manifest's ChunkTable
    offsets: IntArray  # int64[m, D], global coordinates
    sizes: IntArray  # int64[m, D]
    file: npt.NDArray[np.int32]  # int32[m], row of the manifest's FileTable
    file_offset: IntArray  # int64[m], bytes
    length: IntArray  # int64[m], bytes in the file; the whole span where not contiguous
    is_contiguous: npt.NDArray[np.bool_]  # bool[m], the piece is one run of the file
    tile_offset: IntArray  # int64[m], bytes from the tile's start to the piece's first element
    is_packed_in_tile: npt.NDArray[np.bool_]  # bool[m], the piece is one run of the tile

    def __len__(self) -> int:
        """Number of pieces."""
        return len(self.tile)

    @cached_property
    def starts(self) -> IntArray:
        """int64[n_tiles + 2]: pieces of tile ``t`` are ``starts[t]:starts[t + 1]``."""
        last = int(self.tile[-1]) if len(self.tile) else -1
        starts: IntArray = np.searchsorted(self.tile, np.arange(last + 3))
        return starts


@dataclass(frozen=True, slots=True)
class Cast:
    """A change of element type that the caller asked for."""

    fqn: str
    source: DType
    target: DType


@dataclass(frozen=True, slots=True)
class PlanStats:
    """What executing a plan costs; payload only unless said otherwise."""

    n_tensors: int
    n_tiles: int
    n_units: int
    read_nbytes: int
    needed_nbytes: int
    """Distinct source bytes that the target needs; ``read_nbytes / needed_nbytes`` is the read amplification."""
    n_reads: int
    n_source_files: int
    written_nbytes: int
    n_writes: int
    n_target_files: int
    target_nbytes: int
    """Size of all target files, headers included."""
    max_tile_nbytes: int


@dataclass(frozen=True)
class Plan:
    """The join of two manifests through tiles."""

    source: Manifest
    target: Manifest
    tiles: Tiles
    reads: Pieces
    writes: Pieces
    source_tensor: IntArray  # int64[n_target_tensors], row of the source's TensorTable
    casts: tuple[Cast, ...]
    stats: PlanStats
    notes: tuple[str, ...] = ()

    @cached_property
    def is_cast(self) -> npt.NDArray[np.bool_]:
        """bool[n_target_tensors]: those whose element type changes."""
        is_cast = np.zeros(len(self.target.tensors), dtype=bool)
        is_cast[[self.target.tensors.index[cast.fqn] for cast in self.casts]] = True
        return is_cast

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that change when any byte would go elsewhere or come from elsewhere."""
        import hashlib  # 3 ms of start-up; a run of less than a gigabyte writes no journal

        digest = hashlib.blake2b(digest_size=8)
        for side, pieces in ((self.source, self.reads), (self.target, self.writes)):
            digest.update(repr([(f.path, f.nbytes, f.codec, f.part) for f in side.files]).encode())
            digest.update(repr([(t.fqn, t.dtype.name, t.shape) for t in side.tensors]).encode())
            for column in (pieces.tile, pieces.chunk, pieces.file, pieces.file_offset, pieces.length):
                digest.update(column.astype("<i8").tobytes())
        digest.update(self.tiles.unit_bounds.astype("<i8").tobytes())
        return digest.hexdigest()
