"""The ways in which bytes come from files into live memory, each as a plan that serves again for the same structure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckpt_tool.engine.landing import Landing, rank_manifest
from ckpt_tool.engine.own_reads import OwnReads, plan_own_boxes, run_own_reads
from ckpt_tool.engine.schedule import Schedule, make_schedule
from ckpt_tool.engine.shared_exchange import SharedReads, plan_shared_reads, run_shared_reads
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.tables import IntArray
from ckpt_tool.plan.build import make_plan
from ckpt_tool.plan.limits import PlanLimits
from ckpt_tool.plan.model import Plan
from ckpt_tool.records import dataclass
from ckpt_tool.storage.store import Store

if TYPE_CHECKING:
    from ckpt_tool.engine.distributed_group import Device, Group
    from ckpt_tool.engine.distributed_hosts import Hosts

__all__ = ["Moved", "Moves", "plan_moves", "run_moves"]

_TILE_BYTES = 1 << 20  # with what is copied out of it, it stays in the second-level cache
_UNIT_BYTES = 16 << 20
_FAR_GAP_BYTES = 1 << 18  # storage where longer gaps than this are cheap to read is worth several threads


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes moved on this rank."""

    read: int
    sent: int = 0
    received: int = 0
    buffers: int = 0
    """Shared memory or send and receive buffers of this rank, at most."""


@dataclass(frozen=True, slots=True)
class Moves:
    """What this rank does, without the memory that it does it to."""

    exchange: str
    n_before: int
    """Boxes of other ranks that come before those of this one in the plan."""
    kept: OwnReads | SharedReads | tuple[Plan, Schedule]


def plan_moves(
    exchange: str,
    manifest: Manifest,
    everyone: Sequence[IntArray],
    landings: Mapping[int, Landing],
    store: Store,
    group: Group,
    hosts: Hosts,
    memory_budget_bytes: int,
) -> Moves:
    """How the landings of this rank are to be filled. No collective.

    Args:
        exchange: ``none``, ``shared-memory`` or ``all-to-all``.
        manifest: the checkpoint, resolved.
        everyone: `landing.box_rows` of all ranks; the first ones of this rank are its landings.
        landings: this rank's memory, by position in its rows.
        store: where the checkpoint lies.
        group: the ranks.
        hosts: where they run.
        memory_budget_bytes: bound for all buffers of this rank.
    """
    max_read = store.cost.max_read_bytes
    if exchange == "shared-memory":
        here = [everyone[rank] for rank in hosts.here]
        place = hosts.here.index(group.rank)
        shared = plan_shared_reads(
            manifest, here, place, landings, memory_budget_bytes=memory_budget_bytes, max_read_bytes=max_read,
            is_far=_is_far(store),
        )  # fmt: skip
        return Moves(exchange, sum(len(rows) for rows in here[:place]), shared)
    if exchange == "all-to-all":
        from ckpt_tool.engine.distributed_exchange import exchange_tile_bytes

        tile_bytes = exchange_tile_bytes(memory_budget_bytes, group.size)
        limits = PlanLimits(tile_bytes, tile_bytes, 1 << 40, one_read_per_tile=True)
        joint = rank_manifest(manifest, dict(enumerate(everyone)), group.size)
        plan = make_plan(manifest, joint, limits=limits)
        n_before = sum(len(rows) for rows in everyone[: group.rank])
        return Moves(exchange, n_before, (plan, make_schedule(plan, group.size, round_bytes=tile_bytes)))
    quarter = memory_budget_bytes // 4
    limits = PlanLimits(min(_TILE_BYTES, quarter), quarter, _UNIT_BYTES)
    own = plan_own_boxes(manifest, everyone[group.rank], landings, limits, store.cost)
    return Moves(exchange, 0, own)


def run_moves(
    moves: Moves,
    made: tuple[Mapping[int, Landing], Store],
    failure: BaseException | None,
    group: Group,
    hosts: Hosts,
    carrier: Device,
    n_workers: int | None,
) -> Moved:
    """Fill the landings; every rank calls this.

    Args:
        moves: of `plan_moves`.
        made: this rank's memory, by position in its rows, and where the checkpoint lies.
        failure: why this rank could not make these, and has nothing of them.
        group: the ranks.
        hosts: where they run.
        carrier: where an all-to-all receives.
        n_workers: reads that are under way at once, None for what suits the storage.

    Raises:
        CkptError: some rank came with a failure, or could not read; on every rank.
    """
    kept = moves.kept
    if isinstance(kept, SharedReads):
        return _run_shared(moves, kept, made, failure, group, hosts, n_workers)
    if failure is not None or not isinstance(kept, OwnReads):  # who exchanges nothing agrees only when it has read
        group.agree(failure)
    landings, store = made
    if isinstance(kept, OwnReads):
        n_threads = _n_threads(store, n_workers)
        total, failure = _attempt(lambda: sum(run_own_reads(kept, store, landings, n_workers=n_threads)))
        group.agree(failure)
        return Moved(total)
    from ckpt_tool.engine.distributed_exchange import run_exchange

    moved = run_exchange(*kept, store, _numbered(moves, landings), group, carrier)
    return Moved(moved.read_nbytes, moved.sent_nbytes, moved.received_nbytes, moved.max_buffer_nbytes)


def _n_threads(store: Store, asked: int | None) -> int:
    if asked is not None:
        return asked
    return store.cost.concurrency if _is_far(store) else 1


def _is_far(store: Store) -> bool:
    return store.cost.max_gap_bytes > _FAR_GAP_BYTES


def _numbered(moves: Moves, landings: Mapping[int, Landing]) -> dict[int, Landing]:
    """The landings by their place among those of all ranks of the plan."""
    return {moves.n_before + number: landing for number, landing in landings.items()}


def _run_shared(
    moves: Moves, reads: SharedReads, made: tuple[Mapping[int, Landing], Store], failure: BaseException | None,
    group: Group, hosts: Hosts, n_workers: int | None,
) -> Moved:  # fmt: skip
    from ckpt_tool.engine.distributed_hosts import open_segments
    from ckpt_tool.engine.shared_exchange import LostRank
    from ckpt_tool.engine.shared_ring import give_up

    segments = open_segments(group, hosts, reads.segment_bytes, failure)
    landings, store = made

    def run() -> Any:
        if segments.failure is not None:
            give_up(segments.own)
            raise segments.failure
        return run_shared_reads(
            reads, store, _numbered(moves, landings), segments.all, n_workers=_n_threads(store, n_workers),
            timeout_s=group.timeout_s, ranks=hosts.here, ended=hosts.ended,
        )  # fmt: skip

    try:
        report, failure = _attempt(run)
        if isinstance(failure, LostRank):
            raise group.lost(failure.message) from failure
        group.agree(failure)
    finally:
        segments.own.close()
    return Moved(report.read_nbytes, 0, report.copied_nbytes, reads.segment_bytes)


def _attempt(make: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """``(what make returns, None)``, or ``(None, its failure)``, to be raised on every rank."""
    try:
        return make(), None
    except BaseException as error:  # noqa: BLE001 - raised by Group.agree; the others would wait for who is interrupted
        return None, error
