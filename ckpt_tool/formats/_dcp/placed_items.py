"""Boxes placed as items in the files of ranks: where each item lies, and every byte around the payloads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ckpt_tool.errors import LayoutError, Unsupported
from ckpt_tool.formats._dcp.metadata_pickle import WrittenChunk, WrittenItem, WrittenTensor
from ckpt_tool.formats._dcp.written_items import ItemKind, ItemKinds, is_writable
from ckpt_tool.formats.base import BoxTable, Segment
from ckpt_tool.manifest.model import KeyPath
from ckpt_tool.manifest.tables import IntArray, TensorTable

__all__ = ["GrowingFiles", "PlacedItems", "check_dtypes", "place_boxes", "sealed", "written_tensors"]


@dataclass
class GrowingFiles:
    """Files while they grow, and the bytes in them that are no payload."""

    nbytes: dict[str, int] = field(default_factory=dict)
    segments: list[Segment] = field(default_factory=list)

    def extend(self, path: str, nbytes: int) -> int:
        """Offset of the next ``nbytes`` of ``path``."""
        offset = self.nbytes.get(path, 0)
        self.nbytes[path] = offset + nbytes
        return offset

    def append(self, path: str, data: bytes) -> WrittenItem:
        """The place of ``data``, an item that is known as a whole."""
        offset = self.extend(path, len(data))
        self.segments.append(Segment(path, offset, data))
        return WrittenItem(path, offset, len(data))


@dataclass(frozen=True, slots=True)
class PlacedItems:
    """One row per box: its item."""

    paths: tuple[str, ...]
    file: IntArray
    item_offset: IntArray
    head_nbytes: IntArray
    payload_nbytes: IntArray
    kinds: list[ItemKind]
    extra: dict[int, WrittenItem]
    """Items of empty tensors that have no box: torch loads one for every tensor."""


def check_dtypes(tensors: TensorTable) -> None:
    """Nothing, when torch has plain tensors of all these dtypes.

    Raises:
        Unsupported: it has not; the message names each dtype with a tensor.
    """
    refused = {d.name: fqn for d, fqn in zip(tensors.dtypes, tensors.fqns, strict=True) if not is_writable(d)}
    if refused:
        listed = ", ".join(f"{name} ({fqn!r})" for name, fqn in sorted(refused.items()))
        raise Unsupported(f"torch has no plain tensors of these types: {listed}", hint="leave them out with --exclude")


def place_boxes(
    tensors: TensorTable,
    boxes: BoxTable,
    files: GrowingFiles,
    path_of: Callable[[int], str],
    elsewhere: Collection[int] = (),
) -> PlacedItems:
    """Items of boxes, by rank and then in the order of rows.

    Args:
        tensors: what the boxes are of.
        boxes: what is to be stored.
        files: grow by the items.
        path_of: the file of a rank.
        elsewhere: rows of ``tensors`` that are stored otherwise and need no box.

    Raises:
        LayoutError: a tensor with elements has no box.
    """
    n = len(boxes)
    kinds_of = ItemKinds()
    ndim = tensors.ndim[boxes.tensor].tolist()
    sizes = boxes.sizes.tolist()
    dtypes = [tensors.dtypes[row] for row in boxes.tensor.tolist()]
    kinds = [kinds_of.kind(d, tuple(s[:m])) for d, s, m in zip(dtypes, sizes, ndim, strict=True)]
    ranks, file = np.unique(boxes.rank, return_inverse=True)
    paths = tuple(path_of(int(rank)) for rank in ranks)
    lengths = np.array([kind.nbytes for kind in kinds], dtype=np.int64)
    offsets = np.zeros(n, dtype=np.int64)
    for number, path in enumerate(paths):
        rows = np.flatnonzero(file == number)
        start = files.extend(path, int(lengths[rows].sum()))
        offsets[rows] = start + np.cumsum(lengths[rows]) - lengths[rows]
        _surround(path, kinds, rows, offsets, files)
    extra: dict[int, WrittenItem] = {}
    has_box = np.bincount(boxes.tensor, minlength=len(tensors)) > 0
    has_box[list(elsewhere)] = True
    for row in np.flatnonzero(~has_box).tolist():
        if tensors.numel[row]:
            raise LayoutError("no box of the tensor is to be stored", where=tensors.fqns[row])
        kind = kinds_of.kind(tensors.dtypes[row], tensors.shape_of(row))
        extra[row] = files.append(path_of(0), kind.head + kind.rear(0))
    return PlacedItems(
        paths=paths,
        file=file.astype(np.int64),
        item_offset=offsets,
        head_nbytes=np.array([len(kind.head) for kind in kinds], dtype=np.int64),
        payload_nbytes=np.array([kind.payload_nbytes for kind in kinds], dtype=np.int64),
        kinds=kinds,
        extra=extra,
    )


def _surround(path: str, kinds: list[ItemKind], rows: IntArray, offsets: IntArray, files: GrowingFiles) -> None:
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


def sealed(placed: PlacedItems, crc32s: npt.NDArray[np.uint32]) -> Iterator[Segment]:
    """The end of every item once more, with the checksum of its payload."""
    starts = (placed.item_offset + placed.head_nbytes + placed.payload_nbytes).tolist()
    for kind, file, start, crc32 in zip(placed.kinds, placed.file.tolist(), starts, crc32s.tolist(), strict=True):
        if kind.payload_nbytes:
            yield Segment(placed.paths[file], start, kind.rear(crc32))


def written_tensors(
    tensors: TensorTable,
    boxes: BoxTable,
    placed: PlacedItems,
    names: Sequence[tuple[str, KeyPath]],
    elsewhere: Collection[int] = (),
) -> list[WrittenTensor]:
    """The records of all tensors with their chunks, but for the rows ``elsewhere``; ``names`` has one for each row.

    Raises:
        LayoutError: two boxes of a tensor begin at the same place.
    """
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
    return [
        WrittenTensor(name, dtype, tensors.shape_of(row), path, list(chunks[row].values()))
        for row, ((name, path), dtype) in enumerate(zip(names, tensors.dtypes, strict=True))
        if row not in elsewhere
    ]
