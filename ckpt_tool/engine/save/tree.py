"""The shape of the control tree: ranks of one host meet at one of them, hosts meet in a tree of bounded fan-out.

Pure arithmetic on rank numbers: every rank computes the same tree from the same list of hosts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ckpt_tool.records import dataclass

__all__ = ["FAN_OUT", "Tree", "control_tree"]

FAN_OUT = 8


@dataclass(frozen=True, eq=False)
class Tree:
    """A tree over ranks; rank 0 is its root."""

    parent: npt.NDArray[np.int64]
    """int64[n]: -1 for the root."""

    def children(self, rank: int) -> list[int]:
        """Ranks that report to ``rank``, ascending."""
        found: list[int] = np.flatnonzero(self.parent == rank).tolist()
        return found

    @property
    def depth(self) -> npt.NDArray[np.int64]:
        """int64[n]: links from each rank to the root."""
        depth = np.zeros(len(self.parent), dtype=np.int64)
        at = self.parent.copy()
        while (at >= 0).any():
            depth += at >= 0
            at = np.where(at >= 0, self.parent[np.maximum(at, 0)], -1)
        return depth


def control_tree(hosts: Sequence[str]) -> Tree:
    """The tree of ranks that run on ``hosts`` (one name per rank).

    The lowest rank of each host is its leader; within a host, and among leaders, the ``i``-th reports to the
    ``(i - 1) // FAN_OUT``-th.

    >>> control_tree(["a", "a", "b", "b"]).parent.tolist()
    [-1, 0, 0, 2]
    """
    _, host = np.unique(np.asarray(hosts), return_inverse=True)
    n = len(hosts)
    order = np.argsort(host, kind="stable")
    starts = np.flatnonzero(np.r_[True, host[order][1:] != host[order][:-1]]) if n else np.zeros(0, dtype=np.int64)
    counts = np.diff(np.r_[starts, n])
    within = np.arange(n) - np.repeat(starts, counts)
    parent = np.full(n, -1, dtype=np.int64)
    inner = within > 0
    parent[order[inner]] = order[(np.repeat(starts, counts) + (within - 1) // FAN_OUT)[inner]]
    leaders = np.sort(order[starts])
    place = np.arange(1, len(leaders))
    parent[leaders[1:]] = leaders[(place - 1) // FAN_OUT]
    return Tree(parent)
