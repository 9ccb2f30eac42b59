"""A flat parameter holds several parameters of FSDP1 one behind another, with padding between them.

Saved decomposed, it stays one vector, cut wherever ranks cut it. Here its ranges become boxes of the parameters;
padding belongs to none. What lies where is told by ``user_defined_dict`` of the model's metadata (bytecheckpoint 0.0.2,
``planner/fsdp/fsdp_planner.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from ckpt_tool.errors import FormatError, Unsupported
from ckpt_tool.geometry.flat import flat_boxes_columns
from ckpt_tool.geometry.runs import contiguous_strides_columns
from ckpt_tool.manifest.model import KeyPath, TensorMeta
from ckpt_tool.manifest.sections import section_of
from ckpt_tool.manifest.tables import ChunkTable, IntArray, TensorTable, pad_shapes
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["FlatParameter", "Segment", "flat_parameters", "unflattened"]

_NAME = "_flat_param"
_FIELDS = ("fsdp_flat_param_to_fqns", "fsdp_is_padding_mask", "fsdp_numels_with_padding", "fsdp_shapes")
_MODELS = "model_dict_keys"


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


def flat_parameters(user_defined: object, where: str) -> dict[str, FlatParameter]:
    """Flat parameters by key, out of ``user_defined_dict``; empty when the checkpoint is not decomposed.

    Raises:
        FormatError: the record contradicts itself.
    """
    if not isinstance(user_defined, Mapping):
        return {}
    models = user_defined.get(_MODELS)
    if models is None:
        return _of_one_model(user_defined, "", where)
    found: dict[str, FlatParameter] = {}
    for model in models if isinstance(models, (list, tuple)) else ():
        recorded = user_defined.get(model)
        if isinstance(recorded, Mapping):
            found.update(_of_one_model(recorded, f"{model}.", where))
    return found


def _of_one_model(recorded: Mapping[Any, Any], prefix: str, where: str) -> dict[str, FlatParameter]:
    if not all(name in recorded for name in _FIELDS):
        return {}
    try:
        names, masks, numels, shapes = ({**recorded[name]} for name in _FIELDS)
        return {
            f"{prefix}{key}": _flat_parameter(f"{prefix}{key}", names[key], masks[key], numels[key], shapes[key], where)
            for key in names
        }
    except (KeyError, TypeError) as error:
        raise FormatError(f"the record of flat parameters lacks or garbles {error}", where=where) from None


def _flat_parameter(key: str, names: Any, mask: Any, numels: Any, shapes: Any, where: str) -> FlatParameter:
    if not all(type(n) is int and 0 <= n < 1 << 62 for n in (*numels, *(n for shape in shapes for n in shape))):
        raise FormatError(f"{key!r} records sizes that are no whole numbers", where=where)
    parts = [(start, numel) for (start, numel), pad in zip(_starts(numels), mask, strict=False) if not pad]
    if len(mask) != len(numels) or not len(parts) == len(names) == len(shapes):
        raise FormatError(
            f"{key!r} records {counted(len(numels), 'part')}, {counted(len(mask), 'mark')} of padding, "
            f"{counted(len(names), 'name')} and {counted(len(shapes), 'shape')}, which do not match",
            where=where,
        )
    module = key.removesuffix(_NAME)
    segments = []
    for (start, numel), name, shape in zip(parts, names, shapes, strict=True):
        if prod(shape) != numel:
            raise FormatError(
                f"{name!r} in {key!r} has shape {list(shape)} and {counted(numel, 'element')}", where=where
            )
        segments.append(Segment(f"{module}{name}", tuple(shape), start))
    return FlatParameter(sum(numels), tuple(segments))


def _starts(numels: Any) -> Iterator[tuple[int, int]]:
    start = 0
    for numel in numels:
        yield start, numel
        start += numel


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


def unflattened(
    tensors: TensorTable, chunks: ChunkTable, flat: Mapping[str, FlatParameter], where: str
) -> tuple[TensorTable, ChunkTable]:
    """The tables with boxes of parameters in place of ranges of flat ones; a range gives ``2n - 1`` boxes at most.

    Tensors are flat when the last part of their path is the key of a flat parameter, alone or with the name of an
    optimizer's state behind it (``blocks.0._flat_param.exp_avg``), and have at least its length.

    Raises:
        FormatError: a flat parameter is shorter than what is in it.
        Unsupported: a chunk of one is not contiguous.
    """
    metas: list[TensorMeta] = []
    taken: list[_Pieces] = []
    width = max([tensors.shape.shape[1], *(len(s.shape) for one in flat.values() for s in one.segments)])
    if not len(chunks):  # a table without rows has no columns either
        nothing = np.zeros((0, width), dtype=np.int64)
        chunks = chunks.replace(offsets=nothing, sizes=nothing.copy())
    names = {segment.fqn for one in flat.values() for segment in one.segments}
    for row in range(len(tensors)):
        meta = tensors.record(row)
        found = _flat_key(meta.path, flat)
        own = chunks.rows_of(row)
        if found is None or len(meta.shape) != 1:
            taken.append(_kept(chunks, own, len(metas), width))
            metas.append(_with_parameter(meta, names))
            continue
        key, state = found
        one = flat[key]
        if one.numel > meta.numel:
            raise FormatError(
                f"holds {counted(meta.numel, 'element')}, its parts are {one.numel:,}", where=f"{where}: {meta.fqn}"
            )
        if chunks.strides is not None and bool((chunks.strides[own, 0] != 1).any()):
            raise Unsupported("a flat parameter that is not contiguous", where=f"{where}: {meta.fqn}")
        taken.append(_cut(chunks, own, one.segments, len(metas), width))
        for segment in one.segments:
            path = (*meta.path[:-1], segment.fqn, *state)
            fqn = ".".join(map(str, path))
            metas.append(TensorMeta(fqn, meta.dtype, segment.shape, section_of(path, fqn), path))
    table = TensorTable.from_records(metas)
    return table, _chunks(taken, chunks, table)


def _flat_key(path: KeyPath, flat: Mapping[str, FlatParameter]) -> tuple[str, KeyPath] | None:
    """Key of the flat parameter, and the rest of the path, where ``path`` names one."""
    for end in range(len(path), max(len(path) - 2, 0), -1):
        name, rest = str(path[end - 1]), path[end:]
        if name in flat:
            return name, rest
        key, _, state = name.rpartition(".")
        if key in flat and not rest:
            return key, (state,)
    return None


def _with_parameter(meta: TensorMeta, names: set[str]) -> TensorMeta:
    """State of a parameter that is saved under ``(..., "fqn.step")``, with these as two keys."""
    name, _, state = str(meta.path[-1]).rpartition(".")
    if name not in names or not state or len(meta.path) < 2:
        return meta
    return TensorMeta(meta.fqn, meta.dtype, meta.shape, meta.section, (*meta.path[:-1], name, state))


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
