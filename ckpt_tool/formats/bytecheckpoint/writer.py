"""The writer of ByteCheckpoint: raw tensor bytes by rank, a metadata pickle per section, extra state of each rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ckpt_tool.errors import LayoutError, Unsupported
from ckpt_tool.formats._dcp.metadata import METADATA_NAME
from ckpt_tool.formats._dcp.metadata_pickle import WrittenChunk, WrittenChunks, WrittenItem, WrittenTensor
from ckpt_tool.formats._dcp.written_items import object_item
from ckpt_tool.formats._pickle.same import same_value
from ckpt_tool.formats._torch_file.nested import nest
from ckpt_tool.formats._torch_file.objects import check_objects
from ckpt_tool.formats._torch_file.written import WrittenFile, blob_entry, check_dtypes, fresh_tensor
from ckpt_tool.formats._torch_file.written_files import WrittenFiles
from ckpt_tool.formats.base import BoxTable, LayOut, Segment, WriteRequest
from ckpt_tool.formats.bytecheckpoint.keys import Key, key_of, rank_of, with_names
from ckpt_tool.formats.bytecheckpoint.location import SECTIONS, TRACKER
from ckpt_tool.formats.bytecheckpoint.metadata_pickle import metadata_pickle
from ckpt_tool.formats.bytecheckpoint.rank_sections import holder_of, join_sections, sections_of_rank
from ckpt_tool.formats.bytecheckpoint.wrapper import with_wrapper
from ckpt_tool.formats.joint import Entry, Joined, PlainEntries, RankLayOut
from ckpt_tool.manifest.model import Blob, FileEntry, KeyPath, Manifest
from ckpt_tool.manifest.sections import section_of
from ckpt_tool.manifest.tables import SECTIONS as MANIFEST_SECTIONS
from ckpt_tool.manifest.tables import TensorTable
from ckpt_tool.records import dataclass, field
from ckpt_tool.sizes import counted, shell_word

__all__ = ["WRITER", "ByteCheckpointWriter"]

_NAMED = (
    "the parameter group numbered its parameters, whose state is named: it lists the names instead, in the order of "
    "the state. ByteCheckpoint's FSDP loads by name; its FSDP2 goes by the model's order, which decomposed checkpoints "
    "do not tell: load this one as FSDP"
)


class ByteCheckpointWriter(PlainEntries):
    """Lays out what ``bytecheckpoint.load`` (0.0.2) reads: FSDP, FSDP2 and DDP take what they need from one layout."""

    name = "bytecheckpoint"
    per_rank = False
    commit_path = f"{SECTIONS[0]}/{METADATA_NAME}"

    def restyled(
        self, source: Manifest, blobs: Sequence[Blob], style: Literal["ids", "fqn", "fqn-flat"]
    ) -> tuple[Manifest, tuple[Blob, ...]]:
        """DDP's names with numbers, FSDP's with names."""
        return with_wrapper(source, blobs, is_ddp=style == "ids")

    def lay_out(self, request: WriteRequest) -> LayOut:
        """``global_step_<N>`` with the tracker written last where the step is known, else the step's folder itself.

        Each section has a file for each rank, empty for one that stores nothing. Objects of the optimizer are items of
        rank 0; other objects, and tensors that are neither model nor optimizer, are extra state of their rank, or of
        every rank.

        Raises:
            Unsupported: dtypes or objects that torch cannot hold, or extra state that is cut into boxes.
            LayoutError: a tensor with elements has no box, or two that begin at the same place.
        """
        check_dtypes(request.tensors)
        check_objects(request.blobs)
        step = request.info.get("step")
        prefix = f"global_step_{step}/" if type(step) is int else ""
        plan = _Plan(request, prefix)
        segments = [segment for name in SECTIONS for segment in _section(plan, name)]
        extra = WrittenFiles(_extra_files(plan))
        segments += extra.segments()
        commit_path = next(f"{prefix}{name}/{METADATA_NAME}" for name in SECTIONS if plan.has_metadata(name))
        if prefix:
            commit_path = TRACKER
            plan.entries.append(FileEntry(TRACKER, len(str(step))))
            segments.append(Segment(TRACKER, 0, str(step).encode()))
        manifest = request.manifest(
            self.name, plan.entries, file=plan.file, offset=plan.offset, blobs=request.blobs, notes=plan.notes
        )
        has_payload = any(storage.rows for file in extra.files for storage in file.storages)
        return LayOut(manifest, tuple(segments), commit_path, needs_crc32=has_payload, seal=extra.seal)

    def may_cut(self, tensors: TensorTable) -> npt.NDArray[np.bool_]:
        """Of the model's and the optimizer's, which ``.metadata`` lists; extra state is whole."""
        may: npt.NDArray[np.bool_] = tensors.section != MANIFEST_SECTIONS.index("other")
        return may

    def holder(self, entry: Entry, rank: int, world_size: int) -> tuple[KeyPath, tuple[Any, ...]] | None:
        """Parameter groups are one object, and so is all that is neither the model's nor the optimizer's."""
        del world_size
        return holder_of(entry, rank)

    def lay_out_rank(self, tensors: TensorTable, boxes: BoxTable, rank: int, world_size: int) -> RankLayOut:
        """Raw tensors in a file for each section, objects behind them, and a file of extra state.

        Raises:
            Unsupported: dtypes that torch cannot hold.
        """
        del world_size
        return sections_of_rank(tensors, boxes, rank)

    def join(self, tensors: TensorTable, boxes: BoxTable, world_size: int) -> Joined:
        """The ``.metadata`` of each section.

        Raises:
            LayoutError: two boxes of a tensor begin at the same place, or two entries have one key.
        """
        del world_size
        return join_sections(tensors, boxes)


@dataclass
class _Plan:
    """The request with keys, and the files and places that boxes get."""

    request: WriteRequest
    prefix: str
    keys: list[Key] = field(init=False)
    """One per tensor."""
    entries: list[FileEntry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    file: npt.NDArray[np.int64] = field(init=False)
    offset: npt.NDArray[np.int64] = field(init=False)
    objects: dict[str, list[tuple[KeyPath, Any]]] = field(init=False)
    """Keys and values of the objects of model and optimizer."""

    def __post_init__(self) -> None:
        tensors = self.request.tensors
        self.keys = [key_of(meta.section, rank_of(meta.path or (meta.fqn,))[1]) for meta in tensors]
        self.file = np.zeros(len(self.request.boxes), dtype=np.int64)
        self.offset = np.zeros(len(self.request.boxes), dtype=np.int64)
        self.objects = {name: [] for name in SECTIONS}
        seen: set[str] = set()
        for blob in self.request.blobs:
            key = _blob_key(blob)
            if key.section in self.objects and blob.fqn not in seen:
                seen.add(blob.fqn)
                self.objects[key.section].append((key.path, blob_entry(blob)[1]))

    def has_metadata(self, section: str) -> bool:
        """The model always has metadata: by it a checkpoint is recognised."""
        return section == "model" or bool(self.objects[section]) or any(key.section == section for key in self.keys)


def _blob_key(blob: Blob) -> Key:
    """The key of an object; a rank in its name (``rng@rank3``) is not part of it."""
    _, path = rank_of(blob.path or (blob.fqn,))
    return key_of(section_of(path, blob.fqn), path)


def _section(plan: _Plan, name: str) -> Iterator[Segment]:
    """Segments of a section, whose boxes are placed on the way."""
    if not plan.has_metadata(name):
        return
    request = plan.request
    paths = [f"__{rank}_0.distcp" for rank in range(request.world_size)]
    nbytes = [0] * len(paths)
    objects: list[tuple[str, KeyPath, WrittenItem]] = []
    for fqn, path, value in _items(plan.objects[name], request.info.get("int_keyed_dicts", ())):
        named = with_names(value, plan.keys) if fqn == "param_groups" else None
        if named is not None:
            plan.notes.append(_NAMED)
        data = object_item(Blob(fqn, "value", None, value if named is None else named, path, is_loaded=True), None)
        yield Segment(f"{plan.prefix}{name}/{paths[0]}", nbytes[0], data)
        objects.append((fqn, path, WrittenItem(paths[0], nbytes[0], len(data))))
        nbytes[0] += len(data)
    first_file = len(plan.entries)
    rows_of = _rows_by_tensor(request)
    tensors: list[WrittenTensor] = []
    chunks: list[WrittenChunk] = []
    for tensor, key in enumerate(plan.keys):
        if key.section == name:
            found = _tensor_chunks(plan, tensor, rows_of[tensor], paths, nbytes, first_file)
            meta = request.tensors.record(tensor)
            tensors.append(WrittenTensor(key.name, meta.dtype, meta.shape, key.path, len(found)))
            chunks += found
    plan.entries += [FileEntry(f"{plan.prefix}{name}/{path}", size) for path, size in zip(paths, nbytes, strict=True)]
    metadata = metadata_pickle(tensors, WrittenChunks.of(chunks), objects)
    plan.entries.append(FileEntry(f"{plan.prefix}{name}/{METADATA_NAME}", len(metadata)))
    yield Segment(f"{plan.prefix}{name}/{METADATA_NAME}", 0, metadata)


def _items(entries: Sequence[tuple[KeyPath, Any]], int_keyed: Sequence[str]) -> Iterator[tuple[str, KeyPath, Any]]:
    """Key, keys and value of each object: parameter groups are one, whatever is in them."""
    groups = [(path, value) for path, value in entries if path[0] == "param_groups"]
    for path, value in entries:
        if path[0] != "param_groups":
            yield ".".join(map(str, path)), path, value
    if groups:
        yield "param_groups", ("param_groups",), nest(groups, int_keyed=int_keyed)["param_groups"]


def _rows_by_tensor(request: WriteRequest) -> list[list[int]]:
    rows: list[list[int]] = [[] for _ in range(len(request.tensors))]
    for row, tensor in enumerate(request.boxes.tensor.tolist()):
        rows[tensor].append(row)
    return rows


def _tensor_chunks(
    plan: _Plan, tensor: int, rows: Sequence[int], paths: Sequence[str], nbytes: list[int], first_file: int
) -> list[WrittenChunk]:
    """One tensor's boxes, each behind what its rank's file has so far (``nbytes``, which grows)."""
    boxes, meta = plan.request.boxes, plan.request.tensors.record(tensor)
    ndim = len(meta.shape)
    chunks: dict[tuple[int, ...], WrittenChunk] = {}
    for row in rows:
        start, extent = tuple(boxes.offsets[row, :ndim].tolist()), tuple(boxes.sizes[row, :ndim].tolist())
        rank = int(boxes.rank[row])
        if not 0 <= rank < len(paths):
            raise LayoutError(f"a box is of rank {rank:,}, the target has {len(paths):,}", where=meta.fqn)
        length = meta.dtype.nbytes(int(np.prod(extent, dtype=np.int64)))
        plan.file[row], plan.offset[row] = first_file + rank, nbytes[rank]
        if not length:
            continue
        if start in chunks:
            raise LayoutError(f"two boxes begin at {list(start)}, the format has one for each place", where=meta.fqn)
        chunks[start] = WrittenChunk(start, extent, WrittenItem(paths[rank], nbytes[rank], length))
        nbytes[rank] += length
    if not chunks:
        if meta.numel:
            raise LayoutError("no box of the tensor is to be stored", where=meta.fqn)
        start = (0,) * ndim
        chunks[start] = WrittenChunk(start, meta.shape, WrittenItem(paths[0], nbytes[0], 0))
    return list(chunks.values())


def _extra_files(plan: _Plan) -> list[WrittenFile]:
    """A file for each rank with its extra state; none at all where there is nothing of the kind."""
    request = plan.request
    objects = list(_extra_objects(request.blobs))
    held = _extra_tensors(plan)
    if not objects and not held:
        return []
    files = []
    for rank in range(request.world_size):
        values: list[tuple[KeyPath, Any]] = []
        nbytes: list[int] = []
        rows: list[int] = []
        for tensor, row in held.get(rank, ()):
            meta = request.tensors.record(tensor)
            values.append((plan.keys[tensor].path, fresh_tensor(len(rows), meta.dtype, meta.shape)))
            nbytes.append(meta.nbytes)
            rows.append(row if meta.numel else -1)
        values += [(path, value) for path, value, owner in objects if owner in (None, rank)]
        root = nest(values, int_keyed=request.info.get("int_keyed_dicts", ())) if values else {}
        path = f"{plan.prefix}extra_state/extra_state_rank_{rank}.pt"
        file = WrittenFile.of(path, root, nbytes, rows)
        for row, start in file.places():
            plan.file[row], plan.offset[row] = len(plan.entries), start
        plan.entries.append(FileEntry(path, file.zip.nbytes))
        files.append(file)
    return files


def _extra_objects(blobs: Sequence[Blob]) -> Iterator[tuple[KeyPath, Any, int | None]]:
    """Keys, value and rank of each object of extra state.

    A rank owns what is named for it (``rng@rank3``), and its copy where copies differ; the rest belongs to every rank.
    """
    copies: dict[str, list[Blob]] = {}
    for blob in blobs:
        if _blob_key(blob).section == "extra_state":
            copies.setdefault(blob.fqn, []).append(blob)
    for held in copies.values():
        path = _blob_key(held[0]).path
        values = [blob_entry(blob)[1] for blob in held]
        named, _ = rank_of(held[0].path or (held[0].fqn,))
        if all(same_value(values[0], value) for value in values[1:]):
            yield path, values[0], named
        else:
            yield from ((path, value, blob.rank) for blob, value in zip(held, values, strict=True))


def _extra_tensors(plan: _Plan) -> dict[int, list[tuple[int, int]]]:
    """Tensors of extra state by rank, with the row of their box (-1 for none)."""
    request = plan.request
    tensors, boxes = request.tensors, request.boxes
    other = MANIFEST_SECTIONS.index("other")
    rows_of = _rows_by_tensor(request)
    held: dict[int, list[tuple[int, int]]] = {}
    for tensor in np.flatnonzero(tensors.section == other).tolist():
        meta = tensors.record(tensor)
        named, _ = rank_of(meta.path or (meta.fqn,))
        if not rows_of[tensor]:
            held.setdefault(named or 0, []).append((tensor, -1))
        for row in rows_of[tensor]:
            if boxes.sizes[row, : len(meta.shape)].tolist() != list(meta.shape):
                raise Unsupported(
                    "extra state of ByteCheckpoint is whole, this tensor is cut into boxes",
                    where=meta.fqn,
                    hint=f"leave it out with --exclude {shell_word(meta.fqn)}",
                )
            held.setdefault(int(boxes.rank[row]) if named is None else named, []).append((tensor, row))
    beyond = [rank for rank in held if rank >= request.world_size]
    if beyond:
        fqn = tensors.fqns[held[beyond[0]][0][0]]
        raise LayoutError(
            f"state of rank {beyond[0]:,}, the target has {counted(request.world_size, 'rank')}", where=fqn
        )
    return held


WRITER = ByteCheckpointWriter()
