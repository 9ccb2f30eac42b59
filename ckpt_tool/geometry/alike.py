"""Keys are alike when their boxes are the same on both sides of a join: layers of a model, moments of a parameter.

Of a large model most tensors are cut like another one, so that one join serves them all. Pure columns; what is alike
is first told by digests and then compared, number by number.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ckpt_tool.geometry.columns import Int64Array
from ckpt_tool.geometry.overlaps import row_digest
from ckpt_tool.records import dataclass

__all__ = ["Alike", "Side", "alike_keys"]


@dataclass(frozen=True, eq=False)
class Side:
    """Rows of one table by key: those of key ``k`` are ``order[starts[k]:starts[k + 1]]``, in the table's order."""

    order: Int64Array
    starts: Int64Array
    columns: tuple[Int64Array, ...]
    """Numbers of each row, in the table's order, that make it like another one."""

    @classmethod
    def of(cls, key: Int64Array, n_keys: int, offsets: Int64Array, sizes: Int64Array) -> Side:
        """The rows of a table with keys from 0 to ``n_keys``."""
        order = np.argsort(key, kind="stable")
        starts = np.searchsorted(key[order], np.arange(n_keys + 1))
        return cls(order, starts, (*offsets.T, *sizes.T))

    @property
    def counts(self) -> Int64Array:
        """int64[n_keys]: rows of each key."""
        return np.diff(self.starts)

    def places(self, keys: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Of each row of ``keys``, one key after another: its key's place among them, and its own in ``order``."""
        counts = self.counts[keys]
        turn = np.repeat(np.arange(len(keys)), counts)
        within = np.arange(len(turn)) - np.repeat(np.cumsum(counts) - counts, counts)
        return turn, self.starts[keys][turn] + within

    def digests(self) -> npt.NDArray[np.uint64]:
        """uint64[n_keys]: equal for keys with equal rows in equal order, and hardly ever for others."""
        within = np.arange(len(self.order)) - np.repeat(self.starts[:-1], self.counts)
        weight = (2 * within + 1).astype(np.uint64) * np.uint64(0xD6E8FEB86659FD93)
        total = np.concatenate([np.zeros(1, dtype=np.uint64), np.cumsum(row_digest(self.columns)[self.order] * weight)])
        digests: npt.NDArray[np.uint64] = total[self.starts[1:]] - total[self.starts[:-1]]
        return digests

    def differs(self, like: Int64Array) -> npt.NDArray[np.bool_]:
        """bool[n_keys]: whether a key's rows are not those of the key ``like[key]``, which has as many."""
        counts = self.counts
        own = np.arange(len(self.order))
        other = own + np.repeat(self.starts[like] - self.starts[:-1], counts)
        is_other = np.zeros(len(own), dtype=bool)
        for column in self.columns:
            by_key = column[self.order]
            is_other |= by_key != by_key[other]
        key = np.repeat(np.arange(len(counts)), counts)
        return np.bincount(key[is_other], minlength=len(counts)) > 0


@dataclass(frozen=True, eq=False)
class Alike:
    """For each key the first one like it, and the keys that are like none before them."""

    like: Int64Array
    firsts: Int64Array


def alike_keys(left: Side, right: Side) -> Alike:
    """Which keys look alike on both sides. Cost: a few passes over the rows."""
    mixed = left.digests() * np.uint64(0x9E3779B97F4A7C15) ^ right.digests()
    _, first, place = np.unique(mixed, return_index=True, return_inverse=True)
    like = first[place.reshape(-1)]
    own = np.arange(len(like))
    same_counts = (left.counts == left.counts[like]) & (right.counts == right.counts[like])
    like = np.where(same_counts, like, own)
    like = np.where(left.differs(like) | right.differs(like), own, like)
    return Alike(like, np.flatnonzero(like == own))
