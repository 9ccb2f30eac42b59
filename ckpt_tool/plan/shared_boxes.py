"""Boxes that several ranks hold are stored once: whole or in parts that begin and end at rows, balanced by bytes.

What `share_replicas` decides in bytes becomes boxes here: along which dimension a box is cut, and how finely.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ckpt_tool.manifest.tables import IntArray
from ckpt_tool.plan.assign import choose_replicas
from ckpt_tool.plan.share_replicas import share_replicas
from ckpt_tool.records import dataclass

__all__ = ["StoredBoxes", "shared_boxes"]

_MAX_GRAIN_NBYTES = 1 << 20
_MIN_GRAIN_NBYTES = 4 << 10
"""Parts of less would be all head and no payload: states of so few bytes are balanced to such a page only."""
_GRAINS = 64
"""So finely a box is cut at least, counted for each rank that holds it: a rounded cut costs a hundredth of its part."""
_MIN_ROWS = 64
_ROWS = 32
"""A dimension with more rows, and as many for each rank that holds the box, is cut rather than a longer one behind it:
parts are runs of bytes then."""


@dataclass(frozen=True, eq=False)
class StoredBoxes:
    """What is stored."""

    row: IntArray
    """int64[m], ascending: the box that each is, or is a part of."""
    offsets: IntArray
    sizes: IntArray


def shared_boxes(
    group: IntArray,
    rank: IntArray,
    offsets: IntArray,
    sizes: IntArray,
    nbytes: IntArray,
    may_cut: npt.NDArray[np.bool_],
    world_size: int,
) -> StoredBoxes:
    """For each group one of its boxes, or parts of several that together are one.

    No rank ends more than a twentieth above what is possible, as long as boxes may be cut, have a dimension with some
    tens of rows for each rank, and are not tiny.

    Args:
        group: int64[n], equal for replicas of one box, of which each rank has one; in order of ranks.
        rank: int64[n], rank that holds the replica.
        offsets: int64[n, D]
        sizes: int64[n, D]
        nbytes: int64[n], size of the replica.
        may_cut: bool[n], the same within a group.
        world_size: number of ranks.
    """
    if not sizes.shape[1] or not may_cut.any():
        rows = choose_replicas(group, rank, nbytes, world_size)
        return StoredBoxes(rows, offsets[rows], sizes[rows])
    holders = np.unique(group, return_inverse=True, return_counts=True)
    n_holders = holders[2][holders[1].reshape(-1)]
    is_long = sizes >= np.maximum(_MIN_ROWS, _ROWS * n_holders)[:, None]
    dim = np.where(is_long.any(axis=1), np.argmax(is_long, axis=1), np.argmax(sizes, axis=1))
    own = np.arange(len(dim))
    row_nbytes = nbytes // np.maximum(sizes[own, dim], 1)
    fine = np.clip(nbytes // (_GRAINS * n_holders), _MIN_GRAIN_NBYTES, _MAX_GRAIN_NBYTES)
    at_once = np.maximum(-(-fine // np.maximum(row_nbytes, 1)), 1)
    shares = share_replicas(group, rank, nbytes, np.where(may_cut, row_nbytes * at_once, 0), world_size)
    offsets, sizes = offsets[shares.row], sizes[shares.row]
    part = np.flatnonzero(shares.stop - shares.first < nbytes[shares.row])
    cut = dim[shares.row[part]]
    first, stop = (column[part] // row_nbytes[shares.row[part]] for column in (shares.first, shares.stop))
    offsets[part, cut] += first
    sizes[part, cut] = stop - first
    return StoredBoxes(shares.row, offsets, sizes)
