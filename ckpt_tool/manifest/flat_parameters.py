"""A flat parameter holds several parameters one behind another, with padding between them; a view cuts it up.

FSDP1, FairScale and torch_xla train such vectors, cut wherever ranks cut them, and so do their optimizers. Here ranges
of a vector become boxes of the parameters in it; padding belongs to none. What lies where is told to this module: by a
checkpoint's own record, or by a person.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import numpy as np

from ckpt_tool.errors import FormatError, Unsupported
from ckpt_tool.geometry.flat import flat_boxes_columns
from ckpt_tool.geometry.runs import contiguous_strides_columns
from ckpt_tool.manifest.concatenate import concatenate_ranks, names_of_ranks
from ckpt_tool.manifest.model import KeyPath, Manifest, TensorMeta
from ckpt_tool.manifest.sections import section_of
from ckpt_tool.manifest.tables import ChunkTable, IntArray, TensorTable, pad_shapes
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["FlatParameter", "Segment", "Vector", "unflatten", "unflattened"]


@dataclass(frozen=True, slots=True)
class Segment:
    """One parameter in a flat one."""

    fqn: str
    shape: tuple[int, ...]
    start: int
    """Its first element, counted in the flat parameter."""

    @property
    def stop(self) -> int:
        """One past its last element."""
        return self.start + prod(self.shape)


@dataclass(frozen=True, slots=True)
class FlatParameter:
    """What one flat parameter is made of, in order."""

    numel: int
    """With padding, but for what is behind the last recorded element."""
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Chunk rows of one tensor under construction."""

    source: IntArray
    """Row of the chunk that each piece is of."""
    tensor: IntArray
    offsets: IntArray
    sizes: IntArray
    skipped: IntArray
    """Elements of the chunk before the piece."""
    is_cut: bool


@dataclass(frozen=True, slots=True)
class Vector:
    """A tensor that is a flat parameter, or state of one: what is in it, and what its parts are called."""

    flat: FlatParameter
    before: KeyPath = ()
    """Keys in front of a parameter's name."""
    behind: KeyPath = ()
    """Keys behind it: the name of an optimizer's state."""


def unflatten(manifest: Manifest, vectors: Mapping[str, Vector]) -> Manifest:
    """``manifest`` with the parameters in place of the vectors that hold them.

    Where ranks saved their parts of a vector without a placement, these are put one behind another first, in order of
    rank, as FSDP1, FairScale and torch_xla cut vectors.

    Args:
        manifest: a tensor of which each rank has a part is called by its name without the rank.
        vectors: by fqn, each of a tensor with one dimension.

    Raises:
        CoverageError: ranks are missing between others.
        FormatError: a vector is shorter than what is in it.
        Unsupported: a chunk of one is not contiguous.
    """
    apart = names_of_ranks(manifest.tensors.fqns)
    assumed = frozenset(manifest.info.get("replicated_by_assumption", ()))
    parted = {fqn: 0 for fqn in vectors if fqn in apart or fqn in assumed}
    joined = concatenate_ranks(manifest, parted) if parted else manifest
    found = {joined.tensor_id(fqn): vector for fqn, vector in vectors.items()}
    tensors, chunks = unflattened(joined.tensors, joined.chunks, found, manifest.where)
    flat = [fqn for fqn in manifest.info.get("flat_parameters", ()) if fqn not in vectors]
    info = {key: value for key, value in joined.info.items() if key != "flat_parameters"}
    return joined.replace(tensors=tensors, chunks=chunks, info=info | ({"flat_parameters": flat} if flat else {}))


