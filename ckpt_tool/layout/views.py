"""A view shows the bytes of a checkpoint under other names and boxes: nothing is copied, only coordinates change.

Splitting a fused tensor, joining one from parts, taking a layer out of a stack, transposing, dropping padding rows,
telling even rows from odd ones, and the inverse of each, are lists of boxes: this box of that source tensor, or every
n-th element of it, is that box of this target tensor. Chunks are cut by the boxes and keep their place in their files;
what is no longer packed gets strides.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ckpt_tool.errors import LayoutError
from ckpt_tool.geometry.box import Box
from ckpt_tool.geometry.join import Boxes, join_boxes
from ckpt_tool.geometry.runs import contiguous_strides_columns
from ckpt_tool.manifest.merge import stacked_chunks
from ckpt_tool.manifest.model import ZEROS, FileEntry, KeyPath, Manifest, TensorMeta
from ckpt_tool.manifest.tables import ChunkFlag, ChunkTable, FileTable, IntArray, TensorTable
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["Part", "View", "apply_views"]


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a source tensor that becomes a box of the view's target tensor."""

    source_fqn: str
    source: Box
    """In global coordinates of the source tensor."""
    target_offsets: tuple[int, ...]
    """Where its first element goes, in global coordinates of the target tensor."""
    axes: tuple[int, ...]
    """Source dimension that each target dimension runs along, -1 for a new one; those left out have size 1."""
    steps: tuple[int, ...] | None = None
    """Per source dimension, 2 to take every second element; ``source.sizes`` count what is taken. None: all 1."""

    @property
    def span(self) -> Box:
        """The box from the first element taken to the last, in global coordinates of the source tensor."""
        if self.steps is None:
            return self.source
        sizes = zip(self.source.sizes, self.steps, strict=True)
        return Box(self.source.offsets, tuple((size - 1) * step + 1 if size else 0 for size, step in sizes))


@dataclass(frozen=True, slots=True)
class View:
    """One target tensor, made of parts (and zeros) that fill it exactly once."""

    fqn: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    zeros: tuple[Box, ...] = ()
    """Boxes of the target that no source has: padding, which is zero."""
    path: KeyPath | None = None
    """Its keys; None for those of the first source with ``fqn`` as the last."""


