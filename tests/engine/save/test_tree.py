"""The control tree: who reports to whom, and what a save costs in messages at ten and a hundred thousand ranks."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest

from ckpt_tool.engine.save.rounds import PlanEntry, Report, Round
from ckpt_tool.engine.save.tree import FAN_OUT, Tree, control_tree

PER_HOST = 8


def hosts_of(n: int) -> list[str]:
    """Names of the hosts of ``n`` ranks."""
    return [f"host{rank // PER_HOST}" for rank in range(n)]


def fan_out(tree: Tree) -> int:
    """Most ranks that report to one."""
    return int(np.bincount(tree.parent[tree.parent >= 0], minlength=1).max())


@pytest.mark.parametrize("n", [1, 2, 3, 17, 100, 1000])
@pytest.mark.parametrize("per_host", [1, 3, 40])
def test_shape(n: int, per_host: int) -> None:
    """Every rank reaches rank 0; only the lowest rank of a host has a parent on another one."""
    hosts = [f"h{rank // per_host}" for rank in range(n)]
    tree = control_tree(hosts)
    assert tree.parent[0] == -1
    assert (tree.parent[1:] >= 0).all()
    assert tree.depth[0] == 0
    assert fan_out(tree) <= 2 * FAN_OUT
    for rank in range(1, n):
        if hosts[rank] != hosts[tree.parent[rank]]:
            assert rank == hosts.index(hosts[rank])
            assert tree.parent[rank] == hosts.index(hosts[tree.parent[rank]])


def test_hosts_in_any_order() -> None:
    """Ranks may be spread over hosts in turns."""
    tree = control_tree(["b", "a", "b", "a", "c"])
    assert tree.parent.tolist() == [-1, 0, 0, 1, 0]
    assert tree.children(0) == [1, 2, 4]


class Simulated:
    """All nodes of a tree in one process, with messages counted and clocked.

    A node takes 20 microseconds to receive a message and 10 to send one, one after another; a link takes 50 (what was
    seen between processes of one host, doubled).
    """

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.children: list[list[int]] = [[] for _ in tree.parent]
        for rank, parent in enumerate(tree.parent.tolist()):
            if parent >= 0:
                self.children[parent].append(rank)
        self.rounds = [Round([rank, *self.children[rank]]) for rank in range(len(tree.parent))]
        self.ready = np.zeros(len(tree.parent))
        self.n_messages = 0
        self.largest = 0
        self.joint: Report | None = None

    def report(self, rank: int, report: Report) -> None:
        """One rank's own report, and all that follows from it on the way up."""
        pending: deque[tuple[int, int, Report]] = deque([(rank, rank, report)])
        while pending:
            node, source, told = pending.popleft()
            joint = self.rounds[node].add(source, told)
            if joint is None:
                continue
            parent = int(self.tree.parent[node])
            if parent < 0:
                self.joint = joint
                continue
            self.n_messages += 1
            self.largest = max(self.largest, len(joint.done) + len(joint.plans))
            self.ready[parent] = max(self.ready[parent], self.ready[node] + 10e-6 + 50e-6) + 20e-6
            pending.append((parent, node, joint))

    def spread(self) -> float:
        """A verdict on its way down; seconds until the last rank has it."""
        for rank in np.argsort(self.tree.depth, kind="stable").tolist():
            at = self.ready[rank]
            for child in self.children[rank]:
                at += 10e-6
                self.n_messages += 1
                self.ready[child] = at + 50e-6 + 20e-6
        return float(self.ready.max())


def leaves_first(tree: Tree) -> list[int]:
    """Ranks so that a node reports after those below it."""
    order: list[int] = np.argsort(-tree.depth, kind="stable").tolist()
    return order


@pytest.mark.parametrize(("n", "depth", "milliseconds"), [(10_000, 5, 2.1), (100_000, 6, 2.6)])
def test_a_commit_of_many_ranks(n: int, depth: int, milliseconds: float) -> None:
    """One message up and one down for each rank but the root, over few links; no node hears from more than 16."""
    tree = control_tree(hosts_of(n))
    assert int(tree.depth.max()) <= depth
    assert fan_out(tree) <= 2 * FAN_OUT
    job = Simulated(tree)
    for rank in leaves_first(tree):
        job.report(rank, Report(done=[{"rank": rank}]))
    assert job.joint is not None
    assert len(job.joint.done) == n
    assert job.n_messages == n - 1
    assert job.spread() * 1e3 <= milliseconds
    assert job.n_messages == 2 * (n - 1)


def test_names_travel_once() -> None:
    """Ranks with the same names put them into every message once; each node repeats a planning rank's report once."""
    tree = control_tree(hosts_of(200))
    job = Simulated(tree)
    for rank in leaves_first(tree):
        job.report(rank, Report(plans={rank: PlanEntry("key", "digest", b"boxes")}, names={"digest": b"names"}))
    assert job.joint is not None
    assert job.joint.names == {"digest": b"names"}
    assert sorted(job.joint.plans) == list(range(200))
    for rank in range(200):
        job.rounds[rank].reopen(range(200))
    for rank in leaves_first(tree):
        job.report(rank, Report(done=[{"rank": rank}]))
    assert len(job.joint.done) == 200
    assert not job.joint.plans
    assert job.n_messages == 2 * 199


def test_a_failure_does_not_wait() -> None:
    """A failure goes up at once, whoever has not reported yet; reports go through a message unchanged."""
    error = {"kind": "StorageError", "message": "no room", "where": None, "hint": None}
    joint = Round([0, 1, 2]).add(1, Report(error=error))
    assert joint is not None
    assert joint.error == error
    sent: dict[str, Any] = {"rank": 3, "files": {"a": 1}}
    report = Report([sent], {4: PlanEntry("k", "d", b"12")}, {"d": b"345"})
    assert Report.from_message(report.to_message(7)) == report
