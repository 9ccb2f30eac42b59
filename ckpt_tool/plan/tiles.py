"""A tile is a slab of one tensor, small enough for a buffer, through which its bytes pass once.

A slab has size 1 in the leading dimensions, a range in one dimension and everything behind it. Its part in any packed
box is therefore one contiguous run of bytes, so all file accesses of a tile are contiguous, and the tiles of a tensor,
taken in order, fill every target box from its first byte to its last.
"""

from __future__ import annotations

import numpy as np

from ckpt_tool.errors import Unsupported
from ckpt_tool.geometry.join import Boxes
from ckpt_tool.manifest.tables import IntArray
from ckpt_tool.sizes import counted

__all__ = ["cut_tiles"]

_MAX_TILES = 50_000_000
"""200 TB in tiles of 4 MiB: more is no checkpoint, and its columns alone would fill memory."""


def cut_tiles(regions: Boxes, *, bits: IntArray, max_tile_bytes: int, whole: IntArray) -> Boxes:
    """Slabs of at most ``max_tile_bytes`` that cover each region exactly once, by region, then in row-major order.

    Args:
        regions: boxes in global coordinates, none empty; the key of a tile is the *row* of its region.
        bits: int64[n], element width per region.
        max_tile_bytes: never exceeded unless one element is larger or ``whole`` is set.
        whole: bool or int[n], regions that must stay one tile.

    Returns:
        Tiles in global coordinates, with ``key`` = row of ``regions``.

    Raises:
        Unsupported: more tiles than any checkpoint has.

    >>> import numpy as np
    >>> r = Boxes(np.array([0]), np.array([[0, 0]]), np.array([[5, 4]]))
    >>> t = cut_tiles(r, bits=np.array([8]), max_tile_bytes=8, whole=np.array([0]))
    >>> t.offsets.tolist(), t.sizes.tolist()
    ([[0, 0], [2, 0], [4, 0]], [[2, 4], [2, 4], [1, 4]])
    """
    n, width = regions.sizes.shape
    if width == 0 or n == 0:
        return Boxes(np.arange(n), regions.offsets, regions.sizes)
    row_bits = np.ones((n, width), dtype=np.int64)  # bits behind one index of each dimension
    row_bits[:, :-1] = np.cumprod(regions.sizes[:, :0:-1], axis=1)[:, ::-1]
    row_bits *= bits[:, None]
    fits = row_bits <= max_tile_bytes * 8
    fits[:, -1] = True
    cut_dim = np.argmax(fits, axis=1)  # first dimension whose single rows fit
    cut_dim[np.asarray(whole, dtype=bool)] = -1
    dims = np.arange(width)
    cut_row_bits = row_bits[np.arange(n), np.maximum(cut_dim, 0)]
    rows = np.maximum(max_tile_bytes * 8 // np.maximum(cut_row_bits, 1), 1)
    step = np.where(
        dims[None] < cut_dim[:, None], 1, np.where(dims[None] == cut_dim[:, None], rows[:, None], regions.sizes)
    )
    step = np.minimum(step, regions.sizes)
    counts = -(-regions.sizes // step)
    if (total := float(np.prod(counts, axis=1, dtype=np.float64).sum())) > _MAX_TILES:
        raise Unsupported(
            f"elements that take {total:,.0f} tiles of {counted(max_tile_bytes, 'byte')}, expected {_MAX_TILES:,} at "
            "most",
            hint="a tensor may repeat a few stored elements without end (expand); leave it out with --exclude",
        )
    n_tiles = np.prod(counts, axis=1)
    region = np.repeat(np.arange(n), n_tiles)
    within = np.arange(len(region)) - np.repeat(np.cumsum(n_tiles) - n_tiles, n_tiles)
    offsets = np.empty((len(region), width), dtype=np.int64)
    for dim in range(width - 1, -1, -1):
        within, index = np.divmod(within, counts[region, dim])
        offsets[:, dim] = index * step[region, dim]
    sizes = np.minimum(step[region], regions.sizes[region] - offsets)
    return Boxes(region, regions.offsets[region] + offsets, sizes)
