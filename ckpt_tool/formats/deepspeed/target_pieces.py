"""Pieces are slices of flattened shards as boxes of whole tensors, each of them one run of its rank's vector."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckpt_tool.errors import Unsupported
from ckpt_tool.formats.deepspeed.affine import Pair
from ckpt_tool.formats.deepspeed.partition import Slices
from ckpt_tool.geometry.columns import Int64Array
from ckpt_tool.geometry.flat import flat_boxes_columns
from ckpt_tool.geometry.runs import contiguous_strides_columns
from ckpt_tool.manifest.tables import pad_shapes
from ckpt_tool.records import dataclass

__all__ = ["Pieces", "pieces_of"]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Columns: boxes of parameters in one rank's vector."""

    parameter: Int64Array  # int64[n], index into the vector's parameters
    offsets: Int64Array  # int64[n, D]
    sizes: Int64Array  # int64[n, D]
    position: Int64Array  # int64[n], element of the rank's vector


def pieces_of(slices: Slices, shapes: Sequence[tuple[int, ...]], shards: Sequence[tuple[Pair, ...]]) -> Pieces:
    """The boxes of ``slices``.

    Args:
        slices: of the flattened shards.
        shapes: of the shards.
        shards: by parameter: boxes of the shard and of its tensor, none where the shard is the tensor.

    Raises:
        Unsupported: a part of a shard that lies beside another one in its rows.
    """
    width = max((len(shape) for shape in shapes), default=0)
    shape = pad_shapes(shapes, width, 1)
    row, offsets, sizes, start = flat_boxes_columns(slices.start, slices.stop, shape[slices.parameter])
    parameter = slices.parameter[row]
    position = slices.position[row] + start - slices.start[row]
    if not any(shards):
        return Pieces(parameter, offsets, sizes, position)
    pairs = [own or (None,) for own in shards]
    first = np.concatenate([[0], np.cumsum([len(own) for own in pairs])]).astype(np.int64)
    flat = [(number, pair) for number, own in enumerate(pairs) for pair in own]
    local = pad_shapes([pair.local.offsets if pair else (0,) * len(shapes[n]) for n, pair in flat], width, 0)
    whole = pad_shapes([pair.whole.offsets if pair else (0,) * len(shapes[n]) for n, pair in flat], width, 0)
    extent = pad_shapes([pair.whole.sizes if pair else shapes[n] for n, pair in flat], width, 1)

    counts = first[parameter + 1] - first[parameter]
    box = np.repeat(np.arange(len(row)), counts)
    pair_row = first[parameter[box]] + np.arange(len(box)) - np.repeat(np.cumsum(counts) - counts, counts)
    low = np.maximum(offsets[box], local[pair_row])
    high = np.minimum(offsets[box] + sizes[box], local[pair_row] + extent[pair_row])
    kept = np.flatnonzero((low < high).all(axis=1))
    box, pair_row, low, high = box[kept], pair_row[kept], low[kept], high[kept]
    # A part is one run when it has all of the box behind the first dimension that is longer than 1.
    own, of = high - low, sizes[box]
    is_cut = own != of
    inner = np.cumsum(own > 1, axis=1) - (own > 1) > 0  # behind the first dimension longer than 1
    if (is_cut & inner).any():
        number = int(parameter[box[np.flatnonzero((is_cut & inner).any(axis=1))[0]]])
        raise Unsupported(
            f"a shard of shape {list(shapes[number])} has parts beside each other in its rows",
            hint="write --to deepspeed-universal, which a run cuts for itself",
        )
    return Pieces(
        parameter[box],
        low - local[pair_row] + whole[pair_row],
        own,
        position[box] + ((low - offsets[box]) * contiguous_strides_columns(of)).sum(axis=1),
    )
