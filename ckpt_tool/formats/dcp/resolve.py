"""From items to elements: the exact place of each chunk's payload, checked against what the metadata says of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ckpt_tool.errors import CkptError, FormatError
from ckpt_tool.formats._dcp.items import HEAD_NBYTES, ItemHeads, Payload, is_zip, item_fault, payload_from_directory
from ckpt_tool.formats._merged import read_merged
from ckpt_tool.formats.base import Source
from ckpt_tool.formats.dcp.blob import BlobTensor, header_nbytes, parse_blob
from ckpt_tool.formats.dcp.sidecar import Sidecar
from ckpt_tool.geometry.columns import distinct
from ckpt_tool.geometry.overlaps import first_equal
from ckpt_tool.manifest.model import FileRange, Manifest
from ckpt_tool.manifest.tables import ChunkFlag, ChunkTable, IntArray
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted
from ckpt_tool.storage.virtual.decode import decoded_blocks

__all__ = ["Located", "located_items", "resolve", "resolve_by_sidecar"]


@dataclass(frozen=True, slots=True)
class Located:
    """One chunk with the place of its elements, or with what is wrong about it."""

    row: int
    payload: Payload | None
    """Offsets counted from the file's (or decoded file's) first byte."""
    error: CkptError | None = None


@dataclass(frozen=True, slots=True)
class _Alike:
    """Chunks whose items differ in their elements only."""

    rows: list[int]
    payload: Payload
    """Offsets counted from the item's first byte."""


def resolve(source: Source, manifest: Manifest, rows: IntArray) -> ChunkTable:
    """The chunks of ``manifest``, those of ``rows`` with exact place, strides and flags.

    Requests: one per row at most, of ``HEAD_NBYTES``; rows whose items lie within ``store.cost.max_gap_bytes`` of each
    other share one. A safetensors blob with a long header costs one more, an item whose head does not tell (rewritten
    by another tool) seven more. Compressed items are read and decoded whole.

    Raises:
        FormatError: an item is not where the metadata says, or holds another dtype or shape.
        NotFound: the file is missing.
    """
    chunks = manifest.chunks
    offset, length, flags = chunks.offset.copy(), chunks.length.copy(), chunks.flags.copy()
    odd_strides: list[tuple[Sequence[int], tuple[int, ...]]] = []
    for located in _located_kinds(source, manifest, rows):
        if isinstance(located, _Alike):
            own: Sequence[int] = located.rows
            payload: Payload | None = located.payload
            starts: IntArray | int = chunks.offset[own]
        else:
            if located.error is not None:
                raise located.error
            own, payload, starts = [located.row], located.payload, 0
        if payload is None:
            continue
        offset[own], length[own], flags[own] = starts + payload.offset, payload.length, payload.flags
        if payload.strides is not None:
            odd_strides.append((own, payload.strides))
    strides = chunks.strides
    if odd_strides:
        strides = _packed(chunks.sizes) if strides is None else strides.copy()
        for own, found in odd_strides:
            strides[own, : len(found)] = found
    return chunks.replace(offset=offset, length=length, flags=flags, strides=strides)


