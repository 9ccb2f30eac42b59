"""Loading fills the live tensors of a training job from a checkpoint of any format and any layout, in place.

Each rank reads the bytes that its own boxes need, or each byte is read once and carried to the ranks that need it.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ckpt_tool.api.job.load_cache import Known, find_known, keep_known
from ckpt_tool.api.job.load_exchange import Choice, Exchange, choose_exchange
from ckpt_tool.api.job.load_manifest import SharedManifest
from ckpt_tool.api.job.load_match import NameMap, Problem, SavedValues, misfit, unexpected_tensors
from ckpt_tool.api.job.load_move import Moved, Moves, plan_moves, run_moves
from ckpt_tool.api.job.load_settle import absent_entries
from ckpt_tool.api.job.load_target import (
    Memories,
    Target,
    device_of,
    fill_from_objects,
    matched,
    memories_of,
    names_in_one,
    state_key,
    target_of,
)
from ckpt_tool.engine.landing import Landing
from ckpt_tool.errors import Unsupported, UsageError
from ckpt_tool.geometry.columns import distinct
from ckpt_tool.manifest.model import Blob, Manifest
from ckpt_tool.manifest.plain import from_plain, to_plain
from ckpt_tool.manifest.tables import FileTable, IntArray
from ckpt_tool.records import dataclass
from ckpt_tool.storage.open import open_payload
from ckpt_tool.storage.store import Store
from ckpt_tool.storage.virtual.decode import open_files

if TYPE_CHECKING:
    from ckpt_tool.engine.distributed_group import Group
    from ckpt_tool.engine.distributed_hosts import Hosts
    from ckpt_tool.frameworks.state import LiveState

__all__ = ["DEFAULT_LOAD_MEMORY_BYTES", "LoadReport", "load"]

DEFAULT_LOAD_MEMORY_BYTES = 64 << 20

_GATHERED = 1_000  # problems of one rank that the others hear of
_WAYS = ("auto", "none", "shared-memory", "all-to-all")


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What one rank's load did."""

    exchange: str
    """``none``, ``shared-memory`` or ``all-to-all``."""
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
    """Shared memory, or send and receive buffers, that this rank had at most."""
    missing: tuple[str, ...]
    """Tensors and values of the state that the checkpoint does not have; they kept their values."""
    unexpected: tuple[str, ...]
    """Tensors of the checkpoint that no rank's state has."""
    renamed: tuple[tuple[str, str], ...]
    """(name in the state, name in the checkpoint) where outer keys or wrappers' prefixes differ."""
    seconds: float
    plan_seconds: float
    """Of these, until the first byte of payload was read."""
    is_replayed: bool
    """Whether the plan was that of an earlier load of the same structure."""


