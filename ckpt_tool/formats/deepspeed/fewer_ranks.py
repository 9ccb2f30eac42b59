"""The record of how tensor-parallel ranks share tensors, for fewer ranks: each has what several had side by side.

Where a number of ranks shares a tensor evenly, so does each of its divisors: what cannot be cut (a head) lies whole in
the smaller shares. Of more ranks, or of another number, the record of an affine map says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_tool.formats.deepspeed.affine import Pair
from ckpt_tool.formats.deepspeed.sharding import Shape, ints, pieces
from ckpt_tool.geometry.box import Box
from ckpt_tool.geometry.runs import contiguous_strides

__all__ = ["for_ranks"]

_MAP, _PARAMS = "affine_map", "params"


def for_ranks(record: Mapping[str, Any], n_ranks: int) -> Mapping[str, Any]:
    """The record with the affine map of ``n_ranks`` for each parameter of which that follows; others stay.

    Raises:
        FormatError: a map that is none.
        Unsupported: one that is more than copies of boxes.
    """
    affine = record.get(_MAP)
    params = affine.get(_PARAMS) if isinstance(affine, Mapping) else None
    if not isinstance(affine, Mapping) or not isinstance(params, Mapping):
        return record
    found = {
        pattern: _merged(entry, n_ranks) if isinstance(entry, Mapping) else entry for pattern, entry in params.items()
    }
    return {**record, _MAP: {**affine, _PARAMS: found}}


def _merged(entry: Mapping[str, Any], n_ranks: int) -> Mapping[str, Any]:
    """A parameter's map for ``n_ranks``; as it is where it has so many, or where theirs does not follow."""
    shape = ints(entry.get("logical_shape"), "logical_shape")
    ranks = entry.get("ranks")
    by_rank = {int(rank): own for rank, own in ranks.items()} if isinstance(ranks, Mapping) else {}
    if sorted(by_rank) != list(range(len(by_rank))) or len(by_rank) <= n_ranks or len(by_rank) % n_ranks:
        return entry
    shards = [ints(by_rank[rank].get("shard_shape"), "shard_shape") for rank in sorted(by_rank)]
    pairs = [pieces(by_rank[rank], shard, shape) for rank, shard in enumerate(shards)]
    whole = Pair(Box.whole(shape), Box.whole(shape))
    if all(own == [whole] for own in pairs):
        one = {"shard_shape": list(shape), "pieces": [_piece(whole, shape, shape, range(n_ranks))]}
        return {**entry, "ranks": dict.fromkeys(range(n_ranks), one)}
    dim = _dim(shards, pairs, shape)
    if dim is None:
        return entry
    times = len(shards) // n_ranks
    shard = _longer(shards[0], dim, times)
    found = {}
    for rank in range(n_ranks):
        joined = [
            Pair(
                Box(_longer(first.local.offsets, dim, times), _longer(first.local.sizes, dim, times)),
                Box(first.whole.offsets, _longer(first.whole.sizes, dim, times)),
            )
            for first in pairs[rank * times]
        ]
        found[rank] = {"shard_shape": list(shard), "pieces": [_piece(pair, shard, shape, [rank]) for pair in joined]}
    return {**entry, "ranks": found}


def _longer(numbers: Shape, dim: int, times: int) -> Shape:
    return (*numbers[:dim], numbers[dim] * times, *numbers[dim + 1 :])


def _dim(shards: Sequence[Shape], pairs: Sequence[Sequence[Pair]], shape: Shape) -> int | None:
    """The dimension along which all ranks have equal parts, next to one another in the order of ranks; None if not so.

    Parts of a shard lie behind one another along that dimension, and are all of it.
    """
    n_ranks = len(shards)
    dims = [d for d in range(len(shape)) if shards[0][d] * n_ranks == shape[d] and shards[0][d] != shape[d]]
    if len(set(shards)) != 1 or len(shards[0]) != len(shape) or len(dims) != 1:
        return None
    dim, at = dims[0], 0
    bounds = Box.whole(shape)
    for number, first in enumerate(pairs[0]):
        size = first.local.sizes[dim]
        for rank, own in enumerate(pairs):
            if len(own) != len(pairs[0]):
                return None
            offsets = [0] * len(shape)
            offsets[dim] = first.whole.offsets[dim] + rank * size
            sizes = (*bounds.sizes[:dim], size, *bounds.sizes[dim + 1 :])
            local = [0] * len(shape)
            local[dim] = at
            if own[number] != Pair(Box(tuple(local), sizes), Box(tuple(offsets), sizes)):
                return None
        at += size
    return dim if at == shards[0][dim] else None


def _piece(pair: Pair, shard: Shape, shape: Shape, holders: Sequence[int]) -> dict[str, Any]:
    """A pair as the map has it: offset and strides in the whole tensor and in the shard, and who has these elements."""
    return {
        "shape": list(pair.local.sizes),
        "source": _view(pair.whole, shape),
        "dest": _view(pair.local, shard),
        "locations": list(holders),
    }


def _view(box: Box, shape: Shape) -> list[Any]:
    strides = contiguous_strides(shape)
    return [sum(o * s for o, s in zip(box.offsets, strides, strict=True)), list(strides)]
