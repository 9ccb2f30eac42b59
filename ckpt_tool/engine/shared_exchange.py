"""Ranks of one host share what they read: each byte is read by one of them, and copied by all that need it.

Each rank reads its share, batch by batch, into slots of a segment that the others have mapped (`shared_ring`). So ranks
wait for nothing but data, no message is sent, and all memory is one ring of slots for each rank. Knows no torch.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from queue import SimpleQueue

import numpy as np

from ckpt_tool.engine.landing import Filler, Landing, Places, rank_manifest
from ckpt_tool.engine.own_reads import OwnReads, plan_own_reads, run_own_reads
from ckpt_tool.engine.schedule import make_schedule
from ckpt_tool.engine.shared_memory import Segment
from ckpt_tool.engine.shared_ring import Ring, ring_bytes
from ckpt_tool.errors import StorageError
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.tables import IntArray
from ckpt_tool.plan.build import make_plan
from ckpt_tool.plan.limits import PlanLimits
from ckpt_tool.plan.model import Plan
from ckpt_tool.records import dataclass
from ckpt_tool.storage.store import Store

__all__ = ["LostRank", "SharedReads", "SharedReport", "plan_shared_reads", "run_shared_reads"]

_NEAR = (2, 1 << 20)
"""Slots of a rank, and bytes of one at most, where reads are answered at once: few, so that all stay in the caches."""
_FAR = (4, 2 << 20)
_MIN_SLOT_BYTES = 64 << 10
_LOOK_S = 0.05  # between two looks whether the others are alive


class LostRank(StorageError):
    """Another rank is gone: whoever is left can agree on nothing with it."""


@dataclass(frozen=True, eq=False)
class SharedReads:
    """What one rank of a host does so that all of them have what they need."""

    plan: Plan
    """Its target's files are the ranks of this host, counted from 0."""
    rank: int
    """This one."""
    batches: tuple[tuple[tuple[int, ...], ...], ...]
    """By rank, the tiles that it reads into one slot after the other."""
    wanted: tuple[tuple[int, ...], ...]
    """By rank, those of its batches in which something is for this one."""
    in_slot: tuple[slice, ...]
    """By tile, where in its slot it lies."""
    slot_bytes: int
    n_slots: int
    """Of each rank; all have the same."""
    places: Places
    """Where the pieces for this rank lie."""
    own: OwnReads
    """Tiles that no other rank needs."""

    @property
    def segment_bytes(self) -> int:
        """Size of each rank's segment; all have the same."""
        return ring_bytes(len(self.batches), self.n_slots, self.slot_bytes)


@dataclass(frozen=True, slots=True)
class SharedReport:
    """What was moved on this rank."""

    read_nbytes: int
    copied_nbytes: int
    """Out of the slots of other ranks."""


