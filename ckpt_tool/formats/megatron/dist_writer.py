"""The writer of mcore's ``torch_dist`` checkpoints, as 0.19 writes them: any grid loads them, optimizer state included.

The optimizer's state is written in the shape of the weights (``fully_reshardable``), whatever form the source has;
that of a run without the distributed optimizer keeps its own, which any grid loads too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ckpt_tool.formats._dcp.metadata import METADATA_NAME
from ckpt_tool.formats._dcp.metadata_pickle import WrittenItem
from ckpt_tool.formats._dcp.placed_items import (
    GrowingFiles,
    PlacedItems,
    check_dtypes,
    place_boxes,
    sealed,
    written_tensors,
)
from ckpt_tool.formats.base import BoxTable, LayOut, Segment, WriteRequest, WriterOptions
from ckpt_tool.formats.joint import Entry, Joined, PlainEntries, RankLayOut
from ckpt_tool.formats.megatron.common_state import COMMON_FILE, COMMON_OBJECT
from ckpt_tool.formats.megatron.config import CONFIG_NAME
from ckpt_tool.formats.megatron.location import TRACKER
from ckpt_tool.formats.megatron.rank_items import CONFIG, holder_of, items_of, join_items
from ckpt_tool.formats.megatron.target_boxes import target_boxes, weight_key
from ckpt_tool.formats.megatron.target_common import (
    COMMON_STEP,
    is_distributed,
    parts_of_ranks,
    refuse_undecoded,
    target_common,
)
from ckpt_tool.formats.megatron.target_dialect import dialect_of
from ckpt_tool.formats.megatron.target_flattened import as_ranges
from ckpt_tool.formats.megatron.target_grid import TargetGrid
from ckpt_tool.formats.megatron.target_iteration import iteration_of
from ckpt_tool.formats.megatron.target_metadata import metadata_pickle
from ckpt_tool.formats.megatron.target_objects import TargetObject, extra_objects, written_object
from ckpt_tool.formats.megatron.target_random import (
    emitted_states,
    is_rng,
    random_states,
    states_left_out,
)
from ckpt_tool.manifest.model import Blob, FileEntry, FileRange, KeyPath, Manifest
from ckpt_tool.manifest.tables import ChunkTable, FileTable, IntArray, TensorTable
from ckpt_tool.records import dataclass, field

__all__ = ["WRITER", "MegatronDistWriter"]

_OLD_CONFIG = {**CONFIG, "common_backend": "torch", "common_backend_version": 1}


class MegatronDistWriter(PlainEntries):
    """Lays out a run's folder: ``latest_checkpointed_iteration.txt`` and one iteration."""

    name = "megatron-dist"
    per_rank = False
    commit_path = CONFIG_NAME

    def left_out(
        self,
        source: Manifest,
        blobs: Sequence[Blob],
        mesh: Mapping[str, int],
        rank_state: Literal["keep", "drop", "emit"] | None,
    ) -> Mapping[str, str]:
        """What belongs to the source's grid alone.

        Random states are kept when the target has as many stages and tensor-parallel ranks, unless they are to be
        dropped.

        Raises:
            LayoutError: the optimizer's state could not be decoded.
            UsageError: random states are to be kept, and the grid is another.
        """
        grid = TargetGrid.of(mesh)
        named = [(meta.fqn, meta.path) for meta in source.tensors]
        why = dict(parts_of_ranks(named, blobs, has_one_optimizer=not grid.parts_experts(source.info.get("args", {}))))
        strange = [fqn for fqn, path in named if fqn not in why and path[:1] != ("model",) and _is_bucket(fqn, path)]
        refuse_undecoded(source, strange, blobs)
        unneeded = "a random state of another expert-parallel rank than the first; Megatron keeps one"
        return why | states_left_out(source, blobs, grid, rank_state, expert_ranks=[0], why_unneeded=unneeded)

    def place(
        self,
        tensors: TensorTable,
        blobs: Sequence[Blob],
        mesh: Mapping[str, int],
        info: Mapping[str, Any],
        options: WriterOptions,
    ) -> BoxTable:
        """Boxes by layer and expert, and by tensor-parallel rank where a rule knows the weight."""
        del blobs
        # Where mcore 0.12 loads both halves out of one flattened range, it trips over itself (torch.py, line 239).
        halves_apart = dialect_of(options.mcore_version).is_flattened
        grid = TargetGrid.of(mesh).with_options(options)
        return target_boxes(tensors, grid, info.get("args", {}), halves_apart=halves_apart)

    def lay_out(self, request: WriteRequest) -> LayOut:
        """The folder; the tracker is written last.

        Raises:
            Unsupported: the source is not Megatron's, or torch cannot hold a dtype or object of it.
        """
        check_dtypes(request.tensors)
        grid = TargetGrid.of_request(request)
        iteration, folder = iteration_of(request.info)
        paths: Sequence[KeyPath] = request.tensors.paths or [(fqn,) for fqn in request.tensors.fqns]
        objects = list(extra_objects(request))
        own_states = list(random_states(request, grid))
        is_fresh = request.options.fresh_random_states
        has_rng = is_fresh or bool(own_states)
        common = target_common(request, grid, has_rng=has_rng, iteration=iteration or 0)
        if is_fresh:
            own_states = [(one, ()) for one in emitted_states(common.root["args"], grid)]
        files = _Files(folder)
        for one, rows in (*objects, *own_states):
            files.add(one, rows)
        if dialect_of(request.options.mcore_version).has_common_file:
            files.add(written_object("", common.root, request.tensors, common.rows), common.rows, COMMON_FILE)
        else:
            files.add(written_object(COMMON_OBJECT, [common.root], request.tensors, common.rows), common.rows)
        layout = _laid_out(self.name, request, files, paths, common.notes)
        text = "release" if folder == "release" else str(iteration)
        entries = FileTable((*layout.manifest.files, FileEntry(TRACKER, len(text))))
        return LayOut(
            layout.manifest.replace(files=entries),
            (*layout.segments, Segment(TRACKER, 0, text.encode())),
            TRACKER,
            needs_crc32=True,
            seal=layout.seal,
        )

    def holder(self, entry: Entry, rank: int, world_size: int) -> tuple[KeyPath, tuple[Any, ...]] | None:
        """What Megatron's wrappers name stands by itself, and so do ranks' extra objects; the rest is common state."""
        del rank
        return holder_of(entry, world_size)

    def as_object(self, value: Any) -> Any:
        """Objects lie in lists of one."""
        return [value]

    def lay_out_rank(self, tensors: TensorTable, boxes: BoxTable, rank: int, world_size: int) -> RankLayOut:
        """The items of one rank, in the folder of the iteration itself.

        Raises:
            Unsupported: dtypes that torch cannot hold.
        """
        del world_size
        return items_of(tensors, boxes, rank)

    def join(self, tensors: TensorTable, boxes: BoxTable, world_size: int) -> Joined:
        """``.metadata`` and ``metadata.json``.

        Raises:
            LayoutError: nothing in the state is sharded, or two boxes of a tensor begin at the same place.
        """
        del world_size
        return join_items(tensors, boxes)


