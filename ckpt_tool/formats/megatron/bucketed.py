"""Bucketed state is what ``dp_reshardable`` stores: each bucket's unpadded elements as one flat tensor per slot.

Every parameter's part of a bucket is stored apart from its neighbours' and from the gaps between, so the stored
boundaries prove or refute an order of registration. Source: mcore 0.15 to 0.19, ``optimizer/distrib_optimizer.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ckpt_tool.errors import LayoutError
from ckpt_tool.formats.megatron.buckets import starts_in_buckets
from ckpt_tool.formats.megatron.cuts import Local, Weights
from ckpt_tool.formats.megatron.keys import BucketKey, state_name
from ckpt_tool.formats.megatron.ranges import Ranges, Rewriting
from ckpt_tool.formats.megatron.shards import Segment, Shards, segments
from ckpt_tool.manifest.model import TensorMeta
from ckpt_tool.manifest.tables import ChunkTable
from ckpt_tool.sizes import counted

__all__ = ["add_bucketed"]


def add_bucketed(rewriting: Rewriting, shards: Shards, buckets: Mapping[BucketKey, int], width: int) -> list[str]:
    """Adds the state of all buckets to ``rewriting``, as tensors in the shape of the weights.

    Args:
        rewriting: takes tensors and chunks.
        shards: who holds what.
        buckets: row of each bucket's tensor in ``shards.weights.tensors``.
        width: number of dimensions of the widest tensor.

    Returns:
        The evidence, for people.

    Raises:
        LayoutError: a fact is missing, or no known order of registration fits the stored sizes.
    """
    by_buffer: dict[tuple[int | None, int, str], dict[int, dict[int, dict[str, int]]]] = {}
    for key, row in buckets.items():
        of_group = by_buffer.setdefault((key.chained, key.group, key.dtype), {})
        of_group.setdefault(key.gbuf, {}).setdefault(key.bucket, {})[key.slot] = row
    rows: dict[tuple[str, str], int] = {}
    orders: set[str] = set()
    for (chained, group, dtype), gbufs in sorted(by_buffer.items(), key=repr):
        if len(gbufs) != shards.facts.vpp:
            raise LayoutError(
                f"group {group} has {counted(len(gbufs), 'buffer')} of {dtype}, expected one per model chunk"
            )
        for chunk, gbuf in enumerate(sorted(gbufs)):
            order, of_bucket = _fitted(shards, group, chunk, dtype, gbufs[gbuf], experts=bool(chained))
            orders.add(order)
            for bucket, found in enumerate(of_bucket):
                for slot, row in gbufs[gbuf][bucket].items():
                    _add(rewriting, shards.weights, rows, slot, found, row, width)
    return [f"optimizer buckets decoded: registration order {' and '.join(sorted(orders))}, every boundary fits"]


def _fitted(
    shards: Shards, group: int, chunk: int, dtype: str, buckets: Mapping[int, Mapping[str, int]], *, experts: bool
) -> tuple[str, Sequence[Sequence[Segment]]]:
    """The order of registration that fits, with the segments of each bucket.

    Raises:
        LayoutError: none fits, or several that mean different places do.
    """
    tensors, chunks = shards.weights.tensors, shards.weights.chunks
    numels = [int(tensors.shape[next(iter(buckets[number].values())), 0]) for number in sorted(buckets)]

    def split(locals_: Sequence[Local]) -> list[list[Segment]] | None:
        placed = starts_in_buckets([one.numel for one in locals_], numels)
        by_bucket: list[list[tuple[Local, int]]] = [[] for _ in numels]
        for local, (number, start) in zip(locals_, placed or (), strict=placed is not None):
            by_bucket[number].append((local, start))
        stored = [
            (held, row) for held, n in zip(by_bucket, sorted(buckets), strict=True) for row in buckets[n].values()
        ]
        if placed is None or not all(_boundaries_fit(held, chunks, row) for held, row in stored):
            return None
        return [segments(held) for held in by_bucket]

    sizes = ", ".join(f"{numel:,}" for numel in numels[:6])
    what = f"the buckets of group {group} ({sizes} elements)"
    return shards.fitting(group, chunk, dtype, split, experts=experts, what=what)


def _boundaries_fit(held: Sequence[tuple[Local, int]], chunks: ChunkTable, bucket: int) -> bool:
    """Whether a stored piece begins, and one ends, where each parameter does: pieces then hold one parameter each."""
    pieces = chunks.rows_of(bucket)
    begins = chunks.offsets[pieces, 0]
    ends = begins + chunks.sizes[pieces, 0]
    starts = [start for _, start in held]
    stops = [start + local.numel for local, start in held]
    return set(starts) <= set(begins.tolist()) and set(stops) <= set(ends.tolist())


def _add(
    rewriting: Rewriting,
    weights: Weights,
    rows: dict[tuple[str, str], int],
    slot: str,
    found: Sequence[Segment],
    bucket: int,
    width: int,
) -> None:
    """The pieces of one slot of one bucket."""
    tensors, chunks = weights.tensors, weights.chunks
    for segment in found:
        if (slot, segment.key) not in rows:
            name, path = state_name(slot, segment.key)
            shape = tensors.shape_of(tensors.index[segment.key])
            rows[slot, segment.key] = rewriting.add_tensor(
                TensorMeta(name, tensors.dtypes[bucket], shape, "optimizer", path)
            )
    starts = np.array([segment.start for segment in found], dtype=np.int64)
    stops = np.array([segment.stop for segment in found], dtype=np.int64)
    pieces = chunks.rows_of(bucket)
    begin = chunks.offsets[pieces, 0]
    end = begin + chunks.sizes[pieces, 0]
    first = np.searchsorted(stops, begin, side="right")
    last = np.searchsorted(starts, end, side="left")
    covered = np.maximum(last - first, 0)
    piece = np.repeat(np.arange(len(pieces)), covered)
    which = np.arange(len(piece)) - np.repeat(np.cumsum(covered) - covered, covered) + np.repeat(first, covered)
    ndim = [len(segment.box.sizes) for segment in found]
    sizes = np.ones((len(found), width), dtype=np.int64)
    shift = np.zeros((len(found), width), dtype=np.int64)
    for number, segment in enumerate(found):
        sizes[number, : ndim[number]], shift[number, : ndim[number]] = segment.box.sizes, segment.box.offsets
    rewriting.cut(
        Ranges(
            chunk=pieces[piece],
            tensor=np.array([rows[slot, segment.key] for segment in found], dtype=np.int64)[which],
            start=np.maximum(begin[piece], starts[which]) - starts[which],
            stop=np.minimum(end[piece], stops[which]) - starts[which],
            shape=sizes[which],
            shift=shift[which],
        )
    )