def resolve_by_sidecar(sidecar: Sidecar, manifest: Manifest, rows: IntArray) -> ChunkTable | None:
    """`resolve` without a request; None where ``manifest`` is not that of the sidecar."""
    chunks, known = manifest.chunks, sidecar.tables.chunks
    rows = rows[(chunks.flags[rows] & ChunkFlag.UNRESOLVED) != 0]
    is_same = len(chunks) == len(known) and all(
        np.array_equal(getattr(chunks, name)[rows], getattr(known, name)[rows]) for name in ("file", "offset", "length")
    )
    if not is_same or len(manifest.files) != len(sidecar.tables.files):
        return None
    offset, length, flags = chunks.offset.copy(), chunks.length.copy(), chunks.flags.copy()
    offset[rows] = sidecar.payload_offset[rows]
    length[rows] = (chunks.volume * manifest.tensors.bits[chunks.tensor] // 8)[rows]
    flags[rows] = 0
    return chunks.replace(offset=offset, length=length, flags=flags)


def located_items(source: Source, manifest: Manifest, rows: IntArray) -> Iterator[Located]:
    """The place of each chunk of ``rows`` that is not resolved yet, in no order; requests as ``resolve`` says."""
    for located in _located_kinds(source, manifest, rows):
        if isinstance(located, _Alike):
            for row in located.rows:
                yield Located(row, located.payload.moved(int(manifest.chunks.offset[row])))
        else:
            yield located


def _located_kinds(source: Source, manifest: Manifest, rows: IntArray) -> Iterator[Located | _Alike]:
    """`located_items`, with those that are alike together: without a record for each, of which there may be many."""
    chunks, files = manifest.chunks, manifest.files
    rows = distinct(np.asarray(rows, dtype=np.int64))
    rows = rows[(chunks.flags[rows] & ChunkFlag.UNRESOLVED) != 0]
    is_coded = np.array([entry.codec is not None for entry in files], dtype=np.bool_)
    coded = is_coded[chunks.file[rows]] if len(rows) else np.zeros(0, dtype=np.bool_)
    reader = _ItemReader(source, manifest)
    nbytes = np.array([source.listing.sizes.get(path, -1) for path in files.paths], dtype=np.int64)
    is_suspect = coded | (chunks.offset[rows] + chunks.length[rows] > nbytes[chunks.file[rows]])
    for row in rows[is_suspect].tolist():
        error = reader.misplaced(row)
        yield reader.decoded(row) if error is None else Located(row, None, error)
    yield from reader.plain(rows[~is_suspect])


class _ItemReader:
    """Reads items of one manifest; remembers the heads and blobs that it has seen."""

    def __init__(self, source: Source, manifest: Manifest) -> None:
        self._store, self._listing = source.store, source.listing
        self._manifest = manifest
        self._heads = ItemHeads()
        self._blobs: dict[tuple[str, int], dict[str, BlobTensor]] = {}

    def item(self, row: int) -> FileRange:
        """The stored bytes of a chunk's item."""
        chunks, entry = self._manifest.chunks, self._manifest.files.entries[self._manifest.chunks.file[row]]
        return entry.part or FileRange(entry.path, int(chunks.offset[row]), int(chunks.length[row]))

    def fqn(self, row: int) -> str:
        """The tensor of a chunk."""
        fqn: str = self._manifest.tensors.fqns[self._manifest.chunks.tensor[row]]
        return fqn

    def misplaced(self, row: int) -> CkptError | None:
        """What is wrong when the item does not lie in its file."""
        return item_fault(self._listing.sizes, self.item(row), self.fqn(row), is_chunk=True)

    def plain(self, rows: IntArray) -> Iterator[Located | _Alike]:
        """Chunks whose items are stored as they are."""
        chunks, tensors, paths = self._manifest.chunks, self._manifest.tensors, self._manifest.files.paths
        offset, file = chunks.offset[rows], chunks.file[rows].astype(np.int64)
        length = np.minimum(self._manifest.files.nbytes[file] - offset, HEAD_NBYTES)
        _, of_tensor = tensors.kinds
        tensor, sizes = chunks.tensor[rows], chunks.sizes[rows].astype(np.int64)
        # Sizes are padded: [4] and [4, 1] look the same without the number of dimensions.
        columns = (of_tensor[tensor], tensors.ndim[tensor].astype(np.int64), chunks.length[rows], *sizes.T)
        kinds, numbered = first_equal(columns).tolist(), rows.tolist()
        alike: dict[tuple[int, int], _Alike] = {}
        known = self._heads.known
        for position, head in read_merged(self._store, paths, file, offset, length):
            payload = known(head)
            # What was checked once for a head, a type, sizes and a length need not be checked again.
            others = None if payload is None else alike.get((id(payload), kinds[position]))
            if others is not None:
                others.rows.append(numbered[position])
                continue
            located = self._located(numbered[position], head, None)
            yield located
            payload = known(head)
            if payload is not None and located.error is None:
                alike[id(payload), kinds[position]] = _Alike([], payload)
        yield from (each for each in alike.values() if each.rows)

    def decoded(self, row: int) -> Located:
        """A chunk whose item is compressed."""
        item = self.item(row)
        codec = self._manifest.files.entries[self._manifest.chunks.file[row]].codec
        try:
            content = b"".join(decoded_blocks(self._store, item, codec or ""))
        except CkptError as error:
            return Located(row, None, error)
        return self._located(row, memoryview(content)[:HEAD_NBYTES], content)

    def _located(self, row: int, head: memoryview, content: bytes | None) -> Located:
        """``content`` is the whole item where it was decoded; its offsets count from 0."""
        item = self.item(row)
        where = f"{item.path}:{item.offset}"
        start = item.offset if content is None else 0
        try:
            if is_zip(head):
                payload = self._heads.payload(head, where) or self._by_directory(item, content, where)
                nbytes = item.length if content is None else len(content)
                if payload.end > nbytes:
                    raise FormatError(f"the tensor ends at byte {payload.end:,} of an item of {nbytes:,}", where=where)
            else:
                payload = self._in_blob(row, item, head, where)
            self._check(row, payload, where)
        except CkptError as error:
            return Located(row, None, error)
        return Located(row, payload.moved(start))

    def _by_directory(self, item: FileRange, content: bytes | None, where: str) -> Payload:
        def read(offset: int, length: int) -> bytes:
            if content is not None:
                return content[offset : offset + length]
            return self._store.read(item.path, item.offset + offset, length)

        return payload_from_directory(read, item.length if content is None else len(content), where)

    def _in_blob(self, row: int, item: FileRange, head: memoryview, where: str) -> Payload:
        key = (item.path, item.offset)
        tensors = self._blobs.get(key)
        if tensors is None:
            available = self._listing.nbytes(item.path) - item.offset
            nbytes = header_nbytes(bytes(head[:9]), available, where)
            header = bytes(head[:nbytes]) if nbytes <= len(head) else self._store.read(item.path, item.offset, nbytes)
            tensors = self._blobs[key] = parse_blob(header, where)
        tensor = tensors.get(self.fqn(row))
        if tensor is None:
            raise FormatError(f"the safetensors blob here has no {self.fqn(row)!r}", where=where)
        offsets = self._offsets(row)
        if tensor.saved_offsets not in (None, offsets):
            raise FormatError(
                f"the chunk of {self.fqn(row)!r} at {list(offsets)} was overwritten by the one at "
                f"{list(tensor.saved_offsets or ())}: a safetensors blob holds one chunk of each tensor",
                where=where,
            )
        end = tensor.offset + tensor.length
        available = self._listing.nbytes(item.path) - item.offset
        if end > available:
            raise FormatError(
                f"{self.fqn(row)!r} ends {counted(end - available, 'byte')} behind the file's end", where=where
            )
        return Payload(tensor.dtype, tensor.shape, tensor.offset, tensor.length, None, 0, end)

    def _offsets(self, row: int) -> tuple[int, ...]:
        chunks = self._manifest.chunks
        return tuple(chunks.offsets[row, : self._manifest.tensors.ndim[chunks.tensor[row]]].tolist())

    def _check(self, row: int, payload: Payload, where: str) -> None:
        chunks, tensors = self._manifest.chunks, self._manifest.tensors
        tensor = int(chunks.tensor[row])
        sizes = tuple(chunks.sizes[row, : tensors.ndim[tensor]].tolist())
        dtype = tensors.dtypes[tensor]
        if payload.shape != sizes or payload.dtype.name != dtype.name:
            raise FormatError(
                f"the chunk of {self.fqn(row)!r} at {list(self._offsets(row))} is {dtype.name}{list(sizes)} in the "
                f"metadata, the stored tensor is {payload.dtype.name}{list(payload.shape)}",
                where=where,
            )


def _packed(sizes: IntArray) -> IntArray:
    """int64[n, D]: row-major strides of boxes, in elements."""
    strides = np.ones_like(sizes)
    for dim in range(sizes.shape[1] - 2, -1, -1):
        strides[:, dim] = strides[:, dim + 1] * sizes[:, dim + 1]
    return strides
