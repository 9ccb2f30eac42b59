"""Hosts are the machines that the ranks of a group run on; ranks of one host share memory, and see each other end."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from ckpt_tool.engine import shared_memory
from ckpt_tool.engine.distributed_group import Group
from ckpt_tool.engine.shared_memory import Segment
from ckpt_tool.errors import StorageError
from ckpt_tool.manifest.tables import IntArray
from ckpt_tool.records import dataclass

__all__ = ["NO_OFFER", "Hosts", "Offer", "Published", "Segments", "hosts_of", "offer", "open_segments", "published"]


class Hosts:
    """Which ranks of a group share a host; waits for the other ranks when it is asked about them for the first time."""

    def __init__(self, rank: int, ask: Callable[[], IntArray]) -> None:
        self.rank = rank
        self._ask: Callable[[], IntArray] | None = ask
        self.key: tuple[int, ...] = ()
        """One per rank, equal for ranks of one host, once heard."""
        self.pid: tuple[int, ...] = ()
        """Process of each rank, as its own host counts, once heard."""

    def hear(self) -> None:
        """Wait for what the other ranks say, where that was not done yet.

        Raises:
            StorageError: some rank is gone.
        """
        if self._ask is not None:
            ask, self._ask = self._ask, None
            keys, pids = ask().T.tolist()
            self.key, self.pid = tuple(keys), tuple(pids)

    @property
    def is_leader(self) -> bool:
        """Whether this rank does what one rank does for all of its host. The first of all need not ask the others."""
        return not self.rank or self.rank == self.leader

    @cached_property
    def here(self) -> tuple[int, ...]:
        """Ranks of this rank's host, ascending."""
        self.hear()
        return tuple(rank for rank, key in enumerate(self.key) if key == self.key[self.rank])

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each host."""
        self.hear()
        by_key: dict[int, list[int]] = {}
        for rank, key in enumerate(self.key):
            by_key.setdefault(key, []).append(rank)
        return tuple(tuple(ranks) for ranks in by_key.values())

    @property
    def leader(self) -> int:
        """The first rank of this rank's host."""
        return self.here[0]

    def ended(self) -> list[int]:
        """Ranks of this host whose process is gone, as far as they have been heard of."""
        known = [rank for rank in self.here if rank != self.rank] if self.key else []
        return [rank for rank in known if shared_memory.has_ended(self.pid[rank])]


_KNOWN: WeakKeyDictionary[Any, Hosts] = WeakKeyDictionary()


def hosts_of(group: Group) -> Hosts:
    """The hosts of a group; one collective the first time that a process group is asked about.

    The first rank does not wait for it yet: it has metadata to read, which the others wait for.
    """
    own = [shared_memory.host_key(), os.getpid()]
    if group.size == 1:
        return Hosts(0, lambda: np.array([own], dtype=np.int64))
    known = _KNOWN.get(group.process_group)
    if known is None:
        known = Hosts(group.rank, group.begin_row(own))
        if group.rank:
            known.hear()
        _KNOWN[group.process_group] = known
    group.watch(known.ended)
    return known


@dataclass(slots=True)
class Offer:
    """Bytes that the leader of a host has made for its other ranks, before these know of them."""

    digest: int
    own: Segment | None
    """None where the leader is alone on its host."""

    @property
    def row(self) -> list[int]:
        """What the others are told; `NO_OFFER` of a rank that has made none."""
        return [self.own.fd if self.own else -1, self.own.nbytes if self.own else 0, self.digest]

    def close(self) -> None:
        """End the sharing; what is mapped stays."""
        if self.own is not None:
            self.own.close()


NO_OFFER = (-1, 0, 0)


@dataclass(slots=True)
class Published:
    """Bytes that the leader of each host made, and how the other ranks of the host come to them."""

    digest: int
    """Of the bytes, as the leader computed it."""
    is_same_everywhere: bool
    """Whether all hosts have the same digest."""
    _pid: int
    _fd: int
    _nbytes: int

    def open(self) -> npt.NDArray[np.uint8]:
        """The bytes, mapped; for ranks that are no leader, before the next collective, after which it may `close`.

        Raises:
            StorageError: the leader's memory cannot be reached.
        """
        return Segment.of_process(self._pid, self._fd, self._nbytes).bytes


def offer(hosts: Hosts, parts: Sequence[bytes | npt.NDArray[np.uint8]], digest: int) -> Offer:
    """``parts``, for the other ranks of this leader's host.

    Raises:
        StorageError: there is no memory for them.
    """
    return Offer(digest, Segment.holding(parts) if len(hosts.here) > 1 else None)


def published(hosts: Hosts, rows: IntArray) -> Published:
    """What the leaders have offered; ``rows`` are those of their offers, ``int64[ranks, 3]``."""
    fd, nbytes, digest = rows[hosts.leader].tolist()
    is_same = len({int(rows[ranks[0], 2]) for ranks in hosts.groups}) == 1
    return Published(digest, is_same, hosts.pid[hosts.leader], fd, nbytes)


@dataclass(slots=True)
class Segments:
    """Memory of each rank of a host, mapped by all of them."""

    own: Segment
    all: tuple[Segment, ...]
    """In the order of the ranks; none where not all can be reached."""
    failure: StorageError | None
    """Why; of this rank alone."""


def open_segments(group: Group, hosts: Hosts, nbytes: int, failure: BaseException | None) -> Segments:
    """A segment of each rank of this host; the own one is to be closed once all ranks have agreed on how it went.

    One collective of the whole group.

    Raises:
        CkptError: a rank has come with a ``failure``, or has no memory for a segment; on every rank.
    """
    own = None
    if failure is None:
        try:
            own = Segment.create(nbytes)
        except StorageError as error:
            failure = error
    try:
        rows = group.gather_row([own.fd if own else -1], failure)
    except BaseException:
        if own is not None:
            own.close()
        raise
    if own is None:
        raise StorageError("no segment was made, and no failure told of")
    try:
        fds = rows[list(hosts.here), 0].tolist()
        found = [
            own if rank == hosts.rank else Segment.of_process(hosts.pid[rank], fd, nbytes)
            for rank, fd in zip(hosts.here, fds, strict=True)
        ]
    except StorageError as error:
        return Segments(own, (), error)
    return Segments(own, tuple(found), None)
