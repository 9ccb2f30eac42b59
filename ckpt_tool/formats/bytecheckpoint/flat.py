"""What ``user_defined_dict`` of the model's metadata says of FSDP's flat parameters, which stay vectors when saved.

Saved decomposed, a flat parameter stays one vector, cut wherever ranks cut it (bytecheckpoint 0.0.2,
``planner/fsdp/fsdp_planner.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from ckpt_tool.errors import FormatError
from ckpt_tool.manifest.flat_parameters import FlatParameter, Segment, Vector, unflattened
from ckpt_tool.manifest.model import KeyPath, TensorMeta
from ckpt_tool.manifest.tables import ChunkTable, TensorTable
from ckpt_tool.sizes import counted

__all__ = ["flat_parameters", "unflattened_section"]

_NAME = "_flat_param"
_FIELDS = ("fsdp_flat_param_to_fqns", "fsdp_is_padding_mask", "fsdp_numels_with_padding", "fsdp_shapes")
_MODELS = "model_dict_keys"


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


def unflattened_section(
    tensors: TensorTable, chunks: ChunkTable, flat: Mapping[str, FlatParameter], where: str
) -> tuple[TensorTable, ChunkTable]:
    """The tables of a section with boxes of parameters in place of ranges of flat ones.

    Tensors are flat when the last part of their path is the key of a flat parameter, alone or with the name of an
    optimizer's state behind it (``blocks.0._flat_param.exp_avg``), and have one dimension.

    Raises:
        FormatError: a flat parameter is shorter than what is in it.
        Unsupported: a chunk of one is not contiguous.
    """
    names = {segment.fqn for one in flat.values() for segment in one.segments}
    named = TensorTable.from_records([_with_parameter(meta, names) for meta in tensors])
    vectors = {
        row: found
        for row, meta in enumerate(named)
        if len(meta.shape) == 1 and (found := _vector(meta.path, flat)) is not None
    }
    return unflattened(named, chunks, vectors, where)


def _vector(path: KeyPath, flat: Mapping[str, FlatParameter]) -> Vector | None:
    """The flat parameter that ``path`` names, or of which it names state."""
    for end in range(len(path), max(len(path) - 2, 0), -1):
        name, rest = str(path[end - 1]), path[end:]
        key, _, state = name.rpartition(".")
        if name in flat:
            return Vector(flat[name], path[: end - 1], rest)
        if key in flat and not rest:
            return Vector(flat[key], path[: end - 1], (state,))
    return None


def _with_parameter(meta: TensorMeta, names: set[str]) -> TensorMeta:
    """State of a parameter that is saved under ``(..., "fqn.step")``, with these as two keys."""
    name, _, state = str(meta.path[-1]).rpartition(".")
    if name not in names or not state or len(meta.path) < 2:
        return meta
    return TensorMeta(meta.fqn, meta.dtype, meta.shape, meta.section, (*meta.path[:-1], name, state))
