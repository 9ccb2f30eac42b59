"""Runs of a target that are runs of a source file at the same place within a block: file systems that can share blocks.

What is shared costs no copy and no room until one side is written to. Whole blocks only: the ends of a run are written
as anything else, and so is everything where the file system cannot, which the first attempt shows.
"""

from __future__ import annotations

import threading

import numpy as np

from ckpt_tool.manifest.tables import IntArray
from ckpt_tool.plan.model import Pieces, Plan
from ckpt_tool.records import dataclass
from ckpt_tool.storage.local.store import LocalStore
from ckpt_tool.storage.local.take_over import BLOCK_BYTES
from ckpt_tool.storage.local.target import LocalTarget

__all__ = ["Clones", "Runs", "shared_runs"]

_LEAST_BYTES = 64 << 10
"""Shorter runs are cheaper to write than to share: each makes an extent of its own."""


@dataclass(frozen=True, eq=False)
class Runs:
    """Whole blocks of target pieces that are whole blocks of source files, by piece and place in it."""

    write: IntArray  # int64[n], row of the plan's writes, ascending
    start: IntArray  # int64[n], first byte in the piece
    length: IntArray  # int64[n]
    file: IntArray  # int64[n], row of the source's files
    file_offset: IntArray  # int64[n], first byte there

    @classmethod
    def none(cls) -> Runs:
        """Nothing."""
        return cls(*(np.zeros(0, dtype=np.int64) for _ in range(5)))

    def of(self, write: int) -> range:
        """Rows of one piece."""
        low, high = np.searchsorted(self.write, [write, write + 1]).tolist()
        return range(low, high)


class Clones:
    """Shares what can be shared of a plan's target. Safe to use from several threads."""

    def __init__(self, plan: Plan, store: LocalStore, target: LocalTarget) -> None:
        self._plan = plan
        self._store = store
        self._target = target
        self._lock = threading.Lock()
        self._runs: Runs | None = None

    def shared_nbytes(self) -> IntArray:
        """int64[n_target_files]: bytes of each file that will be shared; zeros where the file system cannot."""
        runs = self._tried()
        nbytes = np.zeros(len(self._plan.target.files), dtype=np.int64)
        np.add.at(nbytes, self._plan.writes.file[runs.write], runs.length)
        return nbytes

    def shares_any(self) -> bool:
        """Whether any piece has something in common with the source."""
        return len(self._tried().write) > 0

    def share(self, write: int) -> list[tuple[int, int]]:
        """Share what a piece has in common with the source; first and last byte of what is left to be written.

        Raises:
            StorageError: the system refused.
        """
        plan, runs = self._plan, self._tried()
        done, left = 0, list[tuple[int, int]]()
        for row in runs.of(write):
            start, length = int(runs.start[row]), int(runs.length[row])
            path = plan.target.files.paths[plan.writes.file[write]]
            offset = int(plan.writes.file_offset[write]) + start
            with self._store.borrow(plan.source.files.paths[runs.file[row]]) as handle:
                is_shared = self._target.share(
                    path, offset, handle.file.fileno(), int(runs.file_offset[row]), length
                )  # fmt: skip
            if is_shared:
                left.append((done, start))
                done = start + length
        return [*left, (done, int(plan.writes.length[write]))]

    def _tried(self) -> Runs:
        """What can be shared, found out when it is first asked for: nothing, where a trial fails."""
        with self._lock:
            if self._runs is None:
                self._runs = shared_runs(self._plan) if self._can_share() else Runs.none()
            return self._runs

    def _can_share(self) -> bool:
        reads, files = self._plan.reads, self._plan.source.files
        largest = int(reads.length.argmax()) if len(reads) else -1
        if largest < 0 or reads.length[largest] < _LEAST_BYTES:
            return False
        entry = files.entries[int(reads.file[largest])]
        if entry.codec is not None or entry.part is not None:
            return False
        with self._store.borrow(entry.path) as handle:
            return self._target.can_share(handle.file.fileno(), 0, BLOCK_BYTES)


def shared_runs(plan: Plan) -> Runs:
    """What of a plan's target is in the source's files byte by byte, in whole blocks of both."""
    reads, writes, tiles = plan.reads, plan.writes, plan.tiles
    is_cast = np.zeros(len(plan.source.tensors), dtype=bool)
    is_cast[plan.source_tensor[plan.is_cast]] = True
    is_plain = np.array([file.codec is None and file.part is None for file in plan.source.files], dtype=bool)
    taken = np.flatnonzero(_is_run(reads) & is_plain[reads.file] & (plan.source.chunks.flags[reads.chunk] == 0))
    given = np.flatnonzero(_is_run(writes) & ~is_cast[tiles.tensor[writes.tile]])
    # Places in all tiles laid end to end, in which the runs read are apart.
    base = np.concatenate([[0], np.cumsum(tiles.nbytes)])
    read_at = base[reads.tile[taken]] + reads.tile_offset[taken]
    taken, read_at = taken[(order := np.argsort(read_at, kind="stable"))], read_at[order]
    write_at = base[writes.tile[given]] + writes.tile_offset[given]
    first = np.searchsorted(read_at + reads.length[taken], write_at, side="right")
    behind = np.searchsorted(read_at, write_at + writes.length[given], side="left")
    n = np.maximum(behind - first, 0)
    pair = np.repeat(np.arange(len(given)), n)
    read = np.repeat(first - (np.cumsum(n) - n), n) + np.arange(len(pair))
    low = np.maximum(write_at[pair], read_at[read])
    high = np.minimum(write_at[pair] + writes.length[given][pair], read_at[read] + reads.length[taken][read])
    to = writes.file_offset[given][pair] - write_at[pair]
    back = reads.file_offset[taken][read] - read_at[read]
    start = -(-(low + to) // BLOCK_BYTES) * BLOCK_BYTES - to
    end = (high + to) // BLOCK_BYTES * BLOCK_BYTES - to
    kept = np.flatnonzero(((to - back) % BLOCK_BYTES == 0) & (end - start >= _LEAST_BYTES))
    return Runs(
        write=given[pair[kept]],
        start=(start - write_at[pair])[kept],
        length=(end - start)[kept],
        file=reads.file[taken][read[kept]].astype(np.int64),
        file_offset=(start + back)[kept],
    )


def _is_run(pieces: Pieces) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    found: np.ndarray[tuple[int], np.dtype[np.bool_]] = (
        pieces.is_contiguous & pieces.is_packed_in_tile & (pieces.length > 0)
    )
    return found
