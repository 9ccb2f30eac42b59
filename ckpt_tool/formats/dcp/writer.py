"""The writer of DCP checkpoints: a file per rank of back-to-back items, and the ``.metadata`` that lists them."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain

import numpy as np
import numpy.typing as npt

from ckpt_tool.formats._dcp.metadata import METADATA_NAME
from ckpt_tool.formats._dcp.metadata_pickle import MetadataPickle, WrittenChunks, WrittenItem, WrittenTensor
from ckpt_tool.formats._dcp.placed_items import (
    GrowingFiles,
    PlacedItems,
    check_dtypes,
    place_boxes,
    sealed,
    written_tensors,
)
from ckpt_tool.formats._dcp.rank_items import items_of_rank
from ckpt_tool.formats._dcp.written_items import foreign_names, object_item
from ckpt_tool.formats._torch_file.objects import check_objects
from ckpt_tool.formats.base import (
    BoxTable,
    LaterSegments,
    LayOut,
    Segment,
    WriteRequest,
)
from ckpt_tool.formats.dcp.metadata_pickle import metadata_pickle
from ckpt_tool.formats.dcp.sidecar import MIN_CHUNKS, SIDECAR_NAME, sidecar_bytes
from ckpt_tool.formats.dcp.written_sidecar import sidecar_of
from ckpt_tool.formats.joint import Joined, PlacedObject, PlainEntries, RankLayOut
from ckpt_tool.manifest.model import Blob, FileEntry, FileRange, KeyPath, Manifest
from ckpt_tool.manifest.tables import ChunkTable, FileTable, TensorTable
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["WRITER", "DcpWriter"]


class DcpWriter(PlainEntries):
    """Lays out what ``torch.distributed.checkpoint.load`` of torch 2.4 and later reads, into any parallel layout.

    ``metadata`` makes the content of ``.metadata``, for programs that have one of their own.
    """

    name = "dcp"
    per_rank = False
    commit_path = METADATA_NAME

    def __init__(self, metadata: Callable[..., MetadataPickle] = metadata_pickle) -> None:
        self._metadata = metadata

    def lay_out(self, request: WriteRequest) -> LayOut:
        """``__<rank>_0.distcp`` for each rank that has boxes, objects first in that of rank 0, and ``.metadata``.

        Checksums of payloads are known late, so items are first laid out with 0, which stands for "not recorded", and
        ``seal`` gives their ends again with the checksum: a target that cannot go back keeps the former.

        Raises:
            Unsupported: dtypes or objects that torch cannot hold.
            LayoutError: a tensor with elements has no box, or two that begin at the same place.
        """
        check_dtypes(request.tensors)
        files = GrowingFiles()
        blobs = _place_blobs(request, files)
        placed = place_boxes(request.tensors, request.boxes, files, _path)
        metadata = _metadata(request, placed, blobs, files, self._metadata)
        entries = [FileEntry(path, files.nbytes[path]) for path in placed.paths]
        of_ranks = set(placed.paths)
        entries += [FileEntry(path, nbytes) for path, nbytes in files.nbytes.items() if path not in of_ranks]
        entries.append(FileEntry(METADATA_NAME, metadata.pickle.nbytes))
        boxes = request.boxes
        # Columns are shared, not copied: of the largest jobs they are gigabytes.
        chunks = ChunkTable(
            tensor=boxes.tensor.view(),
            offsets=boxes.offsets.view(),
            sizes=boxes.sizes.view(),
            file=placed.file.view(),
            offset=placed.item_offset + placed.head_nbytes,
            length=placed.payload_nbytes.view(),
            rank=boxes.rank.view(),
            flags=np.zeros(len(boxes), dtype=np.uint8),
        )
        manifest = Manifest(
            self.name,
            "",
            request.tensors,
            chunks,
            FileTable(tuple(entries)),
            blobs=tuple(blob for blob, _ in blobs),
            info=dict(request.info),
            notes=tuple(_notes(request)),
        )
        return LayOut(
            manifest,
            LaterSegments(lambda: chain(files.segments, placed.segments(), metadata.segments(request.options.sidecar))),
            METADATA_NAME,
            needs_crc32=True,
            seal=lambda crc32s: sealed(placed, crc32s),
        )

    def may_cut(self, tensors: TensorTable) -> npt.NDArray[np.bool_]:
        """Of all: ``.metadata`` lists chunks of any size."""
        return np.ones(len(tensors), dtype=np.bool_)

    def lay_out_rank(self, tensors: TensorTable, boxes: BoxTable, rank: int, world_size: int) -> RankLayOut:
        """``__<rank>_0.distcp``: the items of the rank's boxes, behind which its objects go.

        Raises:
            Unsupported: dtypes that torch cannot hold.
        """
        del world_size
        return items_of_rank(tensors, boxes, _path(rank))

    def join(self, tensors: TensorTable, boxes: BoxTable, world_size: int) -> Joined:
        """``.metadata``.

        Raises:
            LayoutError: two boxes of a tensor begin at the same place.
        """
        del world_size
        placed = place_boxes(tensors, boxes, GrowingFiles(), _path)
        written, chunks = written_tensors(tensors, boxes, placed, _named_paths(tensors))
        save_id = _save_id(tensors, len(boxes))

        def metadata(objects: Sequence[PlacedObject], files: Mapping[str, int]) -> tuple[Segment, ...]:
            del files
            items = [
                (each.fqn, each.path, WrittenItem(each.where.path, each.where.offset, each.where.length))
                for each in objects
            ]
            return (Segment(METADATA_NAME, 0, self._metadata(written, chunks, items, save_id=save_id).finished()),)

        return Joined(tensors.fqns, metadata)


def _place_blobs(request: WriteRequest, files: GrowingFiles) -> list[tuple[Blob, WrittenItem]]:
    """Items of objects, the first of each fqn, at the start of rank 0's file."""
    path = _path(0)
    placed: dict[str, tuple[Blob, WrittenItem]] = {}
    check_objects(request.blobs, {blob.fqn for blob in request.blobs if _original(blob, request) is not None})
    for blob in request.blobs:
        if blob.fqn in placed:
            continue
        data = object_item(blob, _original(blob, request))
        item = files.append(path, data)
        where = FileRange(item.path, item.offset, item.length)
        keys = blob.path or (blob.fqn,)
        written = Blob(blob.fqn, "torch_save", where, value=blob.value, path=keys, is_loaded=blob.is_loaded)
        placed[blob.fqn] = (written, item)
    return list(placed.values())


