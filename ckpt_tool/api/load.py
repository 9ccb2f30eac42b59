"""Loading fills the live tensors of a training job from a checkpoint of any format and any layout, in place.

Each rank reads the bytes that its own boxes need, or each byte is read once and carried to the ranks that need it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.load_exchange import Exchange, choose_exchange
from ckpt_tool.api.load_match import (
    Expected,
    Match,
    NameMap,
    Problem,
    SavedValues,
    match_tensors,
    misfit,
    unexpected_tensors,
)
from ckpt_tool.engine.landing import Filler, Landing, box_rows, rank_manifest
from ckpt_tool.engine.pool import run_units
from ckpt_tool.errors import UsageError
from ckpt_tool.manifest.arrow import from_ipc, to_ipc
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.tables import ChunkFlag, IntArray
from ckpt_tool.plan.build import PlanLimits, make_plan
from ckpt_tool.plan.model import Plan
from ckpt_tool.storage.decode import open_files
from ckpt_tool.storage.open import open_store
from ckpt_tool.storage.store import Store

if TYPE_CHECKING:
    from ckpt_tool.api.checkpoint import Checkpoint
    from ckpt_tool.engine.distributed_group import Group
    from ckpt_tool.frameworks.state import LiveState

__all__ = ["DEFAULT_LOAD_MEMORY_BYTES", "LoadReport", "load"]

DEFAULT_LOAD_MEMORY_BYTES = 64 << 20

_TILE_BYTES = 4 << 20
_UNIT_BYTES = 16 << 20
_FAR_GAP_BYTES = 1 << 18  # storage where longer gaps than this are cheap to read is worth several threads
_GATHERED = 1_000  # problems of one rank that the others hear of


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What one rank's load did."""

    exchange: str
    """``none`` or ``all-to-all``."""
    why: str
    """What decided that."""
    n_tensors: int
    n_values: int
    """Values that are no tensors, set from the checkpoint."""
    filled_nbytes: int
    """Bytes of tensors filled on this rank."""
    read_nbytes: int
    """Payload that this rank read."""
    probe_nbytes: int
    """Read besides, to measure the storage."""
    sent_nbytes: int
    received_nbytes: int
    max_buffer_nbytes: int
    """Largest sum of exchange buffers."""
    missing: tuple[str, ...]
    """Tensors and values of the state that the checkpoint does not have; they kept their values."""
    unexpected: tuple[str, ...]
    """Tensors of the checkpoint that no rank's state has."""
    renamed: tuple[tuple[str, str], ...]
    """(name in the state, name in the checkpoint) where outer keys or wrappers' prefixes differ."""
    seconds: float
    plan_seconds: float
    """Of these, until the first byte of payload was read."""