WRITER = MegatronDistWriter()


@dataclass
class _Files:
    """Files of the iteration while they grow, with the objects that are in them."""

    folder: str
    growing: GrowingFiles = field(default_factory=GrowingFiles)
    objects: list[tuple[str, WrittenItem]] = field(default_factory=list)
    embedded: list[tuple[WrittenItem, TargetObject]] = field(default_factory=list)
    places: dict[int, tuple[str, int]] = field(default_factory=dict)
    """File and byte of the payload of each tensor that is inside of an object."""

    def path(self, rank: int) -> str:
        """A rank's file, in the iteration's folder."""
        return f"__{rank}_0.distcp"

    def add(self, one: TargetObject, rows: Sequence[int], path: str = "") -> None:
        """An object, at the end of the first rank's file, or a file of its own, which is no item."""
        if one.file is None:
            self.objects.append((one.key, self.growing.append(self.path(0), one.data)))
            return
        nbytes = one.file.zip.nbytes
        held_in = path or self.path(0)
        item = WrittenItem(held_in, self.growing.extend(held_in, nbytes), nbytes)
        if not path:
            self.objects.append((one.key, item))
        self.embedded.append((item, one))
        parts = [*one.file.heads(), *one.file.tail_without_checksums()]
        self.growing.segments += [Segment(item.path, item.offset + part.offset, part.data) for part in parts]
        for row, offset in zip(rows, one.file.payload_offsets, strict=True):
            self.places[row] = (item.path, item.offset + offset)


