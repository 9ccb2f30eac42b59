"""The writer of torch-checkpointing: tensors in safetensors files with their placement, the rest in torch files.

The library reshards safetensors sources always, so that jobs of any size load them, and no DTensor need be pickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ckpt_tool.errors import LayoutError, Unsupported
from ckpt_tool.formats._element_types import check_types
from ckpt_tool.formats._items import item_of, rank_of
from ckpt_tool.formats._pickle.dump import dump_pickle
from ckpt_tool.formats._pickle.same import same_value
from ckpt_tool.formats._safetensors.header import build_header, has_type
from ckpt_tool.formats._torch_file.nested import nest
from ckpt_tool.formats._torch_file.objects import check_objects
from ckpt_tool.formats._torch_file.written import WrittenFile, blob_entry, check_dtypes, fresh_tensor
from ckpt_tool.formats._torch_file.written_files import WrittenFiles
from ckpt_tool.formats.base import LayOut, Segment, WriteRequest
from ckpt_tool.formats.torch_checkpointing.files import VALUES
from ckpt_tool.formats.torch_checkpointing.grids import Grid, grid_of, group_record
from ckpt_tool.formats.torch_checkpointing.metadata import METADATA_NAME
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.model import Blob, FileEntry, KeyPath
from ckpt_tool.manifest.sections import section_of
from ckpt_tool.records import dataclass, field
from ckpt_tool.sizes import counted, shell_word

__all__ = ["WRITER", "TorchCheckpointingWriter"]

Values = list[tuple[KeyPath, Any]]


class TorchCheckpointingWriter:
    """Lays out ``<item>_<rank>.safetensors`` with ``metadata.pkl``, and ``<item>_<rank>.pt`` of every rank."""

    name = "torch-checkpointing"
    per_rank = False

    def lay_out(self, request: WriteRequest) -> LayOut:
        """All files; ``metadata.pkl`` is written last.

        Objects, and tensors of a single rank (``name@rank3``), go into torch files, which jobs look up by their own
        rank: objects of no rank are in all of them.

        Raises:
            Unsupported: dtypes that safetensors or torch lack, objects that cannot be pickled, names that collide.
            LayoutError: a tensor is cut in a way that no placement describes, or has no box.
        """
        check_objects(request.blobs)
        plan = _Plan(request)
        stored = [number for held in plan.resharded.values() for number, _ in held]
        if not all(has_type(request.tensors.dtypes[number], request.tensors.shape_of(number)) for number in stored):
            check_types(request.tensors, "safetensors has no such type:", has_type, other="torch-ranks")
        segments = [*_tensor_files(plan)]
        torch_files = WrittenFiles(_value_files(plan))
        segments += torch_files.segments()
        commit_path = None
        if plan.groups:
            commit_path = METADATA_NAME
            data = dump_pickle(_metadata(plan), protocol=4)
            plan.entries.append(FileEntry(METADATA_NAME, len(data)))
            segments.append(Segment(METADATA_NAME, 0, data))
        manifest = request.manifest(self.name, plan.entries, file=plan.file, offset=plan.offset, blobs=request.blobs)
        has_payload = any(storage.rows for file in torch_files.files for storage in file.storages)
        return LayOut(
            manifest,
            tuple(segments),
            commit_path,
            needs_crc32=has_payload,
            seal=torch_files.seal,
        )


@dataclass
class _Plan:
    """The request, sorted into items, and the files and places that boxes get."""

    request: WriteRequest
    entries: list[FileEntry] = field(default_factory=list)
    file: npt.NDArray[np.int64] = field(init=False)
    offset: npt.NDArray[np.int64] = field(init=False)
    rows: list[list[int]] = field(init=False)
    """Rows of the boxes of each tensor."""
    resharded: dict[str, list[tuple[int, KeyPath]]] = field(default_factory=dict)
    """By item: tensors, with their keys."""
    owned: dict[str, list[tuple[int, KeyPath, int]]] = field(default_factory=dict)
    """By item: tensors of single ranks, with their keys and rank."""
    groups: dict[str, dict[str, list[dict[str, Any]]]] = field(default_factory=dict)
    """By item and path: placements."""
    holders: dict[str, set[int]] = field(default_factory=dict)
    """By item: ranks that have a safetensors file."""

    def __post_init__(self) -> None:
        boxes = self.request.boxes
        self.file, self.offset = np.zeros(len(boxes), dtype=np.int64), np.zeros(len(boxes), dtype=np.int64)
        self.rows = [[] for _ in range(len(self.request.tensors))]
        for row, tensor in enumerate(boxes.tensor.tolist()):
            self.rows[tensor].append(row)
        for number, meta in enumerate(self.request.tensors):
            rank, path = rank_of(meta.path or (meta.fqn,))
            item, keys = item_of(meta.section, path)
            if rank is None:
                self.resharded.setdefault(item, []).append((number, keys))
            else:
                self.owned.setdefault(item, []).append((number, keys, rank))

    def values_item(self, item: str) -> str:
        """The item for what cannot be resharded of ``item``."""
        return item + VALUES if item in self.resharded else item


def _tensor_files(plan: _Plan) -> Iterator[Segment]:
    """Headers of all safetensors files, whose boxes are placed on the way."""
    request = plan.request
    for item, held in plan.resharded.items():
        by_rank: dict[int, list[tuple[str, int, int]]] = {}
        groups = plan.groups.setdefault(item, {})
        names: set[str] = set()
        for number, keys in held:
            meta = request.tensors.record(number)
            name = ".".join(map(str, keys))
            if name in names or not name:
                wrong = f"item {item!r} has two tensors called {name!r}" if name else "the tensor is an item by itself"
                raise Unsupported(
                    f"{wrong}, for which torch-checkpointing has no name",
                    where=meta.fqn,
                    hint=f"leave it out with --exclude {shell_word(meta.fqn)}",
                )
            names.add(name)
            grid = _grid(plan, number)
            groups[json.dumps(keys, separators=(",", ":"), ensure_ascii=False)] = [
                group_record(grid, meta.dtype, meta.shape)
            ]
            rows = [row for row in plan.rows[number] if meta.numel] or [-1]
            for row in rows:
                rank = grid.ranks[0] if row < 0 else int(request.boxes.rank[row])
                by_rank.setdefault(rank, []).append((name, number, row))
        plan.holders[item] = set(by_rank)
        for rank, stored in sorted(by_rank.items()):
            yield _safetensors_file(plan, f"{item}_{rank}.safetensors", stored)


def _safetensors_file(plan: _Plan, path: str, stored: Sequence[tuple[str, int, int]]) -> Segment:
    """The header of one file; wide elements come first, so that every tensor is aligned."""
    tensors, boxes = plan.request.tensors, plan.request.boxes
    ordered = sorted(stored, key=lambda one: -tensors.dtypes[one[1]].bits)
    described = [
        (
            name,
            tensors.dtypes[number],
            tensors.shape_of(number) if row < 0 else boxes.sizes[row, : tensors.ndim[number]].tolist(),
        )
        for name, number, row in ordered
    ]
    data, header = build_header(described, {"format": "pt"})
    for (_, number, row), entry in zip(ordered, header.entries, strict=True):
        for placed in plan.rows[number] if row < 0 else [row]:
            plan.file[placed], plan.offset[placed] = len(plan.entries), header.data_start + entry.start
    plan.entries.append(FileEntry(path, header.data_start + header.payload_nbytes))
    return Segment(path, 0, data)


def _grid(plan: _Plan, number: int) -> Grid:
    """The placement of one tensor; an empty one is whole on its first rank."""
    request, meta = plan.request, plan.request.tensors.record(number)
    ndim, table = len(meta.shape), request.boxes
    boxes = [
        (Box(tuple(table.offsets[row, :ndim].tolist()), tuple(table.sizes[row, :ndim].tolist())), int(table.rank[row]))
        for row in plan.rows[number]
    ]
    ranks = [rank for _, rank in boxes]
    if ranks and not 0 <= min(ranks) <= max(ranks) < request.world_size:
        raise LayoutError(f"a box is of rank {max(ranks):,}, the target has {request.world_size:,}", where=meta.fqn)
    if not meta.numel:
        return Grid((1,), (ranks[0] if ranks else 0,), ())
    filled = [(box, rank) for box, rank in boxes if box.volume]
    if not filled:
        raise LayoutError("no box of the tensor is to be stored", where=meta.fqn)
    grid = grid_of(meta.shape, filled)
    if grid is None:
        shown = ", ".join(f"{box} on rank {rank}" for box, rank in filled[:4])
        raise LayoutError(
            f"no placement describes these {counted(len(filled), 'box')} of {list(meta.shape)}: {shown}",
            where=meta.fqn,
            hint="choose a mesh that cuts each dimension once, or ckpt export for whole tensors",
        )
    return grid


def _metadata(plan: _Plan) -> dict[str, Any]:
    """``metadata.pkl``: a rank without a file of an item has the default layout, which nobody looks up."""
    world_size = plan.request.world_size
    kind = {"type": "SafetensorsSerialization"}
    return {
        "metadata": {
            item: {
                "nested_path_to_metadata": groups,
                "rank_to_layout_info": {
                    rank: {"file_path": f"{item}_{rank}.safetensors", "serialization_format": kind}
                    if rank in plan.holders[item]
                    else None
                    for rank in range(world_size)
                },
            }
            for item, groups in plan.groups.items()
        },
        "world_size": world_size,
        "version": "2.0",
    }


def _value_files(plan: _Plan) -> list[WrittenFile]:
    """A torch file of each rank for each item that has objects or tensors of single ranks."""
    request = plan.request
    check_dtypes(request.tensors.take([number for held in plan.owned.values() for number, _, _ in held]))
    objects: dict[str, list[tuple[KeyPath, Any, int | None]]] = {}
    for item, keys, value, rank in _objects(request.blobs):
        objects.setdefault(item, []).append((keys, value, rank))
    files = []
    for item in dict.fromkeys([*plan.owned, *objects]):
        for rank in range(request.world_size):
            values: Values = []
            rows: list[int] = []
            nbytes: list[int] = []
            for number, keys, owner in plan.owned.get(item, ()):
                if owner >= request.world_size:
                    fqn = request.tensors.fqns[number]
                    raise LayoutError(f"state of rank {owner:,}, the target has {request.world_size:,}", where=fqn)
                if owner == rank:
                    meta = request.tensors.record(number)
                    values.append((keys, fresh_tensor(len(rows), meta.dtype, meta.shape)))
                    nbytes.append(meta.nbytes)
                    rows.append(_whole_row(plan, number))
            values += [(keys, value) for keys, value, owner in objects.get(item, ()) if owner in (None, rank)]
            if values:
                root = nest(values, int_keyed=_int_keyed(request, item))
                file = WrittenFile.of(f"{plan.values_item(item)}_{rank}.pt", root, nbytes, rows)
                for row, start in file.places():
                    plan.file[row], plan.offset[row] = len(plan.entries), start
                plan.entries.append(FileEntry(file.path, file.zip.nbytes))
                files.append(file)
    return files


def _whole_row(plan: _Plan, number: int) -> int:
    """The row of a tensor's one whole box, -1 for an empty tensor."""
    request, meta = plan.request, plan.request.tensors.record(number)
    if not meta.numel:
        return -1
    rows = plan.rows[number]
    if len(rows) != 1 or request.boxes.sizes[rows[0], : len(meta.shape)].tolist() != list(meta.shape):
        raise LayoutError(f"state of one rank is whole, but this has {counted(len(rows), 'box')}", where=meta.fqn)
    return rows[0]


def _objects(blobs: Sequence[Blob]) -> Iterator[tuple[str, KeyPath, Any, int | None]]:
    """Item, keys, value and rank of each object.

    A rank owns what is named for it (``rng@rank3``), and its copy where copies differ; the rest belongs to every rank.
    """
    copies: dict[str, list[Blob]] = {}
    for blob in blobs:
        copies.setdefault(blob.fqn, []).append(blob)
    for held in copies.values():
        named, path = rank_of(held[0].path or (held[0].fqn,))
        section = section_of(path, held[0].fqn)
        item, keys = item_of("other" if section == "model" and "." not in str(path[0]) else section, path)
        values = [blob_entry(blob)[1] for blob in held]
        if all(same_value(values[0], value) for value in values[1:]):
            yield item, keys, values[0], named
        else:
            yield from ((item, keys, value, blob.rank) for blob, value in zip(held, values, strict=True))


def _int_keyed(request: WriteRequest, item: str) -> list[str]:
    """Dotted names of dicts with numbers for keys, counted from the item's root."""
    names = request.info.get("int_keyed_dicts", ())
    return [name.removeprefix(f"{item}.") if name != item else "" for name in names]


WRITER = TorchCheckpointingWriter()