def load(  # noqa: PLR0913 - the options of a command
    state: Any,
    url: str | os.PathLike[str],
    *,
    process_group: Any = None,
    strict: bool = True,
    cast: bool = False,
    exchange: Exchange = "auto",
    memory_budget_bytes: int = DEFAULT_LOAD_MEMORY_BYTES,
    names: NameMap | None = None,
    n_workers: int | None = None,
    timeout_s: float = 600.0,
) -> LoadReport:
    """Fill ``state`` in place; every rank of the process group calls this with its own state.

    Tensors may be plain (every rank needs them whole), DTensors of any placements, ShardedTensors, or parameters made
    of these, in memory of any strides; none is replaced, and no full tensor is made. Other values are replaced by those
    of the same name. Modules stand for their state dicts, other stateful objects get back what they handed out.

    The first rank reads the metadata and shares it. Without torch.distributed, or with one rank, nothing is exchanged.

    Args:
        state: nested dicts and lists, as ``{"model": model.state_dict(), "optim": ...}``.
        url: checkpoint of any readable format.
        process_group: the ranks that take part, None for all.
        strict: tensors that only one side has are an error. On the checkpoint's side only those parts of it count (its
            model, its optimizer, what lies below one outermost key) of which the state has some tensor, so that a model
            loads alone. With ``strict=False`` what is missing keeps its value and what is unexpected is left; the
            report lists both. Values that are no tensors are never an error.
        cast: convert element types where they differ, instead of stopping.
        exchange: ``none``: each rank reads what it needs; ``all-to-all``: each byte is read by one rank and sent to the
            others that need it; ``auto`` decides by how much is shared and how fast storage and exchange are measured
            to be.
        memory_budget_bytes: bound for all buffers of this rank, exchange included.
        names: what a tensor of the state is called in the checkpoint, where that is another name.
        n_workers: reading threads of each rank, None for a number that suits the storage.
        timeout_s: longest wait for the other ranks, at each step.

    Raises:
        LayoutError: tensors that do not fit, listed once, on every rank.
        CkptError: any other failure of any rank, on every rank. Tensors are then partly filled.
    """
    if exchange not in {"auto", "none", "all-to-all"}:
        raise UsageError(f"exchange must be auto, none or all-to-all, got {exchange!r}")
    from ckpt_tool.engine.distributed_group import Group

    loading = _Loading(
        Group(process_group, timeout_s=timeout_s), os.fspath(url), names, cast=cast,
        memory_budget_bytes=memory_budget_bytes, n_workers=n_workers,
    )  # fmt: skip
    return loading.run(state, strict=strict, exchange=exchange)


@dataclass(slots=True)
class _Target:
    """This rank's side of the join."""

    live: LiveState
    match: Match
    landings: list[Landing]
    rows: IntArray
    """`box_rows` of the landings."""
    filled_nbytes: int

    def problems(self, *, strict: bool) -> list[Problem]:
        """What does not fit on this rank."""
        return [problem for problem in self.match.problems if strict or problem.kind != "missing"]


