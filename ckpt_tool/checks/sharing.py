"""Tensors share bytes when their chunks meet in one file: wholly (tied weights), or partly (views, or a mistake).

Knows byte ranges only; reads nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ckpt_tool.checks.extents import chunk_nbytes
from ckpt_tool.geometry.columns import BoolArray, Int64Array
from ckpt_tool.geometry.overlaps import have_common_element
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.tables import SECTIONS, ChunkFlag
from ckpt_tool.sizes import counted

__all__ = ["partial_views", "sharing_findings"]

_PAIRS_SHOWN = 1000


def sharing_findings(manifest: Manifest, has_chunk: BoolArray) -> Iterator[Finding]:
    """Chunks that meet in their file, each with the one before it that reaches furthest; cost: one sort."""
    is_item = _is_item(manifest)
    # An unresolved range that is no larger than its box is only a guess at where the bytes are.
    is_known = is_item | ((manifest.chunks.flags & ChunkFlag.UNRESOLVED) == 0)
    n_shown = 0
    for left, right in _meeting_rows(manifest, has_chunk & is_known):
        finding = _judge(manifest, left, right, is_item=bool(is_item[left] | is_item[right]))
        if finding is None:
            continue
        n_shown += 1
        if n_shown > _PAIRS_SHOWN:
            return
        yield finding


def partial_views(manifest: Manifest) -> list[tuple[str, str]]:
    """``(fqn, other)`` for each tensor some of whose bytes are also another's, the one that begins before it.

    Items whose payload is not resolved tell nothing. Cost: one sort, and a step for each such chunk.
    """
    pairs = _meeting_rows(manifest, ~_is_item(manifest))
    fqns, tensor = manifest.tensors.fqns, manifest.chunks.tensor
    named = {int(tensor[right]): int(tensor[left]) for left, right in pairs if tensor[left] != tensor[right]}
    return [(fqns[view], fqns[other]) for view, other in sorted(named.items())]


def _meeting_rows(manifest: Manifest, is_taken: BoolArray) -> list[tuple[int, int]]:
    """Rows ``(before, after)`` of chunks of ``is_taken`` that have bytes in common."""
    chunks = manifest.chunks
    rows = np.flatnonzero(is_taken & (chunks.length > 0))
    rows = rows[np.lexsort((rows, -chunks.length[rows], chunks.offset[rows], chunks.file[rows]))]
    before, after = _meeting(chunks.file[rows].astype(np.int64), chunks.offset[rows], chunks.length[rows])
    return list(zip(rows[before].tolist(), rows[after].tolist(), strict=True))


def _meeting(file: Int64Array, offset: Int64Array, length: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Positions ``(before, after)`` of ranges, sorted by file and offset, where one begins before another has ended."""
    if not len(file):
        return file, file
    end = offset + length
    # Ends made comparable over files, so that one running maximum serves all of them.
    rank = np.unique(np.concatenate([offset, end]), return_inverse=True)[1].reshape(-1)
    unit = int(rank.max()) + 1
    start_key, end_key = file * unit + rank[: len(file)], file * unit + rank[len(file) :]
    reach = np.maximum.accumulate(end_key)
    after = np.flatnonzero(start_key[1:] < reach[:-1]) + 1
    is_furthest = np.ones(len(file), dtype=np.bool_)
    is_furthest[1:] = end_key[1:] > reach[:-1]
    furthest = np.maximum.accumulate(np.where(is_furthest, np.arange(len(file)), 0))
    return furthest[after - 1], after


def _judge(manifest: Manifest, left: int, right: int, *, is_item: bool) -> Finding | None:
    """What it means that two chunks meet; None for a box of one tensor that is listed twice."""
    chunks, tensors = manifest.chunks, manifest.tensors
    one = chunks.record(left, tensors, manifest.files)
    other = chunks.record(right, tensors, manifest.files)
    dtype = tensors.dtypes[chunks.tensor[left]]
    is_same_range = one.where == other.where
    if one.fqn == other.fqn and is_same_range and one.box == other.box:
        return None
    if is_same_range and is_item:  # one container item may hold several tensors
        return None
    if is_same_range and all(_is_counter(manifest, row) for row in (left, right)):
        return None  # optimizers count the steps of all parameters with one tensor
    if one.fqn != other.fqn and is_same_range:
        said = f"{other.fqn!r} shares all its {counted(other.where.length, 'byte')} with {one.fqn!r}"
        return Finding("tied-tensors", Severity.INFO, said, other.fqn, other.where)
    if not is_item and _are_interleaved(manifest, left, right):
        return None
    common = min(one.where.end, other.where.end) - other.where.offset
    said = (
        f"{other.fqn!r} {other.box} and {one.fqn!r} {one.box} share {counted(common, 'byte')} from byte "
        f"{other.where.offset:,}"
    )
    if is_item or one.fqn == other.fqn:
        said += ", expected none"
        return Finding("bytes-overlap", Severity.ERROR, said, other.fqn, other.where)
    distance_bits = (other.where.offset - one.where.offset) * 8
    if dtype == tensors.dtypes[chunks.tensor[right]] and distance_bits % dtype.bits == 0:
        return Finding(
            "overlapping-views", Severity.INFO, f"{said}, as views of one storage do", other.fqn, other.where
        )
    said += ", of different types or between elements"
    return Finding("bytes-overlap", Severity.WARNING, said, other.fqn, other.where)


def _are_interleaved(manifest: Manifest, left: int, right: int) -> bool:
    """Whether the elements of two strided chunks lie between one another's: halves of a transposed weight do."""
    chunks, tensors = manifest.chunks, manifest.tensors
    one, other = (chunks.record(row, tensors, manifest.files) for row in (left, right))
    dtype = tensors.dtypes[chunks.tensor[left]]
    distance, odd = divmod((other.where.offset - one.where.offset) * 8, dtype.bits)
    if one.strides is None or one.strides != other.strides or min(one.strides) < 1 or odd:
        return False
    is_alike = dtype == tensors.dtypes[chunks.tensor[right]]
    return is_alike and not have_common_element(distance, one.strides, one.box.sizes, other.box.sizes)


def _is_counter(manifest: Manifest, row: int) -> bool:
    """Whether a chunk is one number of an optimizer's state."""
    tensor = manifest.chunks.tensor[row]
    tensors = manifest.tensors
    return SECTIONS[tensors.section[tensor]] == "optimizer" and tensors.numel[tensor] == 1


def _is_item(manifest: Manifest) -> BoolArray:
    """bool[n_chunks]: the range is that of a container item around the chunk's bytes."""
    chunks = manifest.chunks
    needed = chunk_nbytes(manifest, np.arange(len(chunks), dtype=np.int64))
    is_item: BoolArray = ((chunks.flags & ChunkFlag.UNRESOLVED) != 0) & (chunks.length != needed)
    return is_item
