"""Boxes placed as items in the files of ranks: where each item lies, and every byte around the payloads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from ckpt_tool.errors import LayoutError
from ckpt_tool.formats._dcp.item_lengths import item_lengths
from ckpt_tool.formats._dcp.metadata_pickle import WrittenChunks, WrittenItem, WrittenTensor
from ckpt_tool.formats._dcp.written_items import ItemKind, ItemKinds, is_writable
from ckpt_tool.formats._element_types import check_types
from ckpt_tool.formats.base import BoxTable, Segment
from ckpt_tool.geometry.overlaps import exact_duplicates
from ckpt_tool.manifest.model import KeyPath
from ckpt_tool.manifest.tables import IntArray, TensorTable
from ckpt_tool.records import dataclass, field

__all__ = ["GrowingFiles", "PlacedItems", "check_dtypes", "place_boxes", "sealed", "written_tensors"]


@dataclass
class GrowingFiles:
    """Files while they grow, and the bytes in them that are no payload."""

    nbytes: dict[str, int] = field(default_factory=dict)
    segments: list[Segment] = field(default_factory=list)
    """Whole items, and parts of them that are not those of `PlacedItems`."""

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


@dataclass(frozen=True, slots=True, eq=False)
class PlacedItems:
    """One row per box: its item."""

    tensors: TensorTable
    boxes: BoxTable
    paths: tuple[str, ...]
    file: npt.NDArray[np.int32]
    """Row of ``paths``; items of a file follow each other in the order of rows."""
    item_offset: IntArray
    item_nbytes: IntArray
    head_nbytes: IntArray
    payload_nbytes: IntArray
    extra: dict[int, WrittenItem]
    """Items of empty tensors that have no box: torch loads one for every tensor."""

    def kinds(self, rows: IntArray) -> Iterator[ItemKind]:
        """The kind of each item, laid out when it is asked for."""
        kinds_of = ItemKinds()
        tensor = self.boxes.tensor[rows].tolist()
        sizes, ndim = self.boxes.sizes[rows].tolist(), self.tensors.ndim.tolist()
        for number, extent in zip(tensor, sizes, strict=True):
            yield kinds_of.kind(self.tensors.dtypes[number], tuple(extent[: ndim[number]]))

    def segments(self) -> Iterator[Segment]:
        """Everything between payloads of a file: one segment from the end of a payload to the start of the next."""
        between: dict[tuple[int, int], bytes] = {}
        last_file, position, before = -1, 0, None
        order = np.argsort(self.file, kind="stable")
        rows = zip(self.file[order].tolist(), self.item_offset[order].tolist(), self.kinds(order), strict=True)
        for file, offset, kind in rows:
            if file != last_file:
                if before is not None:
                    yield Segment(self.paths[last_file], position, before.rear(0))
                last_file, position, before = file, offset, None
            key = (id(before), id(kind))
            data = between.get(key)
            if data is None:
                data = between[key] = (b"" if before is None else before.rear(0)) + kind.head
            yield Segment(self.paths[file], position, data)
            position = offset + len(kind.head) + kind.payload_nbytes
            before = kind
        if before is not None:
            yield Segment(self.paths[last_file], position, before.rear(0))


def check_dtypes(tensors: TensorTable) -> None:
    """Nothing, when torch has plain tensors of all these dtypes.

    Raises:
        Unsupported: it has not; the message names each dtype with a tensor.
    """
    check_types(tensors, "torch has no plain tensors of", lambda kind, _: is_writable(kind))


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
    item_nbytes, head_nbytes, payload_nbytes = item_lengths(tensors, boxes)
    is_used = np.zeros(int(boxes.rank.max(initial=-1)) + 1, dtype=bool)
    is_used[boxes.rank] = True
    file = (np.cumsum(is_used, dtype=np.int32) - 1)[boxes.rank]
    paths = tuple(path_of(rank) for rank in np.flatnonzero(is_used).tolist())
    # Of 16 bits numpy sorts by radix, many times faster.
    order = np.argsort(file.astype(np.uint16) if len(paths) < 1 << 16 else file, kind="stable")
    first = np.searchsorted(file[order], np.arange(len(paths) + 1))
    before = np.zeros(len(boxes) + 1, dtype=np.int64)
    np.cumsum(item_nbytes[order], out=before[1:])
    starts = [files.extend(path, nbytes) for path, nbytes in zip(paths, np.diff(before[first]).tolist(), strict=True)]
    offsets = np.empty(len(boxes), dtype=np.int64)
    offsets[order] = before[:-1]
    offsets += (np.array(starts, dtype=np.int64) - before[first[:-1]])[file]
    extra: dict[int, WrittenItem] = {}
    has_box = np.bincount(boxes.tensor, minlength=len(tensors)) > 0
    has_box[list(elsewhere)] = True
    kinds_of = ItemKinds()
    for row in np.flatnonzero(~has_box).tolist():
        if tensors.numel[row]:
            raise LayoutError("no box of the tensor is to be stored", where=tensors.fqns[row])
        kind = kinds_of.kind(tensors.dtypes[row], tensors.shape_of(row))
        extra[row] = files.append(path_of(0), kind.head + kind.rear(0))
    return PlacedItems(
        tensors=tensors,
        boxes=boxes,
        paths=paths,
        file=file,
        item_offset=offsets,
        item_nbytes=item_nbytes,
        head_nbytes=head_nbytes,
        payload_nbytes=payload_nbytes,
        extra=extra,
    )


def sealed(placed: PlacedItems, crc32s: npt.NDArray[np.uint32]) -> Iterator[Segment]:
    """The end of every item once more, with the checksum of its payload."""
    rows = np.flatnonzero(placed.payload_nbytes > 0)
    starts = (placed.item_offset + placed.head_nbytes + placed.payload_nbytes)[rows].tolist()
    columns = (placed.kinds(rows), placed.file[rows].tolist(), starts, crc32s[rows].tolist())
    for kind, file, start, crc32 in zip(*columns, strict=True):
        yield Segment(placed.paths[file], start, kind.rear(crc32))


def written_tensors(
    tensors: TensorTable,
    boxes: BoxTable,
    placed: PlacedItems,
    names: Sequence[tuple[str, KeyPath]],
    elsewhere: Collection[int] = (),
) -> tuple[list[WrittenTensor], WrittenChunks]:
    """The records of all tensors with their chunks, but for the rows ``elsewhere``; ``names`` has one for each row.

    Raises:
        LayoutError: two boxes of a tensor begin at the same place.
    """
    tensor = boxes.tensor.astype(np.int64)
    # Of boxes that begin at the same place at most one may have elements; the empty ones need no record beside it.
    place = exact_duplicates(boxes.offsets, boxes.offsets[:, :0], tensor)
    is_full = placed.payload_nbytes > 0
    n_full = np.bincount(place[is_full], minlength=len(boxes))
    if n_full.max(initial=0) > 1:
        _raise_same_start(tensors, boxes, np.flatnonzero(is_full & (place == np.argmax(n_full > 1))))
    kept = np.flatnonzero(is_full | ((n_full[place] == 0) & (place == np.arange(len(boxes)))))
    extra = sorted(placed.extra.items())
    if len(kept) == len(boxes) and not extra and (tensor[1:] >= tensor[:-1]).all():
        columns = WrittenChunks(
            placed.paths, boxes.offsets, boxes.sizes, placed.file, placed.item_offset, placed.item_nbytes
        )
    else:
        tensor, columns = _by_tensor(tensors, boxes, placed, kept, extra)
    n_chunks = np.bincount(tensor, minlength=len(tensors)).tolist()
    written = [
        WrittenTensor(name, dtype, tensors.shapes[row], path, n_chunks[row])
        for row, ((name, path), dtype) in enumerate(zip(names, tensors.dtypes, strict=True))
        if row not in elsewhere
    ]
    return written, columns


def _by_tensor(
    tensors: TensorTable,
    boxes: BoxTable,
    placed: PlacedItems,
    kept: IntArray,
    extra: Sequence[tuple[int, WrittenItem]],
) -> tuple[IntArray, WrittenChunks]:
    """Tensor and columns of the rows ``kept`` and of ``extra`` items, in the order of tensors."""
    extra_rows = np.array([row for row, _ in extra], dtype=np.int64)
    tensor = np.concatenate([boxes.tensor[kept].astype(np.int64), extra_rows])
    order = np.argsort(tensor, kind="stable")
    width = boxes.offsets.shape[1]
    columns = WrittenChunks(
        (*placed.paths, *(item.path for _, item in extra)),
        np.concatenate([boxes.offsets[kept], np.zeros((len(extra), width), dtype=np.int64)])[order],
        np.concatenate([boxes.sizes[kept], tensors.shape[extra_rows, :width]])[order],
        np.concatenate([placed.file[kept], len(placed.paths) + np.arange(len(extra))])[order],
        np.concatenate([placed.item_offset[kept], [item.offset for _, item in extra]]).astype(np.int64)[order],
        np.concatenate([placed.item_nbytes[kept], [item.length for _, item in extra]]).astype(np.int64)[order],
    )
    return tensor, columns


def _raise_same_start(tensors: TensorTable, boxes: BoxTable, rows: IntArray) -> NoReturn:
    tensor = int(boxes.tensor[rows[0]])
    ndim = int(tensors.ndim[tensor])
    start, one, other = (
        column[row, :ndim].tolist()
        for column, row in ((boxes.offsets, rows[0]), (boxes.sizes, rows[0]), (boxes.sizes, rows[1]))
    )
    raise LayoutError(f"two boxes begin at {start}: sizes {one} and {other}", where=tensors.fqns[tensor])
