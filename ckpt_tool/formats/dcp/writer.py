"""The writer of DCP checkpoints: a file per rank of back-to-back items, and the ``.metadata`` that lists them."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ckpt_tool.errors import LayoutError, Unsupported
from ckpt_tool.formats._dcp.metadata import METADATA_NAME
from ckpt_tool.formats._dcp.metadata_pickle import WrittenChunk, WrittenItem, WrittenTensor
from ckpt_tool.formats._dcp.written_items import ItemKind, ItemKinds, foreign_names, is_writable, object_item
from ckpt_tool.formats.base import LayOut, Segment, WriteRequest
from ckpt_tool.formats.dcp.metadata_pickle import metadata_pickle
from ckpt_tool.manifest.model import Blob, FileEntry, FileRange, KeyPath, Manifest
from ckpt_tool.manifest.tables import ChunkTable, FileTable, IntArray

__all__ = ["WRITER", "DcpWriter"]


class DcpWriter:
    """Lays out what ``torch.distributed.checkpoint.load`` of torch 2.4 and later reads, into any parallel layout."""

    name = "dcp"
    per_rank = False

    def lay_out(self, request: WriteRequest) -> LayOut:
        """``__<rank>_0.distcp`` for each rank that has boxes, objects first in that of rank 0, and ``.metadata``.

        Checksums of payloads are known late, so items are first laid out with 0, which stands for "not recorded", and
        ``seal`` gives their ends again with the checksum: a target that cannot go back keeps the former.

        Raises:
            Unsupported: dtypes or objects that torch cannot hold.
            LayoutError: a tensor with elements has no box, or two that begin at the same place.
        """
        _check_dtypes(request)
        files = _Files()
        blobs = _place_blobs(request, files)
        placed = _place_boxes(request, files)
        metadata = _metadata(request, placed, blobs, files)
        files.segments.append(Segment(METADATA_NAME, 0, metadata))
        entries = [FileEntry(path, files.nbytes[path]) for path in placed.paths]
        entries += [FileEntry(path, nbytes) for path, nbytes in files.nbytes.items() if path not in placed.paths]
        entries.append(FileEntry(METADATA_NAME, len(metadata)))
        boxes = request.boxes
        chunks = ChunkTable.from_columns(
            tensor=boxes.tensor,
            offsets=boxes.offsets,
            sizes=boxes.sizes,
            file=placed.file,
            offset=placed.item_offset + placed.head_nbytes,
            length=placed.payload_nbytes,
            rank=boxes.rank,
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
            tuple(files.segments),
            METADATA_NAME,
            needs_crc32=True,
            seal=lambda crc32s: _sealed(placed, crc32s),
        )


@dataclass
class _Files:
    """Files while they grow, and the bytes in them that are no payload."""

    nbytes: dict[str, int] = field(default_factory=dict)
    segments: list[Segment] = field(default_factory=list)

    def extend(self, path: str, nbytes: int) -> int:
        """Offset of the next ``nbytes`` of ``path``."""
        offset = self.nbytes.get(path, 0)
        self.nbytes[path] = offset + nbytes
        return offset


@dataclass(frozen=True, slots=True)
class _Placed:
    """One row per box: its item."""

    paths: tuple[str, ...]
    file: IntArray
    item_offset: IntArray
    head_nbytes: IntArray
    payload_nbytes: IntArray
    kinds: list[ItemKind]
    extra: dict[int, WrittenItem]
    """Items of empty tensors that have no box: torch loads one for every tensor."""


def _check_dtypes(request: WriteRequest) -> None:
    refused = {
        d.name: fqn for d, fqn in zip(request.tensors.dtypes, request.tensors.fqns, strict=True) if not is_writable(d)
    }
    if refused:
        listed = ", ".join(f"{name} ({fqn!r})" for name, fqn in sorted(refused.items()))
        raise Unsupported(f"torch has no plain tensors of these types: {listed}", hint="leave them out with --exclude")


def _place_blobs(request: WriteRequest, files: _Files) -> list[tuple[Blob, WrittenItem]]:
    """Items of objects, the first of each fqn, at the start of rank 0's file."""
    path = _path(0)
    placed: dict[str, tuple[Blob, WrittenItem]] = {}
    for blob in request.blobs:
        if blob.fqn in placed:
            continue
        data = object_item(blob, request.blob_bytes.get(blob.fqn) if blob.kind == "torch_save" else None)
        offset = files.extend(path, len(data))
        files.segments.append(Segment(path, offset, data))
        where = FileRange(path, offset, len(data))
        keys = blob.path or (blob.fqn,)
        written = Blob(blob.fqn, "torch_save", where, value=blob.value, path=keys, is_loaded=blob.is_loaded)
        placed[blob.fqn] = (written, WrittenItem(path, offset, len(data)))
    return list(placed.values())