class _Loading:
    """One call of ``load`` on one rank."""

    def __init__(
        self, group: Group, url: str, names: NameMap | None, *, cast: bool, memory_budget_bytes: int,
        n_workers: int | None,
    ) -> None:  # fmt: skip
        self._group = group
        self._url = url
        self._names = names
        self._cast = cast
        self._memory_budget_bytes = memory_budget_bytes
        self._n_workers = n_workers
        self._checkpoint: Checkpoint | None = None
        self._store: Store | None = None

    def run(self, state: Any, *, strict: bool, exchange: Exchange) -> LoadReport:
        started = time.perf_counter()
        from ckpt_tool.frameworks.state import walk_state

        live, failure = _attempt(lambda: walk_state(state))
        has_values = live is not None and bool(live.slots or live.finish)
        (any_values,) = self._group.agree(failure, [float(has_values)])
        try:
            manifest = self._manifest(live, with_values=bool(any_values))
            target, failure = _attempt(lambda: self._target(live, manifest))
            own = target.problems(strict=strict) if target else []
            rows = target.rows if target else np.zeros((0, 1), dtype=np.int64)
            everyone, n_problems = self._group.gather_noting(rows, len(own), failure)
            unexpected = self._check(manifest, everyone, own if any(n_problems) else None, strict=strict)
            manifest = self._resolved(manifest, everyone)
            choice = choose_exchange(exchange, manifest, everyone, self._payload(manifest), self._group)
            if choice.exchange == "all-to-all":
                moved = self._exchange(manifest, target, everyone)
            else:
                moved = self._read_own(manifest, target)
        finally:
            for opened in (self._checkpoint, self._store):
                if opened is not None:
                    opened.close()
        n_values, missing = self._set_values(manifest, live) if any_values else (0, [])
        missing += [problem.fqn for problem in target.match.problems if problem.kind == "missing"]
        return LoadReport(
            exchange=choice.exchange, why=choice.why, n_tensors=sum(row >= 0 for row in target.match.rows),
            n_values=n_values, filled_nbytes=target.filled_nbytes, read_nbytes=moved.read,
            probe_nbytes=choice.probe_nbytes, sent_nbytes=moved.sent, received_nbytes=moved.received,
            max_buffer_nbytes=moved.buffers, missing=tuple(missing), unexpected=unexpected,
            renamed=target.match.renamed, seconds=time.perf_counter() - started, plan_seconds=moved.begun - started,
        )  # fmt: skip

    def _manifest(self, live: LiveState, *, with_values: bool) -> Manifest:
        """The checkpoint's manifest, read by the first rank, with exact places of what that rank's state has."""

        def read() -> bytes:
            self._checkpoint = checkpoint = open_checkpoint(self._url)
            if with_values:
                checkpoint.load_blobs()
            found = self._match(live, checkpoint.manifest).rows
            manifest = checkpoint.resolve([checkpoint.manifest.tensors.fqns[row] for row in found if row >= 0])
            return b"" if self._group.size == 1 else to_ipc(manifest if with_values else manifest.replace(blobs=()))

        data = self._group.share(read)
        return from_ipc(data) if self._checkpoint is None else self._checkpoint.manifest

    def _resolved(self, manifest: Manifest, everyone: Sequence[IntArray]) -> Manifest:
        """The manifest with exact places of all tensors that some rank wants, where the first one lacks some."""
        wanted = np.zeros(len(manifest.tensors), dtype=bool)
        for rows in everyone:
            wanted[rows[:, 0]] = True
        is_open = (manifest.chunks.flags & ChunkFlag.UNRESOLVED) != 0
        if not (is_open & wanted[manifest.chunks.tensor]).any():
            return manifest
        checkpoint = self._checkpoint

        def resolve() -> bytes:
            if checkpoint is None:
                return b""
            found = checkpoint.resolve([manifest.tensors.fqns[row] for row in np.flatnonzero(wanted).tolist()])
            return to_ipc(found.replace(blobs=()))

        return from_ipc(self._group.share(resolve)).replace(blobs=manifest.blobs)

    def _payload(self, manifest: Manifest) -> Store:
        """The store of this rank's reads."""
        if self._store is None:
            self._store = open_files(open_store(self._url)[0], manifest.files, self._memory_budget_bytes // 4)
        return self._store

    def _match(self, live: LiveState, manifest: Manifest) -> Match:
        expected = [Expected(leaf.path, leaf.shape, leaf.dtype) for leaf in live.leaves]
        return match_tensors(manifest, expected, names=self._names, cast=self._cast)

    def _target(self, live: LiveState, manifest: Manifest) -> _Target:
        """What is to be filled; opens the store too, so that one look at all ranks tells of either's failure."""
        from ckpt_tool.frameworks.memory import memory_of

        self._payload(manifest)
        match = self._match(live, manifest)
        bad = {problem.fqn for problem in match.problems}
        width = manifest.tensors.shape.shape[1]
        landings: list[Landing] = []
        boxes, filled = [], 0
        for leaf, row in zip(live.leaves, match.rows, strict=True):
            if row < 0 or leaf.fqn in bad:
                continue
            for part in leaf.parts:
                if part.box.volume:
                    landings.append(Landing(row, part.box, leaf.dtype, memory_of(part.view)))
                    boxes.append((row, part.box))
                    filled += leaf.dtype.nbytes(part.box.volume)
        present = sorted({row for row in match.rows if row >= 0})  # also those of which this rank holds nothing
        empty = np.zeros((len(present), 1 + 2 * width), dtype=np.int64)
        empty[:, 0] = present
        return _Target(live, match, landings, np.concatenate([box_rows(boxes, width), empty]), filled)

    def _check(
        self, manifest: Manifest, everyone: Sequence[IntArray], own: list[Problem] | None, *, strict: bool
    ) -> tuple[str, ...]:
        """Names that only the checkpoint has; raises when something does not fit on some rank.

        ``own`` are this rank's problems, None when no rank has any.
        """
        unexpected = unexpected_tensors(manifest, {int(row) for rows in everyone for row in np.unique(rows[:, 0])})
        problems: dict[Problem, None] = {}
        if own is not None:
            for text in self._group.gather_texts(json.dumps([asdict(each) for each in own[:_GATHERED]])):
                problems |= dict.fromkeys(Problem(**fields) for fields in json.loads(text))
        if strict:
            problems |= dict.fromkeys(unexpected)
        if problems:
            raise misfit(self._url, list(problems), manifest)
        return tuple(problem.fqn for problem in unexpected)

    def _read_own(self, manifest: Manifest, target: _Target) -> _Moved:
        """Read what this rank needs, straight into place."""
        fillers: list[Filler] = []
        begun = time.perf_counter()

        def read() -> None:
            nonlocal begun
            store, rank = self._payload(manifest), self._group.rank
            quarter = self._memory_budget_bytes // 4
            limits = PlanLimits(min(_TILE_BYTES, quarter), quarter, _UNIT_BYTES)
            plan = make_plan(manifest, rank_manifest(manifest, {rank: target.rows}, self._group.size), limits=limits)
            landings = dict(enumerate(target.landings))
            begun = time.perf_counter()

            def filler() -> Filler:
                fillers.append(Filler(plan, store, landings))
                return fillers[-1]

            n_workers = self._n_workers or (store.cost.concurrency if store.cost.max_gap_bytes > _FAR_GAP_BYTES else 1)
            for _ in run_units(range(plan.tiles.n_units), filler, n_workers=n_workers):
                pass

        self._group.agree(_attempt(read)[1])
        return _Moved(begun, sum(each.read_nbytes for each in fillers), 0, 0, 0)

    def _exchange(self, manifest: Manifest, target: _Target, everyone: list[IntArray]) -> _Moved:
        """Read this rank's share of what the group needs, and exchange."""
        from ckpt_tool.engine.distributed_exchange import exchange_tile_bytes, run_exchange, schedule

        group = self._group
        tile_bytes = exchange_tile_bytes(self._memory_budget_bytes, group.size)

        def prepare() -> tuple[Plan, Any]:
            limits = PlanLimits(tile_bytes, tile_bytes, 1 << 40, one_read_per_tile=True)
            joint = rank_manifest(manifest, dict(enumerate(everyone)), group.size)
            plan = make_plan(manifest, joint, limits=limits)
            return plan, schedule(plan, group.size, round_bytes=tile_bytes)

        prepared, failure = _attempt(prepare)
        group.agree(failure)
        plan, plan_schedule = prepared
        first = sum(len(rows) for rows in everyone[: group.rank])
        landings = {first + number: landing for number, landing in enumerate(target.landings)}
        begun = time.perf_counter()
        moved = run_exchange(plan, plan_schedule, self._payload(manifest), landings, group)
        return _Moved(begun, moved.read_nbytes, moved.sent_nbytes, moved.received_nbytes, moved.max_buffer_nbytes)

    def _set_values(self, manifest: Manifest, live: LiveState) -> tuple[int, list[str]]:
        """Set what is no tensor; returns how many were set, and the names of those not found."""
        missing: list[str] = []

        def set_all() -> None:
            saved = SavedValues(manifest.blobs, self._group.rank)
            for slot in live.slots:
                found, value = saved.find(slot.path)
                if found:
                    slot.set(value)
                else:
                    missing.append(slot.fqn)
            for finish in live.finish:
                finish()

        self._group.agree(_attempt(set_all)[1])
        return len(live.slots) - len(missing), missing


def _attempt(make: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """``(what make returns, None)``, or ``(None, its failure)``, to be raised on every rank."""
    try:
        return make(), None
    except Exception as error:  # noqa: BLE001 - raised by Group.agree
        return None, error


@dataclass(frozen=True, slots=True)
class _Moved:
    """Bytes moved on this rank, and when that began."""

    begun: float
    read: int
    sent: int
    received: int
    buffers: int
