"""The items of DCP files whose ``.metadata`` is lost: what each holds, without the name that only ``.metadata`` has.

An item is a zip of torch.save of one box, whose header tells type and sizes. Its tensor's name, the tensor's shape and
the box's place in it are nowhere else; so each item becomes a tensor of its own, named after its file and number. A
safetensors blob behind the items says names and places; only whole shapes it does not say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckpt_tool.errors import CkptError, FormatError, NotFound
from ckpt_tool.formats._dcp.items import HEAD_NBYTES, ItemHeads, Payload
from ckpt_tool.formats._resolved import ResolvedReader
from ckpt_tool.formats._zip.descriptor import DESCRIPTOR_NBYTES, descriptor_crc32
from ckpt_tool.formats._zip.head import parse_item_head
from ckpt_tool.formats.base import Checksum, Probe, Source
from ckpt_tool.formats.dcp.blob import BlobTensor, header_nbytes, parse_blob
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.model import Chunk, FileEntry, FileRange, Manifest, TensorMeta
from ckpt_tool.manifest.sections import section_of
from ckpt_tool.manifest.tables import ChunkTable, FileTable, TensorTable
from ckpt_tool.sizes import counted

__all__ = ["READER", "SUFFIX", "UnnamedItemsReader", "walked_items"]

SUFFIX = ".distcp"
_LOCAL_HEADER, _END_RECORD = b"PK\x03\x04", b"PK\x05\x06"
_END_NBYTES = 22
_SEARCHED_NBYTES = 64 << 10
_MAX_HEADER = 1 << 30

_SHAPES = (
    "safetensors blobs give names and places, but no whole shapes: each is the furthest end of its boxes, so a last "
    "part that is missing cannot be noticed"
)
_Piece = tuple[str, int, BlobTensor]
"""File, first byte of the blob, and what it says of one tensor."""


class UnnamedItemsReader(ResolvedReader):
    """Walks every file from item to item: one small request for each, and one more for its end."""

    name = "dcp-items"

    def probe(self, source: Source) -> Probe:
        """By name; never found by itself."""
        n = len(source.listing.match(f"*{SUFFIX}"))
        return Probe(0.0, f"{counted(n, 'file')} of items, looked at where nothing better is left")

    def read(self, source: Source) -> Manifest:
        """A tensor for each item that holds one, and for each name in blobs; a file is walked to its first fault.

        Raises:
            NotFound: there is no such item.
        """
        tensors: list[TensorMeta] = []
        chunks: list[Chunk] = []
        pieces: dict[str, list[_Piece]] = {}
        notes: list[str] = []
        paths = source.listing.match(f"*{SUFFIX}")
        heads = ItemHeads()
        for path in paths:
            nbytes = source.listing.nbytes(path)
            reached = 0
            number = n_objects = 0
            for start, end, payload in walked_items(source, path, nbytes, heads):
                reached = end
                if payload is None:
                    n_objects += 1
                    continue
                fqn = f"{path}/{number:04d}"
                number += 1
                placed = payload.moved(start)
                tensors.append(TensorMeta(fqn, payload.dtype, payload.shape, "other", (fqn,)))
                where = FileRange(path, placed.offset, placed.length)
                chunks.append(Chunk(fqn, Box.whole(payload.shape), where, payload.strides, payload.flags, None))
            blob = _blob(source, path, reached, nbytes)
            for name, found in blob.items():
                pieces.setdefault(name, []).append((path, reached, found))
            if reached < nbytes and not blob:
                notes.append(f"{path}: from byte {reached:,} of {nbytes:,} on no item can be told")
            if n_objects:
                notes.append(
                    f"{path}: {counted(n_objects, 'item', 'are')} objects, or tensors that only a directory can place"
                )
        if tensors:
            notes.insert(0, "names, whole shapes and places stood in .metadata alone: each item is a tensor by itself")
        if pieces:
            notes.insert(0, _SHAPES)
        for fqn, parts in pieces.items():
            _add_named(fqn, parts, tensors, chunks)
        if not tensors:
            raise NotFound("no item of DCP can be read", where=source.listing.url)
        table = TensorTable.from_records(tensors)
        files = FileTable(tuple(FileEntry(path, source.listing.nbytes(path)) for path in paths))
        return Manifest(
            self.name, source.listing.url, table, ChunkTable.from_records(chunks, table, files), files,
            notes=tuple(notes),
        )  # fmt: skip

    def checksums(self, source: Source, manifest: Manifest) -> Iterator[Checksum]:
        """The CRC-32 behind each payload: one small request for each."""
        for row in range(len(manifest.chunks)):
            chunk = manifest.chunks.record(row, manifest.tensors, manifest.files)
            end = chunk.where.end
            nbytes = min(source.listing.nbytes(chunk.where.path) - end, DESCRIPTOR_NBYTES)
            if chunk.where.length and nbytes > 0:
                crc32 = descriptor_crc32(source.store.read(chunk.where.path, end, nbytes), chunk.where.length)
                if crc32 is not None:
                    yield Checksum(chunk.where, crc32, chunk.fqn)


def walked_items(source: Source, path: str, nbytes: int, heads: ItemHeads) -> Iterator[tuple[int, int, Payload | None]]:
    """Start, end and payload of each item that is wholly there; None for one that is no plain tensor."""
    at = 0
    while at < nbytes:
        head = source.store.read(path, at, min(HEAD_NBYTES, nbytes - at))
        payload = None
        try:
            if parse_item_head(head) is not None:
                payload = heads.payload(memoryview(head), f"{path}:{at}")
        except CkptError:
            payload = None
        from_ = at if payload is None else at + payload.end
        if not head.startswith(_LOCAL_HEADER) or from_ > nbytes:
            return
        end = _end(source, path, from_, nbytes)
        if end is None:
            return
        yield at, end, payload
        at = end


def _blob(source: Source, path: str, start: int, nbytes: int) -> dict[str, BlobTensor]:
    """What the safetensors blob that begins there says; nothing where none does."""
    try:
        length = header_nbytes(source.store.read(path, start, min(9, nbytes - start)), nbytes - start, path)
        return parse_blob(source.store.read(path, start, length), path)
    except FormatError:
        return {}


def _add_named(fqn: str, parts: Sequence[_Piece], tensors: list[TensorMeta], chunks: list[Chunk]) -> None:
    """One tensor of all parts that say one place each, of one type; else a tensor of each part."""
    places = [found.saved_offsets for _, _, found in parts if found.saved_offsets is not None]
    ndims = {len(found.shape) for _, _, found in parts} | {len(place) for place in places}
    is_one = len(places) == len(parts) and len(ndims) == 1 and len({found.dtype for _, _, found in parts}) == 1
    if not is_one and len(parts) > 1:
        for each in parts:
            _add_named(f"{each[0]}/{fqn}", [each], tensors, chunks)
        return
    boxes = [
        Box(found.saved_offsets if is_one and found.saved_offsets else (0,) * len(found.shape), found.shape)
        for _, _, found in parts
    ]
    ends = zip(*([o + s for o, s in zip(box.offsets, box.sizes, strict=True)] for box in boxes), strict=True)
    path = (fqn,)
    tensors.append(TensorMeta(fqn, parts[0][2].dtype, tuple(max(each) for each in ends), section_of(path, fqn), path))
    for box, (file, start, found) in zip(boxes, parts, strict=True):
        if found.length:
            chunks.append(Chunk(fqn, box, FileRange(file, start + found.offset, found.length), None, 0, None))


def _end(source: Source, path: str, start: int, nbytes: int) -> int | None:
    """The byte behind the first end record from ``start`` on that ends the file or stands before an item or a blob."""
    at = start
    while at < nbytes:
        block = source.store.read(path, at, min(_SEARCHED_NBYTES, nbytes - at))
        found = block.find(_END_RECORD)
        while found >= 0 and found + _END_NBYTES <= len(block):
            comment = int.from_bytes(block[found + 20 : found + 22], "little")
            end = at + found + _END_NBYTES + comment
            if end == nbytes or (
                end + 4 <= nbytes and _begins_another(source.store.read(path, end, min(9, nbytes - end)))
            ):
                return end
            found = block.find(_END_RECORD, found + 1)
        if at + len(block) >= nbytes:
            return None
        at += len(block) - _END_NBYTES
    return None


def _begins_another(head: bytes) -> bool:
    """Whether an item or a safetensors blob begins with these bytes."""
    return head.startswith(_LOCAL_HEADER) or (head[8:9] == b"{" and int.from_bytes(head[:8], "little") < _MAX_HEADER)


READER = UnnamedItemsReader()