def _original(blob: Blob, request: WriteRequest) -> bytes | None:
    """The whole item of an object as the source has it."""
    return request.blob_bytes.get(blob.fqn) if blob.kind == "torch_save" else None


@dataclass(frozen=True, eq=False)
class _Metadata:
    """``.metadata`` and, where it pays or was asked for, the sidecar of it."""

    tensors: TensorTable
    written: list[WrittenTensor]
    chunks: WrittenChunks
    objects: list[tuple[str, KeyPath, WrittenItem]]
    save_id: str
    make: Callable[..., MetadataPickle]

    @cached_property
    def pickle(self) -> MetadataPickle:
        """The content of ``.metadata``; its bytes are made later."""
        return self.make(self.written, self.chunks, self.objects, save_id=self.save_id)

    def segments(self, wants_sidecar: bool | None) -> Iterator[Segment]:  # noqa: FBT001 - as the option is
        """The files, the one that makes it a checkpoint last."""
        data = self.pickle.finished()
        if wants_sidecar or (wants_sidecar is None and len(self.chunks) >= MIN_CHUNKS):
            sidecar = sidecar_of(self.tensors, self.written, self.chunks, self.objects, self.save_id)
            yield Segment(SIDECAR_NAME, 0, sidecar_bytes(sidecar, data))
        yield Segment(METADATA_NAME, 0, data)


def _metadata(
    request: WriteRequest,
    placed: PlacedItems,
    blobs: list[tuple[Blob, WrittenItem]],
    files: GrowingFiles,
    make: Callable[..., MetadataPickle],
) -> _Metadata:
    tensors = request.tensors
    written, chunks = written_tensors(tensors, request.boxes, placed, _named_paths(tensors))
    objects = [(blob.fqn, blob.path, item) for blob, item in blobs]
    return _Metadata(tensors, written, chunks, objects, _save_id(tensors, sorted(files.nbytes.items())), make)


def _named_paths(tensors: TensorTable) -> list[tuple[str, KeyPath]]:
    paths: list[KeyPath] = [(fqn,) for fqn in tensors.fqns] if tensors.paths is None else list(tensors.paths)
    return list(zip(tensors.fqns, paths, strict=True))


def _save_id(tensors: TensorTable, of: object) -> str:
    digest = hashlib.blake2b(repr((tensors.fqns, of)).encode(), digest_size=16)
    return str(uuid.UUID(bytes=digest.digest(), version=4))


def _notes(request: WriteRequest) -> Iterator[str]:
    seen: set[str] = set()
    repeated: set[str] = set()
    for blob in request.blobs:
        if blob.fqn in seen:
            repeated.add(blob.fqn)
        elif blob.fqn not in request.blob_bytes:
            names = foreign_names(blob.value)
            if names:
                listed = ", ".join(names[:5])
                yield f"{blob.fqn} holds objects of {listed}, which torch.load reads with weights_only=False only"
        seen.add(blob.fqn)
    if repeated:
        listed = ", ".join(sorted(repeated)[:5])
        yield f"of {counted(len(repeated), 'object')} there are several copies, of which the first is kept: {listed}"


def _path(rank: int) -> str:
    return f"__{rank}_0.distcp"


WRITER = DcpWriter()