def plan_shared_reads(
    manifest: Manifest,
    everyone: Sequence[IntArray],
    rank: int,
    landings: Mapping[int, Landing],
    *,
    memory_budget_bytes: int,
    max_read_bytes: int,
    is_far: bool = False,
) -> SharedReads:
    """What rank ``rank`` of a host does.

    Args:
        manifest: the checkpoint, resolved.
        everyone: `landing.box_rows` of each rank of the host; the first ``len(landings)`` of this one are the landings.
        rank: position in ``everyone``.
        landings: this rank's memory, by position in its rows.
        memory_budget_bytes: half of it is for slots.
        max_read_bytes: longest single read.
        is_far: whether storage is worth several reads at once.
    """
    n_slots, max_slot_bytes = _FAR if is_far else _NEAR
    slot_bytes = max(min(memory_budget_bytes // (2 * n_slots), max_slot_bytes), _MIN_SLOT_BYTES)
    joint = rank_manifest(manifest, dict(enumerate(everyone)), len(everyone))
    plan = make_plan(manifest, joint, limits=PlanLimits(slot_bytes, slot_bytes, 1 << 40, one_read_per_tile=True))
    order = make_schedule(plan, len(everyone), round_bytes=slot_bytes, lone_rounds=False)
    is_shared = order.n_users > 1
    nbytes = plan.tiles.nbytes
    largest = int(nbytes[is_shared].max(initial=0))  # elements narrower than a byte are not cut
    slot_bytes = max(slot_bytes, largest) if largest else 0

    shared = order.order[is_shared[order.order]]
    shared = shared[np.lexsort((np.arange(len(shared)), order.round[shared], order.reader[shared]))]
    reader = order.reader[shared]
    is_first = (np.diff(reader, prepend=-1) != 0) | (np.diff(order.round[shared], prepend=-1) != 0)
    starts = np.flatnonzero(is_first)
    before = np.cumsum(nbytes[shared]) - nbytes[shared]
    slot_offset = np.zeros(len(nbytes), dtype=np.int64)
    slot_offset[shared] = before - before[starts][np.cumsum(is_first) - 1]

    mine = plan.writes.file == rank
    is_mine = np.zeros(len(nbytes), dtype=bool)
    is_mine[plan.writes.tile[mine]] = True
    has_mine = np.logical_or.reduceat(is_mine[shared], starts).tolist() if len(shared) else []
    batches: list[list[tuple[int, ...]]] = [[] for _ in everyone]
    wanted: list[list[int]] = [[] for _ in everyone]
    tiles = shared.tolist()
    bounds = pairwise([*starts.tolist(), len(shared)])
    for (low, high), of_rank, is_wanted in zip(bounds, reader[starts].tolist(), has_mine, strict=True):
        if is_wanted:
            wanted[of_rank].append(len(batches[of_rank]))
        batches[of_rank].append(tuple(tiles[low:high]))
    first = sum(len(rows) for rows in everyone[:rank])
    numbered = {first + number: landing for number, landing in landings.items()}
    alone = np.flatnonzero(~is_shared & (order.reader == rank))
    own = plan_own_reads(plan, numbered, alone, max_read_bytes=max_read_bytes)
    places = Places(plan, np.flatnonzero(mine & is_shared[plan.writes.tile]))
    in_slot = tuple(map(slice, slot_offset.tolist(), (slot_offset + nbytes).tolist()))
    return SharedReads(
        plan, rank, tuple(map(tuple, batches)), tuple(map(tuple, wanted)), in_slot, slot_bytes, n_slots, places, own
    )


def run_shared_reads(
    reads: SharedReads,
    store: Store,
    landings: Mapping[int, Landing],
    segments: Sequence[Segment],
    *,
    n_workers: int,
    timeout_s: float,
    ranks: Sequence[int],
    ended: Callable[[], Sequence[int]],
) -> SharedReport | None:
    """Fill the landings; every rank of the host calls this. None when another rank has said that it failed.

    Args:
        reads: this rank's part.
        store: where the checkpoint lies.
        landings: by chunk of the plan's target.
        segments: one per rank of the host, zeros at first.
        n_workers: reads of this rank that are under way at once.
        timeout_s: longest wait without any progress.
        ranks: what the ranks of this host are called in messages.
        ended: of these, those whose process is gone.

    Raises:
        LostRank: another rank is gone, or stands still.
        CkptError: a read failed here; the others are told.
    """
    ring = Ring(segments, reads.rank, reads.n_slots, reads.slot_bytes)
    sharing = _Sharing(reads, store, landings, ring, n_workers)
    try:
        waiting = _Waiting(sharing, timeout_s, ranks, ended)
        while not sharing.is_done:
            if sharing.step():
                waiting.start_again()
            elif not waiting.wait():
                return None
    except BaseException:
        ring.tell_failure()
        raise
    finally:
        sharing.close()
    return SharedReport(sharing.read_nbytes, sharing.copied_nbytes)


class _Sharing:
    """The work of one rank, in small steps that never wait."""

    def __init__(
        self, reads: SharedReads, store: Store, landings: Mapping[int, Landing], ring: Ring, n_workers: int
    ) -> None:
        self._reads, self.ring = reads, ring
        n_readers = min(n_workers, reads.n_slots)
        self._pool = ThreadPoolExecutor(n_readers, "ckpt-shared-read") if n_readers > 1 else None
        self._fillers: SimpleQueue[Filler] = SimpleQueue()
        self._all_fillers = [Filler(reads.plan, store, landings, reads.places) for _ in range(n_readers)]
        for filler in self._all_fillers:
            self._fillers.put(filler)
        self._placer = self._all_fillers[0]
        self._own: Iterator[int] | None = run_own_reads(reads.own, store, landings, n_workers=n_workers)
        self._own_nbytes = 0
        self._next_read = 0
        self._n_published = 0
        self._pending: deque[Future[None]] = deque()
        self._next_wanted = [0] * len(reads.batches)
        for rank in range(len(reads.batches)):
            self._pass_by(rank)
        self.copied_nbytes = 0

    @property
    def is_done(self) -> bool:
        """Whether everything is read and in its place."""
        return (
            self._n_published == len(self._reads.batches[self._reads.rank])
            and self._own is None
            and all(at == len(wanted) for at, wanted in zip(self._next_wanted, self._reads.wanted, strict=True))
        )

    @property
    def read_nbytes(self) -> int:
        """Bytes read so far."""
        return sum(filler.read_nbytes for filler in self._all_fillers) + self._own_nbytes

    def step(self) -> bool:
        """Do what can be done now; False when there is nothing."""
        has_moved = self._read()
        for turn in range(len(self._next_wanted)):  # beginning with oneself: the slot is in the cache still
            has_moved |= self._take((self._reads.rank + turn) % len(self._next_wanted))
        if not has_moved and self._own is not None:
            nbytes = next(self._own, None)
            if nbytes is None:
                self._own = None
            else:
                self._own_nbytes += nbytes
            has_moved = True
        return has_moved

    def awaited(self) -> list[int]:
        """Ranks whose next step this one needs for its own."""
        reads, mine = self._reads, self._reads.rank
        found = [rank for rank, at in enumerate(self._next_wanted) if at < len(reads.wanted[rank]) and rank != mine]
        if self._next_read < len(reads.batches[mine]):
            slowest = min(self.ring.passed(rank) for rank in range(len(reads.batches)))
            found += [rank for rank in range(len(reads.batches)) if self.ring.passed(rank) == slowest]
        return sorted(set(found) - {mine})

    def close(self) -> None:
        """Wait for reads that are under way."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _read(self) -> bool:
        """Begin a read, or note one that has ended."""
        n_batches = len(self._reads.batches[self._reads.rank])
        has_moved = False
        if self._next_read < n_batches and self._next_read < self.ring.n_free():
            if self._pool is None:
                self._fill_slot(self._next_read)
                self._n_published += 1
                self.ring.publish(self._n_published)
            else:
                self._pending.append(self._pool.submit(self._fill_slot, self._next_read))
            self._next_read += 1
            has_moved = True
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()
            self._n_published += 1
            self.ring.publish(self._n_published)
            has_moved = True
        return has_moved

    def _fill_slot(self, batch: int) -> None:
        reads, filler = self._reads, self._fillers.get()
        try:
            slot = self.ring.slot(reads.rank, batch)
            for tile in reads.batches[reads.rank][batch]:
                filler.read(tile, slot[reads.in_slot[tile]])
        finally:
            self._fillers.put(filler)

    def _take(self, rank: int) -> bool:
        """Put what is for this rank of the next batch of a rank in its place."""
        reads, at = self._reads, self._next_wanted[rank]
        if at == len(reads.wanted[rank]) or not self.ring.has(rank, reads.wanted[rank][at]):
            return False
        batch = reads.wanted[rank][at]
        slot = self.ring.slot(rank, batch)
        for tile in reads.batches[rank][batch]:
            if reads.places.of_tile(tile):
                content = slot[reads.in_slot[tile]]
                self._placer.place(tile, content)
                if rank != reads.rank:
                    self.copied_nbytes += content.nbytes
        self._next_wanted[rank] += 1
        self._pass_by(rank)
        return True

    def _pass_by(self, rank: int) -> None:
        wanted, at = self._reads.wanted[rank], self._next_wanted[rank]
        self.ring.pass_by(rank, wanted[at] if at < len(wanted) else len(self._reads.batches[rank]))


class _Waiting:
    """Waits for other ranks: shortly at first, then longer, with a look now and then whether they are alive."""

    def __init__(
        self, sharing: _Sharing, timeout_s: float, ranks: Sequence[int], ended: Callable[[], Sequence[int]]
    ) -> None:
        self._sharing, self._timeout_s, self._ranks, self._ended = sharing, timeout_s, ranks, ended
        self.start_again()

    def start_again(self) -> None:
        """Something has happened."""
        self._n_waits = 0
        self._since = self._looked = time.monotonic()

    def wait(self) -> bool:
        """Wait a little; False when some rank has failed."""
        self._n_waits += 1
        if self._n_waits <= 10:
            os.sched_yield()
            return True
        time.sleep(min(20e-6 * (self._n_waits - 10), 1e-3))
        if self._sharing.ring.has_failure():
            return False
        now = time.monotonic()
        if now - self._looked > _LOOK_S:
            self._looked = now
            gone = list(self._ended())
            if gone:
                raise LostRank(f"rank {gone[0]} has ended")
            if now - self._since > self._timeout_s:
                late = ", ".join(str(self._ranks[rank]) for rank in self._sharing.awaited())
                raise LostRank(f"rank {late} has done nothing for {self._timeout_s:,.0f} s that others wait for")
        return True
