"""What a rank's file says its flat parameters hold, under the key ``shard_metadata``.

Two libraries write it, beside the state dict of a rank and in a form of their own each. FairScale (0.4.13,
``FullyShardedDataParallel.local_metadata_dict``; fairseq and metaseq save that)::

    {"param_metadata": [{"fsdp_path": "layers.0", "params": {"flat_param_0": {"names", "shapes", "numels", "padding"}},
                         "shared_param_info": [(source, copy), ...], ...}, ...], "buffer_names": [...]}

torch_xla (2.x, ``XlaFullyShardedDataParallel.get_shard_metadata``)::

    {"shard_info": {module: {shard: {"_orig_size", "_orig_name"}}}, "flatten_info": {vector: (names, shapes, numels)},
     "world_size": 4, "rank": 0, ...}

Both flatten a vector, pad it to equal parts and give one to each rank, in order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from ckpt_tool.errors import FormatError
from ckpt_tool.manifest.alias import with_aliases
from ckpt_tool.manifest.concatenate import names_of_ranks
from ckpt_tool.manifest.flat_optimizers import flat_optimizers, unflatten_all
from ckpt_tool.manifest.flat_parameters import FlatParameter, Segment, Vector
from ckpt_tool.manifest.model import Manifest, TensorMeta
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["METADATA_KEY", "ShardMetadata", "parse_shard_metadata"]

METADATA_KEY = "shard_metadata"
_OF_RANK = re.compile(r"@rank\d+$")
_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_fpw_module"})


@dataclass(frozen=True, slots=True)
class ShardMetadata:
    """The record of one file."""

    flat: Mapping[str, FlatParameter]
    """By key in the state dict."""
    shared: tuple[tuple[str, str], ...] = ()
    """``(source, copy)``: parameters that are another one's under a second name, and are not saved."""
    world_size: int | None = None
    """Ranks that the vectors are cut for, None where it is not recorded."""

    def n_ranks(self, metas: Iterable[TensorMeta]) -> int:
        """How many ranks there are: as recorded, or as many as the parts ``metas`` of the vectors need."""
        if self.world_size is not None:
            return self.world_size
        parts = ((self.flat[name].numel, meta.numel) for meta in metas if (name := _name(meta)) in self.flat)
        return max((-(-whole // part) for whole, part in parts if part), default=0)

    def vectors_among(self, metas: Iterable[TensorMeta]) -> dict[str, Vector]:
        """Those of ``metas`` that the record describes, by name without a rank."""
        found: dict[str, Vector] = {}
        for meta in metas:
            name = _name(meta)
            if name in self.flat and len(meta.shape) == 1:
                found[_OF_RANK.sub("", meta.fqn)] = Vector(self.flat[name], meta.path[:-1])
        return found

    def unflatten(self, manifest: Manifest, vectors: Mapping[str, Vector]) -> Manifest:
        """``manifest`` with parameters in place of ``vectors``, and with the second names of shared ones.

        Raises:
            FormatError: ranks hold more or less of a vector than the record says is in it, or names occur twice.
        """
        for fqn, vector in vectors.items():
            _check_length(manifest, fqn, vector.flat.numel)
        cut = unflatten_all(manifest, vectors, flat_optimizers(manifest, list(vectors.values())))
        aliases: dict[str, tuple[int, TensorMeta]] = {}
        for keys in {vector.before for vector in vectors.values()}:
            for source, copy in self.shared:
                row = cut.tensors.index.get(".".join(map(str, (*keys, source))))
                path = (*keys, copy)
                fqn = ".".join(map(str, path))
                if row is not None and fqn not in cut.tensors.index:
                    aliases[fqn] = row, replace(cut.tensors.record(row), fqn=fqn, path=path)
        return with_aliases(cut, list(aliases.values()))


def _check_length(manifest: Manifest, fqn: str, numel: int) -> None:
    """Ranks hold equal parts of a vector of ``numel`` elements, padded as little as that needs."""
    own = names_of_ranks(manifest.tensors.fqns).get(fqn, {}).values()
    parts = [manifest.tensor(name).numel for name in own]
    if not parts:
        row = manifest.tensor_id(fqn)
        parts = [int(manifest.tensors.numel[row])] * max(len(manifest.chunks.rows_of(row)), 1)
    if not numel <= sum(parts) < numel + len(parts):
        raise FormatError(
            f"{METADATA_KEY!r} records {counted(numel, 'element')}, ranks hold {sum(parts):,} in "
            f"{counted(len(parts), 'part')}",
            where=f"{manifest.where}: {fqn}",
        )


def _name(meta: TensorMeta) -> str:
    """The last key of a tensor, without a rank."""
    return _OF_RANK.sub("", str(meta.path[-1])) if meta.path else ""


def parse_shard_metadata(value: object, where: str) -> ShardMetadata | None:
    """The record, or None for an object that is neither library's.

    Raises:
        FormatError: it contradicts itself, or a field is missing or of another type.
    """
    if not isinstance(value, Mapping):
        return None
    try:
        if "param_metadata" in value:
            return _fairscale(value["param_metadata"])
        if {"shard_info", "flatten_info"} <= value.keys():
            return _xla(value)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"the record of flat parameters lacks or garbles {error}", where=where) from None
    return None


def _fairscale(records: Any) -> ShardMetadata:
    flat: dict[str, FlatParameter] = {}
    shared: list[tuple[str, str]] = []
    for record in records:
        module = record["fsdp_path"]
        for vector, held in record["params"].items():
            names = [_joined(module, name) for name in held["names"]]
            flat[_joined(module, vector)] = _flat_parameter(names, held["shapes"], held["numels"])
        pairs = record.get("shared_param_info", ())
        shared += [(_joined(module, source), _joined(module, copy)) for source, copy in pairs]
    return ShardMetadata(flat, tuple(shared))


def _xla(record: Mapping[Any, Any]) -> ShardMetadata:
    flat: dict[str, FlatParameter] = {}
    for module, shards in record["shard_info"].items():
        for shard, original in shards.items():
            vector = _joined(module, original["_orig_name"])
            if vector in record["flatten_info"]:
                names, shapes, numels = record["flatten_info"][vector]
                owner = vector.rpartition(".")[0]
                parts = _flat_parameter([_unwrapped(_joined(owner, name)) for name in names], shapes, numels)
            else:
                size = tuple(original["_orig_size"])
                parts = _flat_parameter([_unwrapped(vector)], [size], [prod(size)])
            flat[_joined(module, shard)] = parts
    return ShardMetadata(flat, world_size=int(record["world_size"]))


def _flat_parameter(names: Iterable[str], shapes: Iterable[Any], numels: Iterable[int]) -> FlatParameter:
    """Parameters one behind another, without a gap.

    Raises:
        ValueError: their number or sizes do not match.
    """
    segments, at = [], 0
    for name, shape, numel in zip(names, shapes, numels, strict=True):
        sizes = tuple(shape)
        if not all(type(size) is int and 0 <= size < 1 << 62 for size in (*sizes, numel)) or prod(sizes) != numel:
            raise ValueError(f"the shape of {name!r}, {list(sizes)} for {numel} elements")
        segments.append(Segment(name, sizes, at))
        at += numel
    return FlatParameter(at, tuple(segments))


def _joined(module: Any, name: Any) -> str:
    """The name of what a module has under ``name``.

    Raises:
        TypeError: one of the two is no text.
    """
    if not isinstance(module, str) or not isinstance(name, str):
        raise TypeError(f"the name {name!r} in {module!r}")
    return f"{module}.{name}" if module else name


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
