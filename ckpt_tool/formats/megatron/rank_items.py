"""An iteration that ranks write together from live sharded state dicts, whose wrappers name everything.

Each sharded tensor and object is an item of the rank that has it, and so is each extra object of a rank. All that is
not wrapped is the common state, one object of the lowest rank, as ``dist_checkpointing.save`` of mcore 0.19 makes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_tool.errors import LayoutError
from ckpt_tool.formats._dcp.metadata import METADATA_NAME
from ckpt_tool.formats._dcp.metadata_pickle import WrittenItem
from ckpt_tool.formats._dcp.placed_items import GrowingFiles, place_boxes, written_tensors
from ckpt_tool.formats._dcp.rank_items import items_of_rank
from ckpt_tool.formats._dcp.written_items import object_item
from ckpt_tool.formats.base import BoxTable, Segment
from ckpt_tool.formats.joint import Entry, Joined, PlacedObject, RankLayOut
from ckpt_tool.formats.megatron.common_state import COMMON_OBJECT
from ckpt_tool.formats.megatron.config import CONFIG_NAME
from ckpt_tool.formats.megatron.keys import bucket_key, common_prefix, extra_key, named
from ckpt_tool.formats.megatron.target_metadata import metadata_pickle
from ckpt_tool.manifest.model import Blob, KeyPath
from ckpt_tool.manifest.tables import TensorTable

__all__ = ["CONFIG", "holder_of", "items_of", "join_items"]

CONFIG = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_COMMON_FILE = "__0_1.distcp"
"""Of a common state that no rank has anything for."""


def holder_of(entry: Entry, world_size: int) -> tuple[KeyPath, tuple[Any, ...]] | None:
    """See `PlainEntries.holder`."""
    if entry.is_named:
        return None
    key = extra_key(entry.path, world_size)
    return ((COMMON_OBJECT,), entry.keys) if key is None else ((key,), ())


def items_of(tensors: TensorTable, boxes: BoxTable, rank: int) -> RankLayOut:
    """``__<rank>_0.distcp``.

    Raises:
        Unsupported: dtypes that torch cannot hold.
    """
    return items_of_rank(tensors, boxes, _path(rank))


def join_items(tensors: TensorTable, boxes: BoxTable) -> Joined:
    """``.metadata``, and ``metadata.json`` last.

    Raises:
        LayoutError: nothing in the state is sharded, or two boxes of a tensor begin at the same place.
    """
    if not len(tensors):
        raise LayoutError(
            "no tensor of the state is one of Megatron's ShardedTensors",
            hint='save what sharded_state_dict() gives, or save as "dcp"',
        )
    keys = tensors.fqns
    placed = place_boxes(tensors, boxes, GrowingFiles(), _path)
    written, chunks = written_tensors(tensors, boxes, placed, [(key, (key,)) for key in keys])

    def metadata(objects: Sequence[PlacedObject], files: Mapping[str, int]) -> tuple[Segment, ...]:
        del files
        items = [(each.fqn, WrittenItem(each.where.path, each.where.offset, each.where.length)) for each in objects]
        segments = []
        if COMMON_OBJECT not in {key for key, _ in items}:
            data = object_item(Blob(COMMON_OBJECT, "value", None, [{}], (COMMON_OBJECT,), is_loaded=True), None)
            items.append((COMMON_OBJECT, WrittenItem(_COMMON_FILE, 0, len(data))))
            segments.append(Segment(_COMMON_FILE, 0, data))
        segments.append(Segment(METADATA_NAME, 0, metadata_pickle(written, chunks, items)))
        return (*segments, Segment(CONFIG_NAME, 0, json.dumps(CONFIG).encode()))

    prefix = common_prefix([key for key in keys if bucket_key(key) is None])
    return Joined(tuple(None if bucket_key(key) is not None else named(key, prefix)[0] for key in keys), metadata)


def _path(rank: int) -> str:
    return f"__{rank}_0.distcp"
