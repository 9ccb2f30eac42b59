"""Where the bytes of a view's tensors lie in the row-major bytes of the tensors that they were made of.

So that one pass over the one says what the other holds: a digest of the tensor as it was, from the tensor as it is
written. Knows no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from ckpt_tool.geometry.box import Box
from ckpt_tool.geometry.overlaps import overlapping_pairs
from ckpt_tool.geometry.runs import contiguous_strides
from ckpt_tool.layout.views import Part, View
from ckpt_tool.manifest.model import Manifest, TensorMeta
from ckpt_tool.manifest.tables import IntArray
from ckpt_tool.records import dataclass

__all__ = ["Origins", "origins_of", "renaming_views"]

_MIN_RUN_BYTES = 256
"""Bytes that lie together in both: many shorter runs, as of a transposed tensor, cost more than a second look."""
_FEW_RUNS = 1024


@dataclass(frozen=True, eq=False)
class Origins:
    """Boxes of views' tensors, and the original that each is a part of."""

    originals: tuple[TensorMeta, ...]
    """The originals that can be followed; of one of which only the first rows are used (padding), those rows."""
    fqns: tuple[str, ...]  # of the view's tensor, one for each box
    offsets: tuple[tuple[int, ...], ...]  # global coordinates of the view's tensor
    sizes: tuple[tuple[int, ...], ...]
    original: IntArray  # int64[m], position in ``originals``
    start: IntArray  # int64[m], element of the original's row-major order that the box begins with
    strides: tuple[tuple[int, ...], ...]
    """Elements of the original between neighbours along each dimension of the box."""


def renaming_views(manifest: Manifest, names: Sequence[tuple[str, str]]) -> tuple[View, ...]:
    """Views that show tensors as they are under other names: (name, name in the view)."""
    views = []
    for fqn, name in names:
        shape = manifest.tensor(fqn).shape
        views.append(View(name, shape, (Part(fqn, Box.whole(shape), (0,) * len(shape), tuple(range(len(shape)))),)))
    return tuple(views)


def origins_of(manifest: Manifest, views: Sequence[View]) -> Origins:
    """The originals of some views, tensors of ``manifest``; those that cannot be followed are left out.

    Followed is what the views use whole and once, or whole but for rows at the end, in runs that are no shorter than a
    few hundred bytes.
    """
    by_source: dict[str, list[tuple[View, Part]]] = {}
    for view in views:
        for part in view.parts:
            if part.source.volume:
                by_source.setdefault(part.source_fqn, []).append((view, part))
    originals: list[TensorMeta] = []
    rows: list[tuple[str, tuple[int, ...], tuple[int, ...], int, int, tuple[int, ...]]] = []
    for fqn, uses in by_source.items():
        meta = manifest.tensor(fqn)
        shape = _used_shape(meta.shape, [part for _, part in uses])
        if shape is None or meta.dtype.bits % 8:
            continue
        faces = [_face(view, part, contiguous_strides(shape)) for view, part in uses]
        shortest = min(_run(sizes, strides) for _, _, sizes, _, strides in faces)
        if shortest * meta.dtype.bits // 8 < _MIN_RUN_BYTES and prod(shape) > shortest * _FEW_RUNS:
            continue
        rows += [(name, low, sizes, len(originals), start, strides) for name, low, sizes, start, strides in faces]
        originals.append(TensorMeta(fqn, meta.dtype, shape, meta.section, meta.path))
    fqns, offsets, sizes, original, start, strides = zip(*rows, strict=True) if rows else ((),) * 6
    return Origins(
        tuple(originals), fqns, offsets, sizes, np.array(original, np.int64), np.array(start, np.int64), strides
    )


def _used_shape(shape: tuple[int, ...], parts: Sequence[Part]) -> tuple[int, ...] | None:
    """The shape of what is used: all, or the first rows; None where it is neither, or something is used twice."""
    volume = sum(part.source.volume for part in parts)
    if volume == prod(shape):
        return shape if _is_disjoint(parts) else None
    if not shape:
        return None
    n_rows = max(part.span.offsets[0] + part.span.sizes[0] for part in parts)
    used = (n_rows, *shape[1:])
    return used if volume == prod(used) and _is_disjoint(parts) else None


def _is_disjoint(parts: Sequence[Part]) -> bool:
    """Whether no element is used twice; not known where parts step differently."""
    ndim = parts[0].source.ndim
    steps = parts[0].steps or (1,) * ndim
    if any((part.steps or (1,) * ndim) != steps for part in parts):
        return False
    phases = [tuple(o % s for o, s in zip(part.source.offsets, steps, strict=True)) for part in parts]
    numbers = {phase: number for number, phase in enumerate(dict.fromkeys(phases))}
    offsets = np.array([part.span.offsets for part in parts], dtype=np.int64).reshape(len(parts), ndim)
    sizes = np.array([part.span.sizes for part in parts], dtype=np.int64).reshape(len(parts), ndim)
    group = np.array([numbers[phase] for phase in phases], dtype=np.int64)
    return not len(overlapping_pairs(offsets, sizes, group, limit=1))


def _face(
    view: View, part: Part, strides: tuple[int, ...]
) -> tuple[str, tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]:
    steps = part.steps or (1,) * part.source.ndim
    start = sum(offset * stride for offset, stride in zip(part.source.offsets, strides, strict=True))
    sizes = tuple(part.source.sizes[axis] if axis >= 0 else 1 for axis in part.axes)
    along = tuple(strides[axis] * steps[axis] if axis >= 0 else 1 for axis in part.axes)
    return view.fqn, part.target_offsets, sizes, start, along


def _run(sizes: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements that lie together in the original and in a packed box."""
    length = 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if size == 1:
            continue
        if stride != length:
            break
        length *= size
    return length
