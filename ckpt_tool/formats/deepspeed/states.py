"""Chunks of flat sets: each rank's slices become boxes of global tensors, column by column for all its vectors.

A slice of a flattened parameter is at most ``2n - 1`` boxes of the shard, and each of these, where shards are joined,
one box of the whole tensor for every pair of the join. Boxes of the shard are in shard coordinates until then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ckpt_tool.dtypes import DType
from ckpt_tool.errors import FormatError
from ckpt_tool.formats._pickle.tensors import TensorRef
from ckpt_tool.formats._torch_file.rows import Rows
from ckpt_tool.formats.deepspeed.partition import cut_at
from ckpt_tool.formats.deepspeed.placement import Placement, Target
from ckpt_tool.formats.deepspeed.vectors import FlatSet, Member
from ckpt_tool.geometry.columns import Int64Array
from ckpt_tool.geometry.flat import flat_boxes_columns
from ckpt_tool.geometry.runs import contiguous_strides_columns
from ckpt_tool.manifest.model import KeyPath
from ckpt_tool.manifest.tables import ChunkFlag, ChunkTable, TensorTable, pad_shapes
from ckpt_tool.records import dataclass, field
from ckpt_tool.sizes import counted

__all__ = ["Named", "StateChunks", "scalar_names", "scalar_of"]

Named = Callable[[str, str], "list[tuple[str, KeyPath, str]]"]
"""``(target, state)`` to ``(fqn, path, section)`` of every tensor that has these elements."""


@dataclass(frozen=True, slots=True)
class _Boxes:
    """Columns of one member's chunks, the same for all of its vectors."""

    target: Int64Array  # int64[n], row of the set's targets
    offsets: Int64Array  # int64[n, D], global coordinates
    sizes: Int64Array  # int64[n, D]
    segment: Int64Array  # int64[n]
    position: Int64Array  # int64[n], first element in the segment
    span: Int64Array  # int64[n], elements from the first to one past the last
    strides: Int64Array | None  # int64[n, D] in elements, None when all are packed


