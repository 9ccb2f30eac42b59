"""What is wrong with the files that metadata refers to, and the checksums that items record."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import numpy as np

from ckpt_tool.checksum import crc32
from ckpt_tool.errors import FormatError
from ckpt_tool.formats._dcp.item_kinds import ItemKinds, MemberSum
from ckpt_tool.formats._dcp.items import is_zip
from ckpt_tool.formats._dcp.objects import ZSTD_KIND
from ckpt_tool.formats._merged import read_merged
from ckpt_tool.formats._zip.container import Fault, finding_of_fault
from ckpt_tool.formats.base import Checksum, Source
from ckpt_tool.geometry.columns import distinct
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import FileEntry, FileRange, Manifest
from ckpt_tool.manifest.tables import ChunkFlag
from ckpt_tool.sizes import counted, some_of
from ckpt_tool.storage.virtual.decode import decoded_blocks

__all__ = ["checksums", "file_findings", "item_of"]

_NAMES_SHOWN = 20
_ZSTD = b"\x28\xb5\x2f\xfd"
_EDGE_NBYTES = 4 << 10
"""First and last bytes of an item that hold its local headers and its directory."""


def checksums(source: Source, manifest: Manifest) -> Iterator[Checksum | Finding]:
    """CRC-32 of the storage of each tensor, and of the pickles around them and of objects, where one is recorded.

    torch writes them always (unless ``set_crc32_options(False)``: 0) and never checks them. A safetensors blob has
    none, those of compressed items are of their decoded content. Chunks that are resolved no longer say where their
    item is and are passed over. The bytes around payloads are held against each other (``container-damage``,
    ``container-odd``), also of items that are neither a chunk's nor an object's. Requests: two per item at most, of
    4 KiB; compressed items are read and decoded whole.
    """
    tensors, objects = _items(manifest)
    saved = {b.where for b in manifest.blobs if b.kind in ("torch_save", ZSTD_KIND)}
    others = [] if manifest.items is None else manifest.items.ranges(manifest.files)
    without = [where for where in dict.fromkeys(others) if where.length and where not in tensors]
    places = [
        where
        for where in (*tensors, *objects, *(where for where in without if where not in objects))
        if where.end <= source.listing.sizes.get(where.path, -1)
    ]
    kinds = ItemKinds()
    for where, head, tail in _edges(source, places):
        if is_zip(head):
            fqn = tensors.get(where)
            try:
                sums = list(_item_sums(source, where, head, tail, kinds))
            except FormatError as error:  # one item hides no other
                kind = "damaged-object" if where in objects else "checksum-unreadable"
                yield Finding(kind, Severity.ERROR, str(error), objects.get(where, fqn), where)
            else:
                yield from _told(sums, where.path, where.offset, fqn, objects.get(where))
        elif head.startswith(_ZSTD) and where not in tensors:
            yield from _in_frame(source, where, objects.get(where), kinds)
        elif where in saved:
            said = "the object begins neither as a zip nor as a zstd frame, one of which torch writes"
            yield Finding("damaged-object", Severity.ERROR, said, objects[where], where)
    for entry, fqn in _compressed(manifest):
        if entry.part is None or entry.part.end > source.listing.sizes.get(entry.part.path, -1):
            continue
        content = b"".join(decoded_blocks(source.store, entry.part, entry.codec or ""))
        if content[:2] == b"PK":
            place = f"{entry.part.path}:{entry.part.offset}"
            edges = content[:_EDGE_NBYTES], content[-_EDGE_NBYTES:]
            found = kinds.sums(partial(_cut, content), len(content), *edges, where=place)
            yield from _told(found, entry.path, 0, fqn, None)


def _told(
    sums: Iterable[MemberSum | Fault], path: str, start: int, fqn: str | None, owner: str | None
) -> Iterator[Checksum | Finding]:
    """What was found in the item at ``start`` of ``path``, which holds a piece of ``fqn``, or the object ``owner``."""
    for found in sums:
        if isinstance(found, Fault):
            yield finding_of_fault(found, path, start)
        else:
            name, offset, nbytes, crc = found
            named = owner if fqn is None else fqn if name.startswith("data/") else None
            yield Checksum(FileRange(path, start + offset, nbytes), crc, named)


def _in_frame(source: Source, where: FileRange, fqn: str | None, kinds: ItemKinds) -> Iterator[Finding]:
    """What is wrong with a compressed object, or an item without elements; decoded whole."""
    content = b"".join(decoded_blocks(source.store, where, "zstd"))
    if content[:2] != b"PK":
        return
    edges = content[:_EDGE_NBYTES], content[-_EDGE_NBYTES:]
    for found in kinds.sums(partial(_cut, content), len(content), *edges, where=f"{where.path}:{where.offset}"):
        if isinstance(found, Fault):
            yield finding_of_fault(found, where.path, where.offset)
            continue
        name, start, nbytes, crc = found
        got = crc32(content[start : start + nbytes])
        if got != crc:
            said = f"{name} in the zstd frame here has CRC-32 {got:08x}, expected the recorded {crc:08x}"
            yield Finding("crc-mismatch", Severity.ERROR, said, fqn, where)


def _cut(content: bytes, offset: int, length: int) -> bytes:
    return content[offset : offset + length]


def _compressed(manifest: Manifest) -> Iterator[tuple[FileEntry, str]]:
    """Items that are stored compressed, and their tensors."""
    chunks = manifest.chunks
    coded = np.array([entry.codec is not None for entry in manifest.files], dtype=np.bool_)
    for row in np.flatnonzero(coded[chunks.file]).tolist() if coded.any() else ():
        yield manifest.files.entries[chunks.file[row]], manifest.tensors.fqns[chunks.tensor[row]]


def _items(manifest: Manifest) -> tuple[dict[FileRange, str], dict[FileRange, str]]:
    """Stored items of tensors and of objects, with their fqns."""
    chunks = manifest.chunks
    tensors = {
        item_of(manifest, row): manifest.tensors.fqns[chunks.tensor[row]]
        for row in np.flatnonzero(chunks.flags & ChunkFlag.UNRESOLVED).tolist()
        if manifest.files.entries[chunks.file[row]].codec is None
    }
    objects = {b.where: b.fqn for b in manifest.blobs if b.where is not None}
    return tensors, objects


def item_of(manifest: Manifest, row: int) -> FileRange:
    """The stored bytes of an unresolved chunk's item."""
    chunks, entry = manifest.chunks, manifest.files.entries[manifest.chunks.file[row]]
    return entry.part or FileRange(entry.path, int(chunks.offset[row]), int(chunks.length[row]))


