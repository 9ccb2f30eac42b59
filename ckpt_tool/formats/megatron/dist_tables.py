"""From keys to names: the columns of a distributed checkpoint, with its optimizer state in the shape of the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from ckpt_tool.errors import LayoutError
from ckpt_tool.formats.megatron.bucketed import add_bucketed
from ckpt_tool.formats.megatron.cuts import Weights
from ckpt_tool.formats.megatron.facts import Facts
from ckpt_tool.formats.megatron.flattened import flat_ranges, shape_before
from ckpt_tool.formats.megatron.keys import BucketKey, bucket_key, common_prefix, named
from ckpt_tool.formats.megatron.ranges import Rewriting
from ckpt_tool.formats.megatron.shards import Shards
from ckpt_tool.manifest.model import TensorMeta
from ckpt_tool.manifest.sections import section_of
from ckpt_tool.manifest.tables import ChunkTable, TensorTable
from ckpt_tool.records import dataclass, field
from ckpt_tool.sizes import counted

__all__ = ["Named", "named_tables"]

_STATE = "optimizer.state."


@dataclass
class Named:
    """The columns under their final names."""

    tensors: TensorTable
    chunks: ChunkTable
    shards: Shards
    """Who holds what of the weights."""
    prefix: str
    """What wrappers had put in front of the weights' keys."""
    form: str | None
    """How the optimizer's state was stored; None without one."""
    undecoded: str | None = None
    """Why buckets stay what they are."""
    stages: list[list[int]] = field(default_factory=list)
    """Layers of each pipeline stage; empty where nothing tells."""
    notes: list[str] = field(default_factory=list)


def named_tables(
    tensors: TensorTable,
    chunks: ChunkTable,
    shapes: Mapping[str, tuple[int, ...]],
    facts: Facts,
    world_size: int | None,
) -> Named:
    """The tables of a distributed checkpoint with names instead of keys, and boxes of weights instead of flat elements.

    Args:
        tensors: as ``.metadata`` lists them, named by keys.
        chunks: theirs.
        shapes: by key, shapes before flattening (``mcore_data``).
        facts: arguments of the run.
        world_size: ranks of the run.

    Raises:
        FormatError: a flattened tensor contradicts its shape.
    """
    prefix = common_prefix([key for key in tensors.fqns if bucket_key(key) is None])
    keys = tuple(key.removeprefix(prefix) for key in tensors.fqns)
    weights = Weights(replace(tensors, fqns=keys), chunks)
    buckets = {found: row for row, key in enumerate(keys) if (found := bucket_key(key)) is not None}
    taken = set(buckets.values())
    weight_keys = tuple(key for row, key in enumerate(keys) if row not in taken and named(key)[1][0] == "model")
    shards = Shards(weights, weight_keys, facts, world_size)
    result = Named(tensors, chunks, shards, prefix, _form(keys, buckets, shapes))
    rewriting = Rewriting(chunks)
    inferred = 0
    for row, key in enumerate(keys):
        if row in taken:
            continue
        fqn, path = named(key, prefix)
        stored = tensors.shape_of(row)
        shape = shapes.get(tensors.fqns[row])
        if shape is None:
            shape = _shape_of_weight(weights.tensors, fqn, stored)
            inferred += shape is not None
        meta = TensorMeta(fqn, tensors.dtypes[row], shape or stored, section_of(path, fqn), path)
        number = rewriting.add_tensor(meta)
        if shape is None:
            rewriting.keep(number, chunks.rows_of(row), len(stored))
        else:
            rewriting.cut(flat_ranges(fqn, number, shape, stored, chunks, chunks.rows_of(row)))
    if inferred:
        result.notes.append(
            f"{counted(inferred, 'flattened tensor', 'have')} no shape in mcore_data: taken from their weights"
        )
    with suppress(LayoutError):
        result.stages = shards.stages
    if buckets:
        _add_buckets(rewriting, shards, buckets, result)
    result.tensors, result.chunks = rewriting.tables()
    return result


def _add_buckets(rewriting: Rewriting, shards: Shards, buckets: Mapping[BucketKey, int], result: Named) -> None:
    """The buckets in the shape of their weights; as they are, with the reason, where a fact is missing."""
    tensors, chunks = shards.weights.tensors, shards.weights.chunks
    decoded = Rewriting(chunks)
    try:
        result.notes += add_bucketed(decoded, shards, buckets, tensors.shape.shape[1])
    except LayoutError as error:
        result.undecoded = error.message
        result.notes.append(f"the optimizer's buckets are left as they are: {error.message}")
        decoded = Rewriting(chunks)
        for row in buckets.values():
            key = tensors.fqns[row]
            meta = TensorMeta(key, tensors.dtypes[row], tensors.shape_of(row), "optimizer", (key,))
            decoded.keep(decoded.add_tensor(meta), chunks.rows_of(row), 1)
    rewriting.extend(decoded)


def _shape_of_weight(tensors: TensorTable, fqn: str, stored: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of the weight that ``fqn`` is a state of, when the state is stored as a flattened form of it."""
    if not fqn.startswith(_STATE):
        return None
    row = tensors.index.get(fqn.removeprefix(_STATE).partition(".")[2])
    return None if row is None else shape_before(stored, tensors.shape_of(row))


def _form(keys: Sequence[str], buckets: Mapping[BucketKey, int], shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """The form of the optimizer's state, by its keys."""
    if buckets:
        return "dp_reshardable"
    if shapes:
        return "fully_sharded_model_space"
    states = {key.removeprefix(_STATE).partition(".")[0] for key in keys if key.startswith(_STATE)}
    if "fp32_param" in states:
        return "not distributed"
    return "fully_reshardable" if states else None
