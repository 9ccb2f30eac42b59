"""One rank's files are written from its staged memory: head, payload and rear of each box, front to back, once.

Payload goes from the arena to the file system without a copy, unless a tensor was staged in an order of memory that is
not row-major. Checksums run one block ahead in a thread of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ckpt_tool.engine.save.arena import StagedBox
from ckpt_tool.engine.save.sums import BoxPlace, BoxSums
from ckpt_tool.errors import StorageError
from ckpt_tool.formats.joint import RankLayOut
from ckpt_tool.manifest.model import KeyPath
from ckpt_tool.records import dataclass
from ckpt_tool.storage.shared_target import SharedFile, SharedTarget

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Cancelled", "WrittenFiles", "write_rank_files"]

BLOCK_NBYTES = 8 << 20


class Cancelled(Exception):
    """The save was given up while this rank was writing."""


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """What one rank wrote."""

    files: dict[str, int]
    """Path and size of each file, objects included."""
    objects: tuple[tuple[str, int, int], ...]
    """Path, offset and length of each object."""
    payload_nbytes: int
    receipts: dict[str, Any]
    """What storage said of each file, where it said something; see `SharedFile.finish`."""
    linear: bytes
    """What each box adds to its tensor's digest (`BoxSums.linear`); empty where no digests are taken."""


@dataclass(slots=True)
class _Block:
    """A stretch of a file: payload with its checksums under way."""

    path: str
    pieces: list[tuple[int, memoryview, bool, bool]]
    """Row of the box, its bytes, whether they are the first and the last ones of it."""
    nbytes: int = 0


def write_rank_files(
    target: SharedTarget,
    layout: RankLayOut,
    boxes: Sequence[StagedBox],
    memory: memoryview,
    objects: Sequence[tuple[KeyPath, bytes]],
    places: Sequence[BoxPlace] | None,
    *,
    is_cancelled: Callable[[], bool],
) -> WrittenFiles:
    """Write and make durable all files of a rank.

    Args:
        target: where they go.
        layout: what lies around the boxes.
        boxes: where each box of the layout is staged.
        memory: the arena.
        objects: keys and bytes of whole items.
        places: where the boxes lie in their tensors, for digests; None where none are taken.
        is_cancelled: asked between blocks.

    Raises:
        StorageError: the storage failed.
        Cancelled: ``is_cancelled`` said so.
    """
    files = dict(layout.files)
    placed = []
    for keys, data in objects:
        path = layout.object_path(keys)
        start = files.get(path, 0)
        placed.append((path, start, len(data)))
        files[path] = start + len(data)
    with _Open(target, files, layout.starts) as opened, ThreadPoolExecutor(1) as checker:
        sums = BoxSums(len(boxes), places)
        blocks = _blocks(layout, boxes, memory)
        block = next(blocks, None)
        checked = checker.submit(_check, block, sums)
        while block is not None:
            checked.result()
            following = next(blocks, None)
            checked = checker.submit(_check, following, sums)
            if is_cancelled():
                raise Cancelled
            opened.file(block.path).write(list(_buffers(block, layout, sums.crc32s)))
            block = following
        for (path, _, _), (_, data) in zip(placed, objects, strict=True):
            opened.file(path).write([memoryview(data)])
        receipts = opened.finish()
    linear = b"" if places is None else sums.linear()
    return WrittenFiles(files, tuple(placed), sum(box.nbytes for box in boxes), receipts, linear)


class _Open:
    """Files of one rank, in the making."""

    def __init__(self, target: SharedTarget, files: dict[str, int], starts: Mapping[str, bytes]) -> None:
        self._target = target
        self._nbytes = files
        self._starts = starts
        self._files: dict[str, SharedFile] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.abandon()

    def file(self, path: str) -> SharedFile:
        if path not in self._files:
            if path not in self._nbytes:
                raise StorageError("the layout has no such file", where=path)
            self._files[path] = self._target.create(path, self._nbytes[path])
            if self._starts.get(path):
                self._files[path].write([memoryview(self._starts[path])])
        return self._files[path]

    def finish(self) -> dict[str, Any]:
        said = {path: self.file(path).finish() for path in self._nbytes}
        return {path: receipt for path, receipt in said.items() if receipt is not None}


def _blocks(layout: RankLayOut, boxes: Sequence[StagedBox], memory: memoryview) -> Iterator[_Block]:
    """Payload in the layout's order, in blocks of about `BLOCK_NBYTES` of one file each."""
    block: _Block | None = None
    for row in layout.order.tolist():
        box, path = boxes[row], layout.paths[row]
        if block is not None and block.path != path:
            yield block
            block = None
        n_left = box.nbytes
        for piece in _payload(box, memory):
            if block is None:
                block = _Block(path, [])
            is_first, n_left = n_left == box.nbytes, n_left - piece.nbytes
            block.pieces.append((row, piece, is_first, n_left == 0))
            block.nbytes += piece.nbytes
            if block.nbytes >= BLOCK_NBYTES or len(block.pieces) >= 4096:
                yield block
                block = None
    if block is not None:
        yield block


def _payload(box: StagedBox, memory: memoryview) -> Iterator[memoryview]:
    """The box's packed bytes, in pieces of at most a block where they lie packed already."""
    if box.strides is None:
        end = box.offset + box.nbytes
        for start in range(box.offset, max(end, box.offset + 1), BLOCK_NBYTES):
            yield memory[start : min(start + BLOCK_NBYTES, end)]
        return
    steps = [stride * box.itemsize for stride in box.strides]
    kind = _bits(box.itemsize)
    elements: npt.NDArray[Any] = np.ndarray(box.sizes, kind, memory.toreadonly(), box.offset, steps)  # checks bounds
    yield from _packed(elements)


def _packed(elements: npt.NDArray[Any]) -> Iterator[memoryview]:
    """Elements in row-major order, in pieces of about a block; those that lie so are not copied."""
    nbytes = elements[:1].nbytes
    if nbytes > BLOCK_NBYTES and elements.ndim > 1:
        for each in elements:
            yield from _packed(each)
        return
    n = max(1, BLOCK_NBYTES // max(1, nbytes))
    for first in range(0, len(elements), n):
        yield np.ascontiguousarray(elements[first : first + n]).reshape(-1).view(np.uint8).data


def _bits(itemsize: int) -> npt.DTypeLike:
    return {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}[itemsize]


def _check(block: _Block | None, sums: BoxSums) -> None:
    if block is not None:
        for row, piece, _, is_last in block.pieces:
            sums.add(row, piece, is_last=is_last)


def _buffers(block: _Block, layout: RankLayOut, sums: Sequence[int]) -> Iterator[memoryview]:
    for row, piece, is_first, is_last in block.pieces:
        if is_first:
            yield memoryview(layout.heads[row])
        if piece.nbytes:
            yield piece
        if is_last:
            yield memoryview(layout.rear(row, sums[row]))