@dataclass
class StateChunks:
    """Chunks under construction, added to the tensors and files of ``rows``."""

    rows: Rows
    placement: Placement
    _blocks: list[dict[str, Any]] = field(default_factory=list)

    def add(self, flat: FlatSet, named: Named) -> None:
        """All vectors of all members of a set.

        Raises:
            FormatError: a vector ends before its last parameter does; ranks differ in a state's dtype.
        """
        pairs = _pairs(flat, self.placement)
        dtypes: dict[str, DType] = {}
        for member in flat.members:
            for state, vectors in member.vectors.items():
                dtype = dtypes.setdefault(state, vectors[0].dtype)
                if any(vector.dtype != dtype for vector in vectors):
                    raise FormatError(
                        f"{state!r} is {vectors[0].dtype.name}, of another rank {dtype.name}", where=member.file.path
                    )
        tensors = {state: self._tensors(pairs.targets, state, dtype, named) for state, dtype in dtypes.items()}
        for member in flat.members:
            boxes = _boxes(flat, member, pairs)
            for state, vectors in member.vectors.items():
                self._add_vectors(member, state, vectors, boxes, tensors[state])

    def _tensors(self, targets: Sequence[Target], state: str, dtype: DType, named: Named) -> list[Int64Array]:
        """Ids of the tensors of every target; one array for each name that a target has, -1 where it has fewer."""
        ids: list[list[int]] = []
        for number, target in enumerate(targets):
            for which, (fqn, path, section) in enumerate(named(target.name, state)):
                if which == len(ids):
                    ids.append([-1] * len(targets))
                ids[which][number] = self.rows.add_tensor(fqn, dtype, target.shape, section, path)
        return [np.array(column, dtype=np.int64) for column in ids]

    def _add_vectors(
        self,
        member: Member,
        state: str,
        vectors: Sequence[TensorRef],
        boxes: _Boxes,
        tensors: Sequence[Int64Array],
    ) -> None:
        lengths = np.array([vector.numel for vector in vectors], dtype=np.int64)
        ends = boxes.position + boxes.span
        over = np.flatnonzero(ends > lengths[boxes.segment])
        if len(over):
            first = int(over[0])
            raise FormatError(
                f"{state!r} has {counted(int(lengths[boxes.segment[first]]), 'element')}, a parameter ends at "
                f"{int(ends[first]):,}",
                where=member.file.path,
            )
        width = vectors[0].dtype.itemsize
        base, files, flags = [], [], []
        for vector in vectors:
            place = member.file.storages.get(vector.storage.key)
            if place is None:
                if vector.numel:
                    raise FormatError(
                        f"needs storage {vector.storage.key!r}, which is not here", where=member.file.path
                    )
                base.append(0)
                files.append(-1)
                flags.append(0)
                continue
            if (vector.offset + vector.numel) * width > place.nbytes:
                raise FormatError(
                    f"{state!r} ends at byte {(vector.offset + vector.numel) * width:,} of storage "
                    f"{place.key!r}, which has {place.nbytes:,}",
                    where=member.file.path,
                )
            base.append(place.offset + vector.offset * width)
            files.append(self.rows.add_file(place.file))
            is_swapped = member.file.big_endian and vector.dtype.component_bytes > 1
            flags.append((0 if place.is_exact else ChunkFlag.UNRESOLVED) | (ChunkFlag.BIG_ENDIAN if is_swapped else 0))
        for ids in tensors:
            kept = np.flatnonzero(ids[boxes.target] >= 0)
            segment = boxes.segment[kept]
            self._blocks.append(
                {
                    "tensor": ids[boxes.target[kept]],
                    "offsets": boxes.offsets[kept],
                    "sizes": boxes.sizes[kept],
                    "file": np.array(files, dtype=np.int64)[segment],
                    "offset": np.array(base, dtype=np.int64)[segment] + boxes.position[kept] * width,
                    "length": boxes.span[kept] * width,
                    "rank": np.full(len(kept), member.rank, dtype=np.int64),
                    "flags": np.array(flags, dtype=np.int64)[segment],
                    "strides": None if boxes.strides is None else boxes.strides[kept],
                }
            )

    def joined(self, tensors: TensorTable, chunks: ChunkTable) -> ChunkTable:
        """``chunks`` with these behind them."""
        width = tensors.shape.shape[1]
        first = {name: getattr(chunks, name) for name in ("tensor", "file", "offset", "length", "rank", "flags")}
        first |= {"offsets": chunks.offsets, "sizes": chunks.sizes, "strides": chunks.strides}
        blocks = [first, *(block for block in self._blocks if len(block["tensor"]))]
        columns = {
            name: np.concatenate([np.asarray(block[name], dtype=np.int64) for block in blocks])
            for name in ("tensor", "file", "offset", "length", "rank", "flags")
        }
        sizes = np.concatenate([_widened(block["sizes"], width, 1) for block in blocks])
        strides = None
        if any(block["strides"] is not None for block in blocks):
            strides = np.concatenate(
                [
                    contiguous_strides_columns(_widened(block["sizes"], width, 1))
                    if block["strides"] is None
                    else _widened(block["strides"], width, 1)
                    for block in blocks
                ]
            )
        offsets = np.concatenate([_widened(block["offsets"], width, 0) for block in blocks])
        return ChunkTable.from_columns(**columns, offsets=offsets, sizes=sizes, strides=strides)


def _widened(columns: Int64Array, width: int, fill: int) -> Int64Array:
    """``int64[n, width]``: rows cut or filled behind with ``fill``; what is cut is fill already."""
    found = np.full((len(columns), width), fill, dtype=np.int64)
    common = min(width, columns.shape[1])
    found[:, :common] = columns[:, :common]
    return found


