"""Whether the chunks of each tensor hold every element once, told from the corners of all boxes at a time.

Boxes are in global coordinates. Knows no file and no byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np

from ckpt_tool.geometry.box import Box
from ckpt_tool.geometry.columns import BoolArray, Int64Array, distinct
from ckpt_tool.geometry.cover import coverage, exact_duplicates, overlapping_pairs, volumes_match
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import FileRange, Manifest
from ckpt_tool.sizes import counted

__all__ = ["coverage_findings"]

_PAIRS_SEARCHED = 100_000
_SHOWN_PER_TENSOR = 16


def coverage_findings(manifest: Manifest) -> Iterator[Finding]:
    """Shapes that are none, boxes outside their tensor, gaps, overlaps, and how many boxes are stored more than once.

    Cost: a few sorts of all boxes; boxes are looked at one tensor at a time only where something is wrong.
    """
    tensors, chunks = manifest.tensors, manifest.chunks
    has_shape: BoolArray = np.asarray((tensors.shape >= 0).all(axis=1))
    for row in np.flatnonzero(~has_shape).tolist():
        said = f"shape {list(tensors.shape_of(row))} has a negative size"
        yield Finding("bad-shape", Severity.ERROR, said, tensors.fqns[row])
    tensor = chunks.tensor.astype(np.int64)
    offsets, sizes = chunks.offsets, chunks.sizes
    shape = _widened(tensors.shape, offsets.shape[1])
    is_box = (offsets >= 0).all(axis=1) & (sizes >= 0).all(axis=1)
    is_inside = is_box & (sizes <= shape[tensor] - offsets).all(axis=1) if len(chunks) else is_box
    yield from _outside(manifest, np.flatnonzero(~is_inside & has_shape[tensor]))
    rows = np.flatnonzero(is_inside & has_shape[tensor] & (sizes > 0).all(axis=1))
    first = exact_duplicates(offsets[rows], sizes[rows], tensor[rows])
    single = rows[first == np.arange(len(rows))]
    suspects = ~volumes_match(tensor[single], chunks.volume[single], tensors.numel) & has_shape
    pairs = overlapping_pairs(offsets[single], sizes[single], tensor[single], limit=_PAIRS_SEARCHED)
    suspects[tensor[single[pairs[:, 0]]]] = True
    yield from _wrong_covers(manifest, suspects, single)
    n_replicas = len(rows) - len(single)
    if n_replicas:
        doubled = distinct(tensor[rows[first != np.arange(len(rows))]])
        nbytes = int((chunks.volume[rows] * tensors.bits[tensor[rows]] // 8)[first != np.arange(len(rows))].sum())
        said = (
            f"{counted(n_replicas, 'box')} of {counted(len(doubled), 'tensor')} are stored more than once "
            f"({counted(nbytes, 'byte')})"
        )
        yield Finding("replicas", Severity.INFO, said, tensors.fqns[doubled[0]])


def _widened(shape: Int64Array, width: int) -> Int64Array:
    """``shape`` with as many dimensions as the boxes have, padded behind with 1."""
    missing = width - shape.shape[1]
    return np.pad(shape, ((0, 0), (0, missing)), constant_values=1) if missing > 0 else shape[:, :width]


def _outside(manifest: Manifest, rows: Int64Array) -> Iterator[Finding]:
    chunks, tensors = manifest.chunks, manifest.tensors
    for row in rows.tolist():
        tensor = int(chunks.tensor[row])
        ndim = int(tensors.ndim[tensor])
        spans = zip(chunks.offsets[row, :ndim].tolist(), chunks.sizes[row, :ndim].tolist(), strict=True)
        text = "[" + ", ".join(f"{offset}:{offset + size}" for offset, size in spans) + "]"
        where = FileRange(manifest.files.paths[chunks.file[row]], int(chunks.offset[row]), int(chunks.length[row]))
        said = f"box {text} in {where.path} reaches out of the tensor's shape {list(tensors.shape_of(tensor))}"
        yield Finding("box-outside", Severity.ERROR, said, tensors.fqns[tensor], where)


def _wrong_covers(manifest: Manifest, suspects: BoolArray, single: Int64Array) -> Iterator[Finding]:
    chunks, tensors = manifest.chunks, manifest.tensors
    order = single[np.argsort(chunks.tensor[single], kind="stable")]
    starts = np.searchsorted(chunks.tensor[order], np.arange(len(tensors) + 1))
    for tensor in np.flatnonzero(suspects).tolist():
        rows = order[starts[tensor] : starts[tensor + 1]]
        shape, fqn = tensors.shape_of(tensor), tensors.fqns[tensor]
        if not len(rows):  # the columns of boxes may be fewer than its dimensions
            yield Finding("gap", Severity.ERROR, _gap_text(Box.whole(shape), prod(shape), is_all=True), fqn)
            continue
        ndim = len(shape)
        found = coverage(shape, chunks.offsets[rows, :ndim], chunks.sizes[rows, :ndim], limit=_SHOWN_PER_TENSOR)
        numel = int(tensors.numel[tensor])
        listed = sum(box.volume for box in found.gaps)
        for box in found.gaps:
            yield Finding("gap", Severity.ERROR, _gap_text(box, numel, is_all=False), fqn)
        if found.missing_elements > listed:
            said = f"{found.missing_elements - listed:,} of {counted(numel, 'element')} besides lie in no chunk"
            yield Finding("gap", Severity.ERROR, said, fqn)
        for left, right in found.overlapping:
            one = chunks.record(int(rows[left]), tensors, manifest.files)
            other = chunks.record(int(rows[right]), tensors, manifest.files)
            said = f"box {one.box} in {one.where.path} and box {other.box} in {other.where.path} hold common elements"
            yield Finding("overlap", Severity.ERROR, said, fqn, other.where)


def _gap_text(box: Box, numel: int, *, is_all: bool) -> str:
    if is_all:
        return f"no chunk at all holds the tensor ({counted(numel, 'element')})"
    return f"no chunk holds {box} ({box.volume:,} of {counted(numel, 'element')}, {box.volume / numel:.1%})"