def apply_views(manifest: Manifest, views: Sequence[View], *, keep: Sequence[str] = ()) -> Manifest:
    """The manifest of the views' targets, in order, then of the tensors named in ``keep`` as they are.

    A target has the dtype, section and outer keys of its first source. Chunks must be resolved.

    Raises:
        LayoutError: a part leaves its source or its target, its parts do not add up to the target's volume, or their
            dtypes differ.
    """
    kept = [_identity(manifest, fqn) for fqn in keep]
    wanted = [*views, *kept]
    records = [_record(manifest, view) for view in views] + [manifest.tensor(fqn) for fqn in keep]
    tensors = TensorTable.from_records(records)
    rows = [(number, part) for number, view in enumerate(wanted) for part in view.parts]
    source_width, target_width = manifest.chunks.sizes.shape[1], tensors.shape.shape[1]
    key = np.array([manifest.tensors.index[part.source_fqn] for _, part in rows], dtype=np.int64)
    target = np.array([number for number, _ in rows], dtype=np.int64)
    offsets = _padded([part.source.offsets for _, part in rows], source_width, 0)
    sizes = _padded([part.source.sizes for _, part in rows], source_width, 1)
    goes_to = _padded([part.target_offsets for _, part in rows], target_width, 0)
    axes = _padded([part.axes for _, part in rows], target_width, -1)
    steps = _padded([part.steps or (1,) * part.source.ndim for _, part in rows], source_width, 1)

    chunks = manifest.chunks
    spans = np.where(sizes > 0, (sizes - 1) * steps + 1, 0)
    pairs = join_boxes(Boxes(chunks.tensor.astype(np.int64), chunks.offsets, chunks.sizes), Boxes(key, offsets, spans))
    # Of the elements between the first and the last, those that the steps hit, as positions among the part's own.
    step = steps[pairs.right]
    moved = -(-(pairs.offsets - offsets[pairs.right]) // step)
    taken = (pairs.offsets + pairs.sizes - 1 - offsets[pairs.right]) // step - moved + 1
    hit = (taken > 0).all(axis=1)
    pairs, step, moved, taken = pairs.take(hit), step[hit], moved[hit], taken[hit]
    if (chunks.flags[pairs.left] & ChunkFlag.UNRESOLVED).any():
        raise LayoutError("views need the exact places of chunks, some are not resolved", where=manifest.root)
    strides = (contiguous_strides_columns(chunks.sizes) if chunks.strides is None else chunks.strides)[pairs.left]
    inside = offsets[pairs.right] + moved * step - chunks.offsets[pairs.left]
    bits = manifest.tensors.bits[chunks.tensor[pairs.left]]
    start_bits = (inside * strides).sum(axis=1) * bits
    strides = strides * step
    length = ((taken - 1) * strides).sum(axis=1) + 1
    if (start_bits % 8).any():
        raise LayoutError("a view cuts elements that are narrower than a byte", where=manifest.root)
    along = axes[pairs.right]
    is_real = along >= 0
    picked = np.maximum(along, 0)
    table = ChunkTable.from_columns(
        tensor=target[pairs.right],
        offsets=goes_to[pairs.right] + np.where(is_real, np.take_along_axis(moved, picked, axis=1), 0),
        sizes=np.where(is_real, np.take_along_axis(taken, picked, axis=1), 1),
        file=chunks.file[pairs.left],
        offset=chunks.offset[pairs.left] + start_bits // 8,
        length=(length * bits + 7) // 8,
        rank=chunks.rank[pairs.left],
        flags=chunks.flags[pairs.left],
        strides=np.where(is_real, np.take_along_axis(strides, picked, axis=1), 1),
    )
    return _padded_with_zeros(manifest.replace(tensors=tensors, chunks=table), wanted)


def _padded_with_zeros(manifest: Manifest, views: Sequence[View]) -> Manifest:
    """With a packed chunk for each box of zeros of the views, all from the start of one file of zeros."""
    padding = [(number, box) for number, view in enumerate(views) for box in view.zeros if box.volume]
    if not padding:
        return manifest
    chunks, width = manifest.chunks, manifest.chunks.sizes.shape[1]
    number: IntArray = np.array([row for row, _ in padding], dtype=np.int64)
    sizes = _padded([box.sizes for _, box in padding], width, 1)
    length = (np.prod(sizes, axis=1) * manifest.tensors.bits[number] + 7) // 8
    added = ChunkTable.from_columns(
        tensor=number,
        offsets=_padded([box.offsets for _, box in padding], width, 0),
        sizes=sizes,
        file=np.full(len(padding), len(manifest.files), dtype=np.int64),
        offset=np.zeros(len(padding), dtype=np.int64),
        length=length,
        strides=contiguous_strides_columns(sizes),
    )
    files = FileTable((*manifest.files, FileEntry("zeros", int(length.max()), codec=ZEROS)))
    return manifest.replace(chunks=stacked_chunks([chunks, added], width), files=files)


def _identity(manifest: Manifest, fqn: str) -> View:
    shape = manifest.tensor(fqn).shape
    return View(fqn, shape, (Part(fqn, Box.whole(shape), (0,) * len(shape), tuple(range(len(shape)))),))


def _record(manifest: Manifest, view: View) -> TensorMeta:
    """The target tensor of a view, checked against its sources."""
    if not view.parts:
        raise LayoutError("a view without parts", where=view.fqn)
    first = manifest.tensor(view.parts[0].source_fqn)
    whole = Box.whole(view.shape)
    volume = sum(box.volume for box in view.zeros)
    for part in view.parts:
        source = manifest.tensor(part.source_fqn)
        if source.dtype != first.dtype:
            raise LayoutError(
                f"parts have dtypes {first.dtype.name} ({first.fqn}) and {source.dtype.name} ({source.fqn})",
                where=view.fqn,
            )
        sizes = tuple(part.source.sizes[axis] if axis >= 0 else 1 for axis in part.axes)
        used = [axis for axis in part.axes if axis >= 0]
        left_out = [d for d in range(part.source.ndim) if d not in part.axes and part.source.sizes[d] != 1]
        if left_out or len(set(used)) != len(used) or len(part.axes) != len(view.shape):
            raise LayoutError(f"axes {part.axes} do not fit box {part.source} of {source.fqn}", where=view.fqn)
        if part.steps is not None and (len(part.steps) != part.source.ndim or min(part.steps, default=1) < 1):
            raise LayoutError(f"steps {part.steps} do not fit box {part.source} of {source.fqn}", where=view.fqn)
        if not Box.whole(source.shape).contains(part.span) or not whole.contains(Box(part.target_offsets, sizes)):
            raise LayoutError(
                f"box {part.span} of {source.fqn} {list(source.shape)} at {part.target_offsets} leaves "
                f"{list(view.shape)}",
                where=view.fqn,
            )
        volume += part.source.volume
    if volume != whole.volume:
        raise LayoutError(f"parts have {counted(volume, 'element')}, the target {whole.volume:,}", where=view.fqn)
    path = view.path
    if path is None:
        path = (*first.path[:-1], view.fqn) if len(first.path) > 1 else (view.fqn,)
    return TensorMeta(view.fqn, first.dtype, view.shape, first.section, path)


def _padded(rows: Sequence[tuple[int, ...]], width: int, fill: int) -> IntArray:
    padded = np.full((len(rows), width), fill, dtype=np.int64)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = row
    return padded