def unflattened(
    tensors: TensorTable, chunks: ChunkTable, vectors: Mapping[int, Vector], where: str
) -> tuple[TensorTable, ChunkTable]:
    """The tables with boxes of parameters in place of ranges of flat ones; a range gives ``2n - 1`` boxes at most.

    Args:
        tensors: ``vectors`` among them have one dimension.
        chunks: places need not be exact, for each box keeps its distance to the start of its chunk.
        vectors: by row of ``tensors``.
        where: the checkpoint or its file, for messages.

    Raises:
        FormatError: a flat parameter is shorter than what is in it.
        Unsupported: a chunk of one is not contiguous.
    """
    metas: list[TensorMeta] = []
    taken: list[_Pieces] = []
    shapes = (segment.shape for one in vectors.values() for segment in one.flat.segments)
    width = max([tensors.shape.shape[1], *map(len, shapes)])
    if not len(chunks):  # a table without rows has no columns either
        nothing = np.zeros((0, width), dtype=np.int64)
        chunks = chunks.replace(offsets=nothing, sizes=nothing.copy())
    for row in range(len(tensors)):
        meta = tensors.record(row)
        own = chunks.rows_of(row)
        one = vectors.get(row)
        if one is None:
            taken.append(_kept(chunks, own, len(metas), width))
            metas.append(meta)
            continue
        if one.flat.numel > meta.numel:
            raise FormatError(
                f"holds {counted(meta.numel, 'element')}, its parts are {one.flat.numel:,}",
                where=f"{where}: {meta.fqn}",
            )
        if chunks.strides is not None and bool((chunks.strides[own, 0] != 1).any()):
            raise Unsupported("a flat parameter that is not contiguous", where=f"{where}: {meta.fqn}")
        taken.append(_cut(chunks, own, one.flat.segments, len(metas), width))
        for segment in one.flat.segments:
            path = (*one.before, segment.fqn, *one.behind)
            fqn = ".".join(map(str, path))
            metas.append(TensorMeta(fqn, meta.dtype, segment.shape, section_of(path, fqn), path))
    table = TensorTable.from_records(metas)
    return table, _chunks(taken, chunks, table)


def _kept(chunks: ChunkTable, rows: IntArray, tensor: int, width: int) -> _Pieces:
    """``rows`` as they are."""
    missing = width - chunks.offsets.shape[1]
    return _Pieces(
        source=rows,
        tensor=np.full(len(rows), tensor, dtype=np.int64),
        offsets=np.pad(chunks.offsets[rows], ((0, 0), (0, missing))),
        sizes=np.pad(chunks.sizes[rows], ((0, 0), (0, missing)), constant_values=1),
        skipped=np.zeros(len(rows), dtype=np.int64),
        is_cut=False,
    )


def _cut(chunks: ChunkTable, rows: IntArray, segments: tuple[Segment, ...], first: int, width: int) -> _Pieces:
    """Pieces of ``rows``, ranges of a flat parameter whose parameters are numbered from ``first``."""
    start, stop = chunks.offsets[rows, 0], chunks.offsets[rows, 0] + chunks.sizes[rows, 0]
    begins = np.array([segment.start for segment in segments], dtype=np.int64)
    ends = np.array([segment.stop for segment in segments], dtype=np.int64)
    shapes = pad_shapes([segment.shape for segment in segments], width, 1)
    low, high = np.maximum(start[:, None], begins), np.minimum(stop[:, None], ends)
    at, number = np.nonzero(low < high)
    begin = low[at, number] - begins[number]
    picked, offsets, sizes, flat_start = flat_boxes_columns(begin, high[at, number] - begins[number], shapes[number])
    return _Pieces(
        source=rows[at[picked]],
        tensor=first + number[picked],
        offsets=offsets,
        sizes=sizes,
        skipped=flat_start + begins[number[picked]] - start[at[picked]],
        is_cut=True,
    )


def _chunks(taken: Sequence[_Pieces], chunks: ChunkTable, tensors: TensorTable) -> ChunkTable:
    """All pieces as one table."""
    width = tensors.shape.shape[1]
    tensor = np.concatenate([one.tensor for one in taken])
    sizes = np.concatenate([one.sizes for one in taken])[:, :width]
    is_cut = np.repeat([one.is_cut for one in taken], [len(one.source) for one in taken])
    nbits = tensors.bits[tensor]
    kept = chunks.take(np.concatenate([one.source for one in taken]))
    strides = None
    if kept.strides is not None:
        missing = max(width - kept.strides.shape[1], 0)
        strides = np.pad(kept.strides, ((0, 0), (0, missing)), constant_values=1)[:, :width]
        strides[is_cut] = contiguous_strides_columns(sizes[is_cut])
    return kept.replace(
        tensor=tensor.astype(np.int32),
        offsets=np.concatenate([one.offsets for one in taken])[:, :width],
        sizes=sizes,
        offset=kept.offset + np.concatenate([one.skipped for one in taken]) * nbits // 8,
        length=np.where(is_cut, sizes.prod(axis=1) * nbits // 8, kept.length),
        strides=strides,
    )
