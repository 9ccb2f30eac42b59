"""From items to elements, where one item may hold several boxes: flattened and bucketed optimizer state.

Boxes of one item stand in the chunk table in the item's order and cover it, so a box begins where the ones before it
end. That holds for whole manifests and for selections of tensors: an item belongs to one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ckpt_tool.errors import CkptError, FormatError
from ckpt_tool.formats._dcp.items import HEAD_NBYTES, ItemHeads, Payload, item_fault, payload_from_directory
from ckpt_tool.formats._merged import read_merged
from ckpt_tool.formats.base import Source
from ckpt_tool.geometry.columns import distinct
from ckpt_tool.manifest.model import FileRange, Manifest
from ckpt_tool.manifest.tables import ChunkFlag, ChunkTable, IntArray
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["Located", "located_items", "resolve"]


@dataclass(frozen=True, slots=True)
class Located:
    """One item with the place of its elements, or with what is wrong about it."""

    item: FileRange
    rows: IntArray
    """Rows of the chunk table that are boxes of it and not resolved yet."""
    payload: Payload | None
    """Offsets counted from the item's first byte."""
    error: CkptError | None = None


def resolve(source: Source, manifest: Manifest, rows: IntArray) -> ChunkTable:
    """The chunks of ``manifest``, those of ``rows`` with exact place and flags.

    Requests: one of 1 KiB per item at most; items within ``store.cost.max_gap_bytes`` of each other share one. An item
    whose head does not tell (rewritten by another tool) costs seven more.

    Raises:
        FormatError: an item is not where the metadata says, or holds another dtype or number of elements.
        NotFound: the file is missing.
    """
    chunks = manifest.chunks
    offset, length, flags = chunks.offset.copy(), chunks.length.copy(), chunks.flags.copy()
    itemsize = manifest.tensors.bits[chunks.tensor] // 8
    starts = _Boxes(manifest)
    for located in located_items(source, manifest, rows):
        if located.error is not None or located.payload is None:
            raise located.error or FormatError("no payload", where=str(located.item))
        own = located.rows
        offset[own] = located.item.offset + located.payload.offset + starts.first[own] * itemsize[own]
        length[own] = chunks.volume[own] * itemsize[own]
        flags[own] = located.payload.flags
    return chunks.replace(offset=offset, length=length, flags=flags)


def located_items(source: Source, manifest: Manifest, rows: IntArray) -> Iterator[Located]:
    """The place of each item that unresolved chunks of ``rows`` are boxes of; requests as `resolve` says."""
    chunks, paths = manifest.chunks, manifest.files.paths
    wanted = distinct(np.asarray(rows, dtype=np.int64))
    wanted = wanted[(chunks.flags[wanted] & ChunkFlag.UNRESOLVED) != 0]
    order = wanted[np.lexsort((wanted, chunks.offset[wanted], chunks.file[wanted]))]
    is_new = (np.diff(chunks.file[order], prepend=-1) != 0) | (np.diff(chunks.offset[order], prepend=-1) != 0)
    groups = np.split(order, np.flatnonzero(is_new)[1:]) if len(order) else []
    items = [FileRange(paths[chunks.file[g[0]]], int(chunks.offset[g[0]]), int(chunks.length[g[0]])) for g in groups]
    boxes = _Boxes(manifest)
    heads = ItemHeads()
    present = []
    for number, item in enumerate(items):
        fqn = manifest.tensors.fqns[chunks.tensor[groups[number][0]]]
        error = item_fault(source.listing.sizes, item, fqn, is_chunk=True)
        if error is None:
            present.append(number)
        else:
            yield Located(item, groups[number], None, error)
    columns = [
        np.array(column, dtype=np.int64).reshape(-1)
        for column in (
            [chunks.file[groups[n][0]] for n in present],
            [items[n].offset for n in present],
            [min(items[n].length, HEAD_NBYTES) for n in present],
        )
    ]
    for position, head in read_merged(source.store, paths, *columns):
        number = present[position]
        yield _located(source, manifest, boxes, heads, items[number], groups[number], head)