def _laid_out(
    name: str, request: WriteRequest, files: _Files, paths: Sequence[KeyPath], notes: Sequence[str]
) -> LayOut:
    """All but the tracker."""
    tensors, boxes, growing = request.tensors, request.boxes, files.growing
    dialect = dialect_of(request.options.mcore_version)
    is_inside = np.isin(boxes.tensor, np.array(list(files.places), dtype=np.int64))
    apart = np.flatnonzero(~is_inside)
    own = BoxTable(boxes.tensor[apart], boxes.offsets[apart], boxes.sizes[apart], boxes.rank[apart])
    shapes: Mapping[int, Sequence[int]] = {}
    stored = tensors
    if dialect.is_flattened and is_distributed(request.info):
        stored, own, shapes = as_ranges(tensors, own, paths)
    placed = place_boxes(stored, own, growing, files.path, files.places)
    slot = dialect.master_slot if is_distributed(request.info) else "fp32_param"
    chained = dialect.has_chained_keys and _parts_experts(request, paths)
    names = [(_stored_key(fqn, path, slot, chained), path) for fqn, path in zip(tensors.fqns, paths, strict=True)]
    written, chunks = written_tensors(stored, own, placed, names, files.places)
    flattened = {names[row][0]: shape for row, shape in shapes.items()}
    config = _OLD_CONFIG if dialect.has_common_file else CONFIG
    known = {
        METADATA_NAME: metadata_pickle(written, chunks, files.objects, flattened if dialect.is_flattened else None),
        CONFIG_NAME: json.dumps(config).encode(),
    }
    for file_name, data in known.items():
        growing.append(file_name, data)
    manifest = Manifest(
        name,
        "",
        tensors,
        _chunks(request, files, placed, apart, is_inside),
        FileTable(tuple(FileEntry(f"{files.folder}/{path}", nbytes) for path, nbytes in growing.nbytes.items())),
        blobs=tuple(
            Blob(key, "torch_save", FileRange(f"{files.folder}/{item.path}", item.offset, item.length), path=(key,))
            for key, item in files.objects
        ),
        info=dict(request.info),
        notes=tuple(notes),
    )

    def ends(crc32s: npt.NDArray[np.uint32]) -> Iterator[Segment]:
        yield from sealed(placed, crc32s[apart])
        by_tensor = dict(zip(boxes.tensor[is_inside].tolist(), crc32s[is_inside].tolist(), strict=True))
        of_rows = [by_tensor.get(row, 0) for row in range(len(tensors))]
        for item, one in files.embedded:
            for part in one.file.tail(of_rows) if one.file is not None else ():
                yield Segment(item.path, item.offset + part.offset, part.data)

    return LayOut(
        manifest,
        tuple(_below(files.folder, chain(growing.segments, placed.segments()))),
        None,
        needs_crc32=True,
        seal=lambda crc32s: _below(files.folder, ends(crc32s)),
    )


def _below(folder: str, segments: Iterable[Segment]) -> Iterator[Segment]:
    """Segments of the iteration's files, as the target has them."""
    return (Segment(f"{folder}/{part.path}", part.offset, part.data) for part in segments)


def _chunks(
    request: WriteRequest, files: _Files, placed: PlacedItems, apart: IntArray, is_inside: npt.NDArray[np.bool_]
) -> ChunkTable:
    """One chunk for each box of the request."""
    boxes = request.boxes
    number = {path: row for row, path in enumerate(files.growing.nbytes)}
    file, offset, length = (np.zeros(len(boxes), dtype=np.int64) for _ in range(3))
    file[apart] = np.array([number[path] for path in placed.paths], dtype=np.int64)[placed.file]
    offset[apart] = placed.item_offset + placed.head_nbytes
    length[apart] = placed.payload_nbytes
    for row in np.flatnonzero(is_inside).tolist():
        tensor = int(boxes.tensor[row])
        path, offset[row] = files.places[tensor]
        file[row], length[row] = number[path], request.tensors.nbytes[tensor]
    return ChunkTable.from_columns(
        tensor=boxes.tensor, offsets=boxes.offsets, sizes=boxes.sizes, file=file, offset=offset, length=length,
        rank=boxes.rank,
    )  # fmt: skip


def _parts_experts(request: WriteRequest, paths: Sequence[KeyPath]) -> bool:
    """Whether experts have an optimizer of their own."""
    has_experts = any(".mlp.experts." in str(path[-1]) for path in paths)
    return has_experts and TargetGrid.of_request(request).parts_experts(request.info.get("args", {}))


def _stored_key(fqn: str, path: KeyPath, master_slot: str, is_chained: bool) -> str:  # noqa: FBT001
    """What Megatron calls a tensor."""
    key = weight_key(path)
    if key is None:
        return fqn
    if path[0] == "model":
        return key
    chain = f"chained_{int('.mlp.experts.' in key)}." if is_chained else ""
    return f"{chain}optimizer.state.{master_slot if path[2] == 'param' else path[2]}.{key}"


def _is_bucket(fqn: str, path: KeyPath) -> bool:
    """Whether a tensor is optimizer state in another shape than the weights'."""
    return weight_key(path) is None and not is_rng(fqn, path) and "optimizer" in fqn and path[-1] != COMMON_STEP