def file_findings(source: Source, manifest: Manifest) -> Iterator[Finding]:
    """``missing-file`` (with the tensors in it), ``cut-file`` and ``unknown-file``; without a request."""
    listing = source.listing
    ends = _ends(manifest)
    for path in sorted(ends):
        nbytes = listing.sizes.get(path)
        if nbytes is None:
            names = _names_in(manifest, path)
            held = f"{counted(len(names), 'entry')}: {some_of(names, _NAMES_SHOWN)}"
            message = f"the file is missing; it holds parts of {held}"
            yield Finding("missing-file", Severity.ERROR, message, where=FileRange(path, 0, ends[path]))
        elif ends[path] > nbytes:
            message = (
                f"the file has {counted(nbytes, 'byte')}, expected {ends[path]:,}: {ends[path] - nbytes:,} are missing"
            )
            yield Finding("cut-file", Severity.ERROR, message, where=FileRange(path, nbytes, ends[path] - nbytes))
    known = {*ends, *(where.path for where in _other_items(manifest))}
    folders = {"", *(path.rpartition("/")[0] for path in ends)}
    for path in listing.paths:
        if not path.endswith(".distcp") or path.rpartition("/")[0] not in folders:
            continue
        # A rank with nothing to write leaves an empty file, which nothing refers to.
        if path not in known and listing.nbytes(path):
            message = (
                f"{counted(listing.nbytes(path), 'byte')} that the metadata does not refer to: left by an earlier save?"
            )
            yield Finding("unknown-file", Severity.WARNING, message, where=FileRange(path, 0, listing.nbytes(path)))


def _other_items(manifest: Manifest) -> list[FileRange]:
    """Items of chunks without elements, which may have a file to themselves and are missed nowhere."""
    return [] if manifest.items is None else manifest.items.ranges(manifest.files)


def _ends(manifest: Manifest) -> dict[str, int]:
    """By file, the byte behind the last item that lies in it."""
    chunks, entries = manifest.chunks, manifest.files.entries
    behind = np.zeros(len(entries), dtype=np.uint64)  # where metadata are damaged, sums leave int64
    np.maximum.at(behind, chunks.file, chunks.offset.astype(np.uint64) + chunks.length.astype(np.uint64))
    ends: dict[str, int] = defaultdict(int)
    for row in distinct(chunks.file).tolist():
        part = entries[row].part
        path, end = (entries[row].path, int(behind[row])) if part is None else (part.path, part.end)
        ends[path] = max(ends[path], end)
    for blob in manifest.blobs:
        if blob.where is not None:
            ends[blob.where.path] = max(ends[blob.where.path], blob.where.end)
    return ends


def _names_in(manifest: Manifest, path: str) -> list[str]:
    """Tensors and objects of which something lies in a file, sorted."""
    entries = manifest.files.entries
    files = [row for row, entry in enumerate(entries) if (entry.part or entry).path == path]
    rows = distinct(manifest.chunks.tensor[np.isin(manifest.chunks.file, files)])
    objects = {blob.fqn for blob in manifest.blobs if blob.where is not None and blob.where.path == path}
    return sorted({manifest.tensors.fqns[row] for row in rows.tolist()} | objects)


def _edges(source: Source, places: Sequence[FileRange]) -> Iterator[tuple[FileRange, bytes, bytes]]:
    """First and last bytes of each item."""
    paths = sorted({where.path for where in places})
    number = {path: index for index, path in enumerate(paths)}
    file, offset, length = (
        np.array(column, dtype=np.int64)
        for column in ([number[w.path] for w in places], [w.offset for w in places], [w.length for w in places])
    )
    edge = np.minimum(length, _EDGE_NBYTES)
    waiting: dict[int, bytes] = {}
    both = read_merged(
        source.store,
        paths,
        np.concatenate([file, file]),
        np.concatenate([offset, offset + length - edge]),
        np.concatenate([edge, edge]),
    )
    for position, view in both:
        row = position % len(places)
        other = waiting.pop(row, None)
        if other is None:
            waiting[row] = bytes(view)
        else:
            head, tail = (other, bytes(view)) if position >= len(places) else (bytes(view), other)
            yield places[row], head, tail


def _item_sums(
    source: Source, where: FileRange, head: bytes, tail: bytes, kinds: ItemKinds
) -> Iterator[MemberSum | Fault]:
    """Checksums of ``data.pkl`` and ``data/*`` of one item, and what is wrong around them; places within the item."""

    def read(offset: int, length: int) -> bytes:
        if offset + length <= len(head):
            return head[offset : offset + length]
        behind = offset - (where.length - len(tail))
        if behind >= 0:
            return tail[behind : behind + length]
        return source.store.read(where.path, where.offset + offset, length)

    yield from kinds.sums(read, where.length, head, tail, where=f"{where.path}:{where.offset}")