class _Boxes:
    """Of every chunk: the first of its item's elements (``first``), and the number of all of them (``total``)."""

    def __init__(self, manifest: Manifest) -> None:
        chunks = manifest.chunks
        begin = _item_offsets(chunks)
        order = np.lexsort((np.arange(len(chunks)), begin, chunks.file))
        volume = chunks.volume[order]
        is_new = (np.diff(chunks.file[order], prepend=-1) != 0) | (np.diff(begin[order], prepend=-1) != 0)
        group = np.cumsum(is_new) - 1
        before = np.cumsum(volume) - volume
        totals = np.add.reduceat(volume, np.flatnonzero(is_new)) if len(order) else volume
        self.first = np.zeros(len(chunks), dtype=np.int64)
        self.first[order] = before - before[is_new][group]
        self.total = np.zeros(len(chunks), dtype=np.int64)
        self.total[order] = totals[group]


def _item_offsets(chunks: ChunkTable) -> IntArray:
    """int64[n]: where each chunk's item begins; a resolved chunk lies inside the item that unresolved ones name."""
    begin = chunks.offset.copy()
    is_open = (chunks.flags & ChunkFlag.UNRESOLVED) != 0
    if bool(is_open.all()) or not bool(is_open.any()):
        return begin
    items = np.flatnonzero(is_open)
    items = items[np.lexsort((chunks.offset[items], chunks.file[items]))]
    done = np.flatnonzero(~is_open)
    for file in distinct(chunks.file[done]).tolist():
        own, named = done[chunks.file[done] == file], items[chunks.file[items] == file]
        if not len(named):
            continue
        at = np.searchsorted(chunks.offset[named], chunks.offset[own], side="right") - 1
        nearest = named[np.maximum(at, 0)]
        inside = (at >= 0) & (chunks.offset[own] < chunks.offset[nearest] + chunks.length[nearest])
        begin[own[inside]] = chunks.offset[nearest[inside]]
    return begin


def _located(
    source: Source,
    manifest: Manifest,
    boxes: _Boxes,
    heads: ItemHeads,
    item: FileRange,
    rows: IntArray,
    head: memoryview,
) -> Located:
    where = f"{item.path}:{item.offset}"

    def read(offset: int, length: int) -> bytes:
        return source.store.read(item.path, item.offset + offset, length)

    try:
        if bytes(head[:2]) != b"PK":
            raise FormatError("expected a torch.save zip here", where=where)
        payload = heads.payload(head, where) or payload_from_directory(read, item.length, where)
        if payload.end > item.length:
            raise FormatError(f"the tensor ends at byte {payload.end:,} of an item of {item.length:,}", where=where)
        _check(manifest, payload, rows, int(boxes.total[rows[0]]), where)
    except CkptError as error:
        return Located(item, rows, None, error)
    return Located(item, rows, payload)


def _check(manifest: Manifest, payload: Payload, rows: IntArray, total: int, where: str) -> None:
    """Nothing, when the stored tensor is the box of its chunk, or the flat elements of its chunks."""
    chunks, tensors = manifest.chunks, manifest.tensors
    tensor = int(chunks.tensor[rows[0]])
    sizes = tuple(chunks.sizes[rows[0], : tensors.ndim[tensor]].tolist())
    is_box = payload.shape == sizes
    is_flat = all(size == 1 for size in payload.shape[:-1]) and payload.shape[-1:] == (total,)
    if payload.dtype.name != tensors.dtypes[tensor].name or not (is_box or is_flat) or payload.strides is not None:
        raise FormatError(
            f"{tensors.fqns[tensor]!r} is to have {counted(total, 'element')} of {tensors.dtypes[tensor].name} here, "
            f"box {list(sizes)}; the stored tensor is {payload.dtype.name}{list(payload.shape)}",
            where=where,
        )