def _place_boxes(request: WriteRequest, files: _Files) -> _Placed:
    """Items of boxes, by rank and then in the order of rows."""
    boxes, tensors = request.boxes, request.tensors
    n = len(boxes)
    kinds_of = ItemKinds()
    ndim = tensors.ndim[boxes.tensor].tolist()
    sizes = boxes.sizes.tolist()
    dtypes = [tensors.dtypes[row] for row in boxes.tensor.tolist()]
    kinds = [kinds_of.kind(d, tuple(s[:m])) for d, s, m in zip(dtypes, sizes, ndim, strict=True)]
    ranks, file = np.unique(boxes.rank, return_inverse=True)
    paths = tuple(_path(int(rank)) for rank in ranks)
    lengths = np.array([kind.nbytes for kind in kinds], dtype=np.int64)
    offsets = np.zeros(n, dtype=np.int64)
    for number, path in enumerate(paths):
        rows = np.flatnonzero(file == number)
        start = files.extend(path, int(lengths[rows].sum()))
        offsets[rows] = start + np.cumsum(lengths[rows]) - lengths[rows]
        _surround(path, kinds, rows, offsets, files)
    extra: dict[int, WrittenItem] = {}
    has_box = np.bincount(boxes.tensor, minlength=len(tensors)) > 0
    for row in np.flatnonzero(~has_box).tolist():
        if tensors.numel[row]:
            raise LayoutError("no box of the tensor is to be stored", where=tensors.fqns[row])
        kind = kinds_of.kind(tensors.dtypes[row], tensors.shape_of(row))
        offset = files.extend(_path(0), kind.nbytes)
        files.segments.append(Segment(_path(0), offset, kind.head + kind.rear(0)))
        extra[row] = WrittenItem(_path(0), offset, kind.nbytes)
    return _Placed(
        paths=paths,
        file=file.astype(np.int64),
        item_offset=offsets,
        head_nbytes=np.array([len(kind.head) for kind in kinds], dtype=np.int64),
        payload_nbytes=np.array([kind.payload_nbytes for kind in kinds], dtype=np.int64),
        kinds=kinds,
        extra=extra,
    )


def _surround(path: str, kinds: list[ItemKind], rows: IntArray, offsets: IntArray, files: _Files) -> None:
    """Everything between payloads of one file: one segment from the end of a payload to the start of the next."""
    between: dict[tuple[int, int], bytes] = {}
    position, before = int(offsets[rows[0]]), None
    for row, offset in zip(rows.tolist(), offsets[rows].tolist(), strict=True):
        kind = kinds[row]
        key = (id(before), id(kind))
        data = between.get(key)
        if data is None:
            data = between[key] = (b"" if before is None else before.rear(0)) + kind.head
        files.segments.append(Segment(path, position, data))
        position = offset + len(kind.head) + kind.payload_nbytes
        before = kind
    if before is not None:
        files.segments.append(Segment(path, position, before.rear(0)))


def _sealed(placed: _Placed, crc32s: npt.NDArray[np.uint32]) -> Iterator[Segment]:
    """The end of every item once more, with the checksum of its payload."""
    starts = (placed.item_offset + placed.head_nbytes + placed.payload_nbytes).tolist()
    for kind, file, start, crc32 in zip(placed.kinds, placed.file.tolist(), starts, crc32s.tolist(), strict=True):
        if kind.payload_nbytes:
            yield Segment(placed.paths[file], start, kind.rear(crc32))


def _metadata(request: WriteRequest, placed: _Placed, blobs: list[tuple[Blob, WrittenItem]], files: _Files) -> bytes:
    tensors, boxes = request.tensors, request.boxes
    offsets, sizes = boxes.offsets.tolist(), boxes.sizes.tolist()
    lengths = [kind.nbytes for kind in placed.kinds]
    starts, file = placed.item_offset.tolist(), placed.file.tolist()
    # Of boxes that begin at the same place at most one may have elements; the empty ones need no record beside it.
    chunks: list[dict[tuple[int, ...], WrittenChunk]] = [{} for _ in range(len(tensors))]
    for row, tensor in enumerate(boxes.tensor.tolist()):
        ndim = int(tensors.ndim[tensor])
        start, extent = tuple(offsets[row][:ndim]), tuple(sizes[row][:ndim])
        known = chunks[tensor].get(start)
        if known is not None and 0 in extent:
            continue
        if known is not None and 0 not in known.sizes:
            raise LayoutError(
                f"two boxes begin at {list(start)}: sizes {list(known.sizes)} and {list(extent)}",
                where=tensors.fqns[tensor],
            )
        item = WrittenItem(placed.paths[file[row]], starts[row], lengths[row])
        chunks[tensor][start] = WrittenChunk(start, extent, item)
    for tensor, item in placed.extra.items():
        shape = tensors.shape_of(tensor)
        chunks[tensor][(0,) * len(shape)] = WrittenChunk((0,) * len(shape), shape, item)
    paths: list[KeyPath] = [(fqn,) for fqn in tensors.fqns] if tensors.paths is None else list(tensors.paths)
    written = [
        WrittenTensor(fqn, dtype, tensors.shape_of(row), paths[row], list(chunks[row].values()))
        for row, (fqn, dtype) in enumerate(zip(tensors.fqns, tensors.dtypes, strict=True))
    ]
    objects = [(blob.fqn, blob.path, item) for blob, item in blobs]
    digest = hashlib.blake2b(repr((tensors.fqns, sorted(files.nbytes.items()))).encode(), digest_size=16)
    return metadata_pickle(written, objects, save_id=str(uuid.UUID(bytes=digest.digest(), version=4)))


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
        yield f"of {len(repeated):,} objects there are several copies, of which the first is kept: {listed}"


def _path(rank: int) -> str:
    return f"__{rank}_0.distcp"


WRITER = DcpWriter()
