"""A schedule says which rank reads which tile of a plan, and in which round: a pure function, the same on every rank.

The plan's target has ranks for files, see `landing.rank_manifest`.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise

import numpy as np

from ckpt_tool.geometry.columns import distinct
from ckpt_tool.manifest.tables import IntArray
from ckpt_tool.plan.assign import choose_replicas
from ckpt_tool.plan.model import Plan
from ckpt_tool.records import dataclass

__all__ = ["Schedule", "make_schedule"]


@dataclass(frozen=True, eq=False)
class Schedule:
    """Who reads which tile, and in which round."""

    reader: IntArray  # int64[n_tiles], rank; -1 for tiles that nobody needs
    n_users: IntArray  # int64[n_tiles], ranks that need the tile
    round: IntArray  # int64[n_tiles]
    order: IntArray  # int64[n_tiles], tiles by round, then by place in the source's files
    n_rounds: int


def make_schedule(plan: Plan, world_size: int, *, round_bytes: int, lone_rounds: bool = True) -> Schedule:
    """Each tile to one of the ranks that need it, balanced by bytes; tiles of a rank to rounds in file order.

    Args:
        plan: its target's files are ranks.
        world_size: number of ranks.
        round_bytes: what one rank reads in a round at most, unless one tile is larger.
        lone_rounds: whether tiles that only their reader needs have a place in the rounds; else their round is 0.
    """
    writes, tiles = plan.writes, plan.tiles
    pairs = distinct(writes.tile * world_size + writes.file)
    tile, rank = np.divmod(pairs, world_size)
    n_users = np.bincount(tile, minlength=len(tiles))
    reader = np.full(len(tiles), -1, dtype=np.int64)
    kept = choose_replicas(tile, rank, tiles.nbytes[tile], world_size)
    reader[tile[kept]] = rank[kept]
    first = np.minimum(plan.reads.starts[: len(tiles)], max(len(plan.reads) - 1, 0))
    place = np.lexsort((plan.reads.file_offset[first], plan.reads.file[first], reader))
    taking_part = place[(reader[place] >= 0) & (lone_rounds | (n_users[place] > 1))]
    rounds = np.zeros(len(tiles), dtype=np.int64)
    bounds = np.searchsorted(reader[taking_part], np.arange(world_size + 1)).tolist()
    for low, high in pairwise(bounds):
        end = np.cumsum(tiles.nbytes[taking_part[low:high]]).tolist()
        stops = [0]
        while stops[-1] < high - low:
            at = stops[-1]
            done = end[at - 1] if at else 0
            stops.append(max(bisect_right(end, done + round_bytes), at + 1))
        rounds[taking_part[low:high]] = np.repeat(np.arange(len(stops) - 1), np.diff(stops))
    rank_in_file = np.empty(len(tiles), dtype=np.int64)
    rank_in_file[place] = np.arange(len(tiles))
    n_rounds = int(rounds[taking_part].max(initial=-1)) + 1
    return Schedule(reader, n_users, rounds, np.lexsort((rank_in_file, rounds)), n_rounds)
