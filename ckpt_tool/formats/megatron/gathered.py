"""Gathered state is what ``dp_zero_gather_scatter`` stores: an object per model-parallel rank, with flat buffers in it.

The object is what legacy checkpoints have as ``distrib_optim.pt``. Where each parameter lies follows from the order of
registration and from sizes. Source: mcore 0.8 to 0.19, ``optimizer/distrib_optimizer.py``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ckpt_tool.formats._torch_file.placed import Piece
from ckpt_tool.formats._torch_file.rows import Rows
from ckpt_tool.formats.base import Source
from ckpt_tool.formats.megatron.buckets import BucketEnds, coalesced_starts
from ckpt_tool.formats.megatron.cuts import Local
from ckpt_tool.formats.megatron.facts import Facts
from ckpt_tool.formats.megatron.items import open_item
from ckpt_tool.formats.megatron.keys import state_name
from ckpt_tool.formats.megatron.parallel import view
from ckpt_tool.formats.megatron.rank_state import stored_buffers
from ckpt_tool.formats.megatron.shards import Segment, Shards, segments
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.model import Blob
from ckpt_tool.sizes import counted

__all__ = ["add_gathered", "bucket_ends", "gathered_group"]

_OBJECT = re.compile(
    r"(?:chained_(\d+)\.)?optimizer\.(?:chained_(\d+)\.)?distributed\.dp_group_idx_(\d+)\.param_state/shard_0_1"
)


def gathered_group(fqn: str) -> tuple[bool, int] | None:
    """Whether an object is experts' state, and its group; None for other objects.

    >>> gathered_group("optimizer.distributed.dp_group_idx_3.param_state/shard_0_1")
    (False, 3)
    """
    match = _OBJECT.fullmatch(fqn)
    return None if match is None else (int(match[1] or match[2] or 0) > 0, int(match[3]))


def bucket_ends(facts: Facts, stage: int, chunk: int, *, experts: bool) -> BucketEnds:
    """What the run's arguments say of buckets; the first chunk of the first stage alone can have more than one."""
    n_data_parallel = (facts.data_parallel_size or 1) * (facts.context_parallel_size or 1)
    if experts and facts.parts_experts:
        n_data_parallel = facts.n_expert_data_parallel or n_data_parallel
    is_stated = facts.overlap_grad_reduce is not None
    if not facts.overlap_grad_reduce or (stage, chunk) != (0, 0):
        return BucketEnds(n_data_parallel, None, is_stated)
    return BucketEnds(n_data_parallel, facts.ddp_bucket_size or max(40_000_000, 1_000_000 * n_data_parallel), is_stated)


def add_gathered(rows: Rows, source: Source, shards: Shards, blobs: Sequence[Blob]) -> list[str]:
    """Adds the state in all objects of ``blobs`` that hold it, in the shape of the weights.

    Costs per object what ``items.open_item`` does.

    Returns:
        The evidence, for people.

    Raises:
        LayoutError: a fact is missing, or sizes fit no known order of registration, or several.
        FormatError: an object is damaged.
    """
    orders: set[str] = set()
    for blob in blobs:
        found = gathered_group(blob.fqn)
        if found is None or blob.where is None:
            continue
        experts, group = found
        file = open_item(source, blob.where, blob.fqn)
        n_chunks = shards.facts.vpp
        for chunk, dtype, flat, total in stored_buffers(file.root, n_chunks, f"{blob.where}"):
            ends = bucket_ends(shards.facts, shards.stage_of(group, experts=experts), chunk, experts=experts)
            order, placed = shards.fitting(
                group, chunk, dtype, _Split(shards, total, ends), experts=experts,
                what=f"the {counted(total, 'element')} of group {group}",
            )  # fmt: skip
            orders.add(order)
            tensors = shards.weights.tensors
            for segment in placed[0]:
                shape = tensors.shape_of(tensors.index[segment.key])
                for slot, tensor in flat.items():
                    fqn, path = state_name(slot, segment.key)
                    number = rows.add_tensor(fqn, tensor.dtype, shape, "optimizer", path)
                    piece = Piece(
                        segment.box, Box.whole(segment.box.sizes), view(tensor, segment.start, segment.box.sizes)
                    )
                    place = file.storages[tensor.storage.key]
                    rows.add_piece(number, piece, place, rank=None, big_endian=file.big_endian)
    return (
        [f"optimizer buffers decoded: registration order {' and '.join(sorted(orders))}, sizes fit"] if orders else []
    )


class _Split:
    """Segments of one buffer in one bucket, or None when sizes do not fit."""

    def __init__(self, shards: Shards, total_numel: int, ends: BucketEnds) -> None:
        self._shards = shards
        self._total = total_numel
        self._ends = ends

    def __call__(self, locals_: Sequence[Local]) -> list[list[Segment]] | None:
        """See `Shards.fitting`."""
        numels = [one.numel for one in locals_]
        if sum(numels) > self._total:
            return None
        apart = [number for number, local in enumerate(locals_) if self._shards.is_apart(local)]
        starts = coalesced_starts(numels, self._total, self._ends, apart=apart)
        return None if starts is None else [segments(list(zip(locals_, starts, strict=True)))]