def load(  # noqa: PLR0913 - the options of a command
    state: Any,
    url: str | os.PathLike[str],
    *,
    process_group: Any = None,
    strict: bool = True,
    cast: bool = False,
    unequal: Literal["first"] | None = None,
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

    One rank of each host reads the metadata and shares it. Without torch.distributed, or with one rank, nothing is
    exchanged. What was planned is kept for the next load of the same files into the same structure.

    Args:
        state: nested dicts and lists, as ``{"model": model.state_dict(), "optim": ...}``.
        url: checkpoint of any readable format.
        process_group: the ranks that take part, None for all.
        strict: tensors that only one side has are an error. On the checkpoint's side only those parts of it count (its
            model, its optimizer, what lies below one outermost key) of which the state has some tensor, so that a model
            loads alone. With ``strict=False`` what is missing keeps its value and what is unexpected is left; the
            report lists both. Values that are no tensors are never an error.
        cast: convert element types where they differ, instead of stopping.
        unequal: ``first`` takes the first rank's of tensors that ranks saved with different values, although no file
            says how these join; None to stop.
        exchange: ``none``: each rank reads what it needs; ``shared-memory``: each byte is read once per host, and
            copied there by all ranks that need it; ``all-to-all``: each byte is read once by some rank and sent to the
            others that need it; ``auto`` decides by how much is shared and how fast reading, copying and sending are
            measured to be.
        memory_budget_bytes: bound for all buffers of this rank, exchange included.
        names: what a tensor of the state is called in the checkpoint, where that is another name.
        n_workers: reading threads of each rank, None for a number that suits the storage.
        timeout_s: longest wait for the other ranks, at each step.

    Raises:
        LayoutError: tensors that do not fit, listed once, on every rank.
        StorageError: a file has changed while it was read, seen by one rank of each host when all have read.
        CkptError: any other failure of any rank, on every rank. Tensors are then partly filled.
    """
    if exchange not in _WAYS:
        raise UsageError(f"exchange must be one of {', '.join(_WAYS)}, got {exchange!r}")
    from ckpt_tool.engine.distributed_group import Group

    if unequal not in (None, "first"):
        raise UsageError(f"unequal must be 'first' or None, got {unequal!r}")
    options = _Options(strict, cast, unequal == "first", exchange, memory_budget_bytes, names, n_workers)
    return _Loading(Group(process_group, timeout_s=timeout_s), os.fspath(url), options).run(state)


@dataclass(frozen=True, slots=True)
class _Options:
    """How to load."""

    strict: bool
    cast: bool
    takes_first: bool
    exchange: Exchange
    memory_budget_bytes: int
    names: NameMap | None
    n_workers: int | None

    @property
    def key(self) -> tuple[Any, ...] | None:
        """What a plan depends on; None where that cannot be told, since a function may change its mind."""
        if callable(self.names):
            return None
        names = None if self.names is None else tuple(sorted(self.names.items()))
        return (self.strict, self.cast, self.takes_first, self.exchange, self.memory_budget_bytes, names)


class _Loading:
    """One call of ``load`` on one rank."""

    def __init__(self, group: Group, url: str, options: _Options) -> None:
        self._group, self._url, self._options = group, url, options
        self._store: Store | None = None
        self._memories: Memories | None = None
        self._landings: dict[int, Landing] | None = None

    def run(self, state: Any) -> LoadReport:
        started = time.perf_counter()
        from ckpt_tool.engine.distributed_hosts import hosts_of
        from ckpt_tool.frameworks.state import walk_state

        live, failure = _attempt(lambda: walk_state(state))
        hosts = hosts_of(self._group)
        shared = SharedManifest(self._group, hosts, self._url, takes_first=self._options.takes_first)
        try:
            key = self._key(live)
            known = None
            if failure is None and key is not None:
                known, failure = _attempt(lambda: self._known(key, shared))
            has_values = live is not None and bool(live.slots or live.in_tuples)
            has_more = live is not None and bool(live.finish)
            if failure is None and known is None:  # which all ranks will hear of, and so plan
                _, failure = _attempt(lambda: self._prepare(live, shared))
            hosts.hear()
            if failure is None and known is None:
                _, failure = _attempt(shared.offer)
            in_one = names_in_one(live, self._options.names)
            row = [has_values, has_more, bool(in_one), known.fingerprint if known is not None else 0, *shared.row]
            heard = self._group.gather_row(row, failure)
            any_values = bool(heard[:, 0].any())
            is_replayed = known is not None and bool((heard[:, 3] == known.fingerprint).all())
            if known is None or not is_replayed:
                stacked = in_one if heard[:, 2].any() else None
                shared.read(self._wanted(live), heard[:, 4:], with_values=any_values, in_one=stacked)
                known = self._plan(live, shared, hosts)
                if key is not None:
                    keep_known(self._group.process_group, key, known)
            begun = time.perf_counter()
            moved = self._move(known, live, hosts)
            n_values, missing = self._set_values(known, live) if heard[:, :2].any() else (0, [])
            self._group.agree(_attempt(lambda: shared.check(known.files))[1])  # by now every rank has read
        except BaseException:
            for undo in () if live is None else live.undo:
                undo()
            raise
        finally:
            shared.close()
            if self._store is not None:
                self._store.close()
        target = known.target
        missing += [problem.fqn for problem in target.match.problems if problem.kind == "missing"]
        without_place = [each.fqn for each in target.match.problems if each.kind == "unexpected"]
        unexpected = tuple(dict.fromkeys([*known.unexpected, *without_place]))
        return LoadReport(
            exchange=known.choice.exchange, why=known.choice.why, n_tensors=sum(row >= 0 for row in target.match.rows),
            n_values=n_values, filled_nbytes=target.filled_nbytes, read_nbytes=moved.read,
            probe_nbytes=0 if is_replayed else known.choice.probe_nbytes, sent_nbytes=moved.sent,
            received_nbytes=moved.received, max_buffer_nbytes=moved.buffers, missing=tuple(missing),
            unexpected=unexpected, renamed=target.match.renamed, seconds=time.perf_counter() - started,
            plan_seconds=begun - started, is_replayed=is_replayed,
        )  # fmt: skip

    def _key(self, live: LiveState | None) -> tuple[Any, ...] | None:
        if live is None or self._options.key is None:
            return None
        return (self._url, self._options.key, state_key(live))

    def _known(self, key: tuple[Any, ...], shared: SharedManifest) -> Known | None:
        """What an earlier load has found out, where leaders see the files that it saw."""
        known = find_known(self._group.process_group, key)
        if known is not None and shared.is_leader and not shared.is_unchanged(known.stamp):
            return None
        return known

    def _prepare(self, live: LiveState, shared: SharedManifest) -> None:
        """What a rank can do before it hears of the others: leaders read metadata, the others would only wait."""
        if shared.is_leader:
            in_one = names_in_one(live, self._options.names) or None
            shared.prepare(self._wanted(live), with_values=bool(live.slots or live.in_tuples), in_one=in_one)
        else:
            self._memories = memories_of(live)

    def _wanted(self, live: LiveState) -> Callable[[Manifest], list[str]]:
        """Which tensors of a manifest this rank loads."""

        def wanted(manifest: Manifest) -> list[str]:
            options = self._options
            rows = matched(live, manifest, options.names, cast=options.cast, rank=self._group.rank).rows
            return [manifest.tensors.fqns[row] for row in rows if row >= 0]

        return wanted

    def _plan(self, live: LiveState, shared: SharedManifest, hosts: Hosts) -> Known:
        """All that is to be known before payload is read, of the metadata; the same failures on every rank."""
        options, group = self._options, self._group

        def aim() -> tuple[Manifest, Target, dict[int, Landing]]:
            manifest = shared.manifest()
            match = matched(live, manifest, options.names, cast=options.cast, rank=group.rank)
            target = target_of(live, manifest, match)
            self._payload(manifest)  # here, so that one look at all ranks tells of either's failure
            return manifest, target, target.landings(live, self._memories)

        aimed, failure = _attempt(aim)
        own = aimed[1].problems(strict=options.strict) if aimed else []
        rows = aimed[1].rows if aimed else np.zeros((0, 1), dtype=np.int64)
        carrier = group.carrier(device_of(live))
        everyone, notes = group.gather_noting(rows, [len(own), carrier != group.device], failure)
        manifest, target, landings = aimed
        unexpected = self._check(manifest, everyone, own if notes[:, 0].any() else None)
        if shared.resolve(manifest, everyone):
            found, failure = _attempt(shared.manifest)
            group.agree(failure)
            manifest = found.replace(blobs=manifest.blobs)
        if not notes[:, 1].all():
            carrier = group.device
        choice = choose_exchange(options.exchange, manifest, everyone, self._payload(manifest), group, hosts, carrier)
        moves, failure = _attempt(lambda: self._moves(choice, manifest, everyone, landings, hosts))
        if failure is not None:
            group.agree(failure)  # whatever the exchange, the others agree next, before it or once they have read
        self._landings = landings
        stamp = shared.stamp if shared.is_leader else None
        return Known(
            _fingerprint(shared.digest, everyone, choice), stamp, target, unexpected, manifest.files, manifest.blobs,
            choice, moves,
        )  # fmt: skip

    def _moves(
        self, choice: Choice, manifest: Manifest, everyone: list[IntArray], landings: dict[int, Landing], hosts: Hosts
    ) -> Moves:
        return plan_moves(
            choice.exchange, manifest, everyone, landings, self._payload(manifest), self._group, hosts,
            self._options.memory_budget_bytes,
        )  # fmt: skip

    def _move(self, known: Known, live: LiveState, hosts: Hosts) -> Moved:
        made, failure = _attempt(lambda: (self._landings or known.target.landings(live), self._store_of(known.files)))
        carrier = known.choice.carrier
        return run_moves(known.moves, made, failure, self._group, hosts, carrier, self._options.n_workers)

    def _payload(self, manifest: Manifest) -> Store:
        """The store of this rank's reads."""
        return self._store_of(manifest.files)

    def _store_of(self, files: FileTable) -> Store:
        if self._store is None:
            self._store = open_files(open_payload(self._url), files, self._options.memory_budget_bytes // 4)
        return self._store

    def _check(self, manifest: Manifest, everyone: Sequence[IntArray], own: list[Problem] | None) -> tuple[str, ...]:
        """Names that only the checkpoint has; raises when something does not fit on some rank.

        ``own`` are this rank's problems, None when no rank has any.
        """
        used = distinct(np.concatenate([rows[:, 0] for rows in everyone]))
        unexpected = [] if len(used) == len(manifest.tensors) else unexpected_tensors(manifest, set(used.tolist()))
        problems: dict[Problem, None] = {}
        if own is not None:
            for text in self._group.gather_texts(json.dumps([asdict(each) for each in own[:_GATHERED]])):
                problems |= dict.fromkeys(Problem(**fields) for fields in json.loads(text))
        if self._options.strict:
            problems |= dict.fromkeys(unexpected)
        if problems:
            raise misfit(self._url, list(problems), manifest.tensors.fqns)
        return tuple(problem.fqn for problem in unexpected)

    def _set_values(self, known: Known, live: LiveState) -> tuple[int, list[str]]:
        """Set what is no tensor; returns how many were set, and the names of those not found."""
        from ckpt_tool.engine.save.objects import object_of

        missing: list[str] = []

        def read(blob: Blob) -> Any:
            (data,) = self._store_of(known.files).fetch([blob.where] if blob.where is not None else [])
            return object_of(data, blob.within, trusted=False, where=blob.fqn)

        def set_all() -> None:
            saved = SavedValues(known.blobs, self._group.rank, read)
            for slot in live.slots:
                found, value = saved.find(slot.path)
                if found:
                    slot.set(_own(value))
                elif not _is_empty(slot.value):
                    missing.append(slot.fqn)
            problems = fill_from_objects(live, known.target.match, saved, cast=self._options.cast)
            missing.extend(each.fqn for each in problems if each.kind == "missing")
            wrong = [each for each in problems if self._options.strict or each.kind != "missing"]
            if wrong:
                raise misfit(self._url, wrong, ())
            for number in absent_entries(live, known.target.match):
                live.made[number].drop()
            for finish in live.finish:
                finish()

        self._group.agree(_attempt(set_all)[1])
        return len(live.slots) - len(missing), missing


def _fingerprint(digest: int, everyone: Sequence[IntArray], choice: Choice) -> int:
    """A number, never 0, that is equal on all ranks of one load, and other for any other one."""
    found = hashlib.blake2b(f"{digest} {choice.exchange} {choice.carrier.type}".encode(), digest_size=7)
    for rows in everyone:
        found.update(np.ascontiguousarray(rows).data)
    return int.from_bytes(found.digest(), "little") + 1


def _own(value: Any) -> Any:
    """``value`` for the state alone, of Python's and numpy's own classes: what is kept serves later loads too."""
    try:
        return from_plain(to_plain(value))
    except Unsupported:
        return deepcopy(value)


def _is_empty(value: Any) -> bool:
    """Whether ``value`` is a dict of nothing, as the state of an optimizer that has none, of which nothing is saved."""
    return isinstance(value, Mapping) and not value


def _attempt(make: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    """``(what make returns, None)``, or ``(None, its failure)``, to be raised on every rank."""
    try:
        return make(), None
    except BaseException as error:  # noqa: BLE001 - raised by Group.agree; the others would wait for who is interrupted
        return None, error
