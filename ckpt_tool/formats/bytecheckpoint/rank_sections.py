"""Sections that ranks write together: each its own files of raw tensors, then one of them the metadata of all.

Objects of the model and the optimizer are items behind the tensors of the rank that has them, parameter groups one
object. Whatever is neither the model's nor the optimizer's, small tensors included, is one object of each rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ckpt_tool.errors import LayoutError, Unsupported
from ckpt_tool.formats._dcp.metadata import METADATA_NAME
from ckpt_tool.formats._dcp.metadata_pickle import WrittenItem
from ckpt_tool.formats._dcp.placed_items import PlacedItems, written_tensors
from ckpt_tool.formats._torch_file.written import check_dtypes
from ckpt_tool.formats.base import BoxTable, Segment
from ckpt_tool.formats.bytecheckpoint.keys import Key, key_of, rank_of
from ckpt_tool.formats.bytecheckpoint.location import SECTIONS
from ckpt_tool.formats.bytecheckpoint.metadata_pickle import metadata_pickle
from ckpt_tool.formats.joint import Entry, Joined, PlacedObject, RankLayOut
from ckpt_tool.manifest.model import KeyPath
from ckpt_tool.manifest.sections import section_of
from ckpt_tool.manifest.tables import IntArray, TensorTable
from ckpt_tool.records import dataclass

__all__ = ["holder_of", "join_sections", "sections_of_rank"]

_EXTRA, _GROUPS = "extra_state", "param_groups"


def holder_of(entry: Entry, rank: int) -> tuple[KeyPath, tuple[Any, ...]] | None:
    """See `PlainEntries.holder`."""
    key = _key(entry.path)
    if key.section == _EXTRA:
        keys = entry.keys[len(entry.keys) - len(key.path) :]
        return (_EXTRA, f"extra_state_rank_{rank}"), (*keys[:-1], _bare(keys[-1]))
    if entry.is_tensor or key.path[0] != _GROUPS or len(key.path) == 1:
        return None
    at = len(entry.path) - len(key.path) + 1
    return entry.path[:at], entry.keys[at:]


def sections_of_rank(tensors: TensorTable, boxes: BoxTable, rank: int) -> RankLayOut:
    """``<section>/__<rank>_0.distcp`` of each section that the rank has tensors of, and its file of extra state.

    Raises:
        Unsupported: dtypes that torch cannot hold.
    """
    check_dtypes(tensors)
    section = _sections(tensors)[boxes.tensor]
    nbytes = np.bincount(section, weights=_nbytes(tensors, boxes), minlength=len(SECTIONS)).astype(np.int64)
    held = sorted({0, *_sections(tensors).tolist()})
    return RankLayOut(
        files={_path(SECTIONS[number], rank): int(nbytes[number]) for number in held},
        paths=tuple(_path(SECTIONS[number], rank) for number in section.tolist()),
        order=np.argsort(section, kind="stable"),
        heads=(b"",) * len(boxes),
        rear=lambda row, crc32: b"",  # noqa: ARG005
        object_path=lambda path: _object_path(path, rank),
    )


def join_sections(tensors: TensorTable, boxes: BoxTable) -> Joined:
    """A ``.metadata`` for each section, that of the model last.

    Raises:
        LayoutError: two boxes of a tensor begin at the same place, or two entries have one key.
    """
    keys = [_key(path) for path in tensors.paths or [(fqn,) for fqn in tensors.fqns]]
    parts = [_part(tensors, boxes, keys, number) for number in range(len(SECTIONS))]

    def metadata(objects: Sequence[PlacedObject], files: Mapping[str, int]) -> tuple[Segment, ...]:
        del files
        items: dict[str, list[tuple[str, KeyPath, WrittenItem]]] = {name: [] for name in SECTIONS}
        for each in objects:
            key = _key(each.path)
            if key.section != _EXTRA:
                below = each.where.path.removeprefix(f"{key.section}/")
                items[key.section].append(
                    (key.name, key.path, WrittenItem(below, each.where.offset, each.where.length))
                )
        segments = []
        for part in reversed(parts):
            own = items[part.name]
            if part.written or own or part.name == SECTIONS[0]:
                _check_names(part.name, [*(one.fqn for one in part.written), *(name for name, _, _ in own)])
                data = metadata_pickle(part.written, part.chunks, own)
                segments.append(Segment(f"{part.name}/{METADATA_NAME}", 0, data))
        return tuple(segments)

    return Joined(tuple(f"{key.section}.{key.name}" for key in keys), metadata)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """The tensors of a section, as its metadata lists them."""

    name: str
    written: Any
    chunks: Any


def _part(tensors: TensorTable, boxes: BoxTable, keys: Sequence[Key], number: int) -> _Part:
    """Boxes lie one behind another in the file of their rank, as `sections_of_rank` has them."""
    mine = np.flatnonzero(_sections(tensors) == number)
    rows = np.flatnonzero(np.isin(boxes.tensor, mine))
    own = tensors.take(mine)
    width = own.shape.shape[1]
    held = BoxTable(
        np.searchsorted(mine, boxes.tensor[rows]).astype(np.int32), boxes.offsets[rows, :width],
        boxes.sizes[rows, :width], boxes.rank[rows],
    )  # fmt: skip
    nbytes = _nbytes(own, held)
    ranks, file = np.unique(held.rank, return_inverse=True)
    before = np.cumsum(nbytes) - nbytes
    first = np.searchsorted(file, np.arange(len(ranks)))  # boxes are in order of ranks
    placed = PlacedItems(
        tensors=own, boxes=held, paths=tuple(f"__{rank}_0.distcp" for rank in ranks.tolist()),
        file=file.astype(np.int32),
        item_offset=before - before[first][file] if len(file) else before, item_nbytes=nbytes,
        head_nbytes=np.zeros_like(nbytes), payload_nbytes=nbytes, extra={},
    )  # fmt: skip
    names = [(keys[row].name, keys[row].path) for row in mine.tolist()]
    written, chunks = written_tensors(own, held, placed, names)
    return _Part(SECTIONS[number], written, chunks)


def _key(path: KeyPath) -> Key:
    _, bare = rank_of(path)
    return key_of(section_of(bare, ".".join(map(str, bare))), bare)


def _bare(key: Any) -> Any:
    return rank_of((key,))[1][0] if isinstance(key, str) else key


def _sections(tensors: TensorTable) -> IntArray:
    """int64[n]: number of each tensor's section.

    Raises:
        Unsupported: a tensor belongs to neither.
    """
    found = []
    for path in tensors.paths or [(fqn,) for fqn in tensors.fqns]:
        section = _key(path).section
        if section == _EXTRA:
            raise Unsupported("extra state is an object of a rank, not a tensor", where=".".join(map(str, path)))
        found.append(SECTIONS.index(section))
    return np.array(found, dtype=np.int64)


def _nbytes(tensors: TensorTable, boxes: BoxTable) -> IntArray:
    volume: IntArray = np.prod(boxes.sizes, axis=1, dtype=np.int64)
    return volume * tensors.bits[boxes.tensor] // 8


def _path(section: str, rank: int) -> str:
    return f"{section}/__{rank}_0.distcp"


def _object_path(path: KeyPath, rank: int) -> str:
    key = _key(path)
    return f"{_EXTRA}/{key.path[-1]}.pt" if key.section == _EXTRA else _path(key.section, rank)


def _check_names(section: str, names: Sequence[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise LayoutError("two entries of the state have this key in the section", where=f"{section}: {name}")
        seen.add(name)