@dataclass(frozen=True, slots=True)
class _Pairs:
    """Boxes of shards and of whole tensors, sorted by parameter."""

    targets: tuple[Target, ...]
    first: Int64Array  # int64[n_parameters + 1], first pair of each parameter
    target: Int64Array  # int64[k], row of targets
    local: Int64Array  # int64[k, D], offsets in the shard
    whole: Int64Array  # int64[k, D], offsets in the tensor
    sizes: Int64Array  # int64[k, D]
    shape: Int64Array  # int64[n_parameters, D], of the shards


def _pairs(flat: FlatSet, placement: Placement) -> _Pairs:
    targets: list[Target] = []
    counts: list[int] = []
    rows: list[tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = []
    for name in flat.names:
        before = len(rows)
        for target in placement.targets(flat.mp, name):
            rows += [(len(targets), p.local.offsets, p.whole.offsets, p.whole.sizes) for p in target.pairs]
            targets.append(target)
        counts.append(len(rows) - before)
    width = max((len(shape) for shape in flat.shapes), default=0)
    return _Pairs(
        targets=tuple(targets),
        first=np.concatenate([[0], np.cumsum(np.array(counts, dtype=np.int64))]).astype(np.int64),
        target=np.array([row[0] for row in rows], dtype=np.int64),
        local=pad_shapes([row[1] for row in rows], width, 0),
        whole=pad_shapes([row[2] for row in rows], width, 0),
        sizes=pad_shapes([row[3] for row in rows], width, 1),
        shape=pad_shapes(flat.shapes, width, 1),
    )


def _boxes(flat: FlatSet, member: Member, pairs: _Pairs) -> _Boxes:
    lengths = [vector.numel for vector in next(iter(member.vectors.values()))]
    slices = flat.slices(member.index)
    taken = np.flatnonzero(np.diff(pairs.first)[slices.parameter] > 0)
    slices = slices.take(taken)
    try:
        slices, segment = cut_at(slices, lengths)
    except FormatError as error:
        error.where = f"{member.file.path}: {flat.names[int(slices.parameter[-1])]}"
        raise
    row, offsets, sizes, flat_start = flat_boxes_columns(slices.start, slices.stop, pairs.shape[slices.parameter])
    parameter = slices.parameter[row]
    position = slices.position[row] + flat_start - slices.start[row]
    strides = contiguous_strides_columns(sizes)

    counts = pairs.first[parameter + 1] - pairs.first[parameter]
    box = np.repeat(np.arange(len(row)), counts)
    pair = pairs.first[parameter[box]] + np.arange(len(box)) - np.repeat(np.cumsum(counts) - counts, counts)
    low = np.maximum(offsets[box], pairs.local[pair])
    high = np.minimum(offsets[box] + sizes[box], pairs.local[pair] + pairs.sizes[pair])
    kept = np.flatnonzero((low < high).all(axis=1))
    box, pair, low, high = box[kept], pair[kept], low[kept], high[kept]
    own_strides, own_sizes = strides[box], high - low
    packed = contiguous_strides_columns(own_sizes)
    effective = np.where(own_sizes == 1, packed, own_strides)
    return _Boxes(
        target=pairs.target[pair],
        offsets=low - pairs.local[pair] + pairs.whole[pair],
        sizes=own_sizes,
        segment=segment[row[box]],
        position=position[box] + ((low - offsets[box]) * own_strides).sum(axis=1),
        span=1 + ((own_sizes - 1) * own_strides).sum(axis=1),
        strides=None if np.array_equal(effective, packed) else effective,
    )


def scalar_of(members: Sequence[Member], state: str) -> tuple[Member, Any]:
    """The first rank's value of a state that `scalar_names` lists."""
    return next((member, member.scalars[state]) for member in members if state in member.scalars)


def scalar_names(members: Sequence[Member]) -> Mapping[str, None]:
    """States that are one value for the whole set, in order of appearance."""
    return dict.fromkeys(name for member in members for name in member.scalars)
