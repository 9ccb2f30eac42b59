"""A flattened tensor is optimizer state that was cut along its flat elements: mcore up to 0.15, ``flattened_range``.

A tensor whose shards (by tensor and pipeline parallelism) have the shape ``g`` is stored with the shape ``G/g`` and one
dimension more, ``prod(g)``, along which data-parallel ranks cut it; the shape before that stands in ``mcore_data``.
Source: mcore 0.12 ``dist_checkpointing/strategies/torch.py``, ``mcore_to_pyt_state_dict``.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from ckpt_tool.errors import FormatError
from ckpt_tool.formats._pickle.nodes import Stub
from ckpt_tool.formats.megatron.ranges import Ranges
from ckpt_tool.manifest.tables import ChunkTable, IntArray

__all__ = ["flat_ranges", "shape_before", "shapes_before"]

_SHAPE = "nd_reformulated_orig_global_shape"


def shapes_before(mcore_data: object) -> dict[str, tuple[int, ...]]:
    """Shapes before flattening, by key, of the ``mcore_data`` that ``.metadata`` has besides torch's own fields."""
    entries: Any = mcore_data.state if isinstance(mcore_data, Stub) else mcore_data
    found: dict[str, tuple[int, ...]] = {}
    for key, value in entries.items() if isinstance(entries, Mapping) else ():
        fields = value.state if isinstance(value, Stub) else value
        shape = fields.get(_SHAPE) if isinstance(fields, Mapping) else None
        if isinstance(key, str) and isinstance(shape, (tuple, list)) and all(type(n) is int and n >= 0 for n in shape):
            found[key] = tuple(shape)
    return found


def shape_before(stored: tuple[int, ...], weight: tuple[int, ...]) -> tuple[int, ...] | None:
    """The weight's shape, when ``stored`` is a flattened form of it; None when it is not.

    >>> shape_before((4, 1, 2, 768), (4, 32, 48)), shape_before((4, 32, 48), (4, 32, 48))
    ((4, 32, 48), None)
    """
    if len(stored) != len(weight) + 1 or any(n == 0 or size % n for n, size in zip(stored, weight, strict=False)):
        return None
    local = [size // n for n, size in zip(stored, weight, strict=False)]
    return weight if prod(local) == stored[-1] else None


def flat_ranges(
    fqn: str, tensor: int, shape: tuple[int, ...], stored: tuple[int, ...], chunks: ChunkTable, rows: IntArray
) -> Ranges:
    """The chunks ``rows`` of a flattened tensor as ranges of ``shape``.

    Raises:
        FormatError: the stored shape is no flattened form of ``shape``, or a chunk spans several shards.
    """
    if shape_before(stored, shape) is None:
        raise FormatError(f"stored as {list(stored)}, which is no flattened form of {list(shape)}", where=fqn)
    ndim = len(shape)
    offsets, sizes = chunks.offsets[rows, : ndim + 1], chunks.sizes[rows, : ndim + 1]
    if bool((sizes[:, :ndim] != 1).any()):
        raise FormatError("a chunk of a flattened tensor spans several shards, expected one each", where=fqn)
    local = np.array([size // n for n, size in zip(stored, shape, strict=False)], dtype=np.int64)
    return Ranges(
        chunk=rows,
        tensor=np.full(len(rows), tensor, dtype=np.int64),
        start=offsets[:, ndim],
        stop=offsets[:, ndim] + sizes[:, ndim],
        shape=np.tile(local, (len(rows), 1)),
        shift=offsets[:, :ndim] * local,
    )
