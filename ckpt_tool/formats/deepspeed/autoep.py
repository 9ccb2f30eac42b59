"""Experts that AutoEP has placed: a rank has the weights ``w1``, ``w2``, ``w3`` of all its experts in one tensor each.

Files of experts have each of them by itself, as ``...experts.w1.3``, and so do the tables here: in flat vectors an
expert's part of such a tensor is a run, for experts are its first dimension. Source: DeepSpeed 0.19.8,
``runtime/engine.py::_save_moe_checkpoint`` and ``checkpoint/autoep_affine.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_tool.errors import FormatError, Unsupported
from ckpt_tool.formats.deepspeed.experts import is_packed
from ckpt_tool.manifest.model import Blob, Manifest
from ckpt_tool.sizes import counted

__all__ = ["apart", "check_not_packed", "packed_experts", "paddings_apart"]

_LAYERS = "ds_autoep_layers"
_FOLDING = "folding"
_BY_FILE = "per_expert_files"
_NAMES = ("w1", "w2", "w3")
_MAX_EXPERTS = 1 << 20
Shape = tuple[int, ...]


def packed_experts(root: Mapping[str, Any], where: str) -> dict[str, int]:
    """By name of a tensor of experts: how many each rank has. Empty where AutoEP placed none.

    Args:
        root: what a model state holds.
        where: its file.

    Raises:
        FormatError: the record of layers is none.
        Unsupported: experts at stage 3, tensor-parallel ones, or placed otherwise than in their order.
    """
    layers = root.get(_LAYERS)
    if not layers:
        return {}
    if not isinstance(layers, (list, tuple)):
        raise FormatError(f"{_LAYERS}: expected a list, got {type(layers).__name__}", where=where)
    if root.get(_FOLDING) is not None:
        raise Unsupported(
            "experts that AutoEP has placed on tensor-parallel ranks, which are not read",
            where=where,
            hint="make a universal checkpoint with DeepSpeed's ds_to_universal, and read that",
        )
    found: dict[str, int] = {}
    for layer in layers:
        if not isinstance(layer, Mapping):
            raise FormatError(f"{_LAYERS}: expected dicts, got {type(layer).__name__}", where=where)
        if layer.get("checkpoint_format", _BY_FILE) != _BY_FILE:
            form = layer["checkpoint_format"]
            raise Unsupported(
                f"experts that AutoEP has placed, saved as {form!r} (stage 3), which are not read",
                where=where,
                hint="make a universal checkpoint with DeepSpeed's ds_to_universal, and read that",
            )
        prefix, n_local, n_ranks = (layer.get(key) for key in ("expert_key_prefix", "num_local_experts", "ep_size"))
        if type(n_local) is not int or type(n_ranks) is not int or not 0 < n_local * n_ranks <= _MAX_EXPERTS:
            raise FormatError(f"{_LAYERS}: {n_local!r} experts on each of {n_ranks!r} ranks", where=where)
        if not _in_order(layer.get("expert_placement"), n_local):
            raise Unsupported(
                f"experts of {prefix!r} are placed in another order than that of their numbers", where=where
            )
        found |= {f"{prefix}.{name}": n_local for name in _NAMES}
    return found


def _in_order(placement: Any, n_local: int) -> bool:
    """Whether rank ``r`` has the experts from ``r * n_local`` on; so it is without a record."""
    if placement is None:
        return True
    ranks = placement.get("ranks") if isinstance(placement, Mapping) else None
    return isinstance(ranks, (list, tuple)) and all(
        isinstance(own, Mapping)
        and type(own.get("rank")) is int
        and own.get("experts") == list(range(own["rank"] * n_local, (own["rank"] + 1) * n_local))
        for own in ranks
    )


def apart(shapes: Mapping[str, Shape], packed: Mapping[str, int], where: str) -> dict[str, Shape]:
    """Shapes by name in flat order, each expert of ``packed`` by itself under its number on the rank.

    >>> apart({"experts.w1": (2, 3, 4), "norm": (3,)}, {"experts.w1": 2}, "")
    {'experts.w1.0': (3, 4), 'experts.w1.1': (3, 4), 'norm': (3,)}

    Raises:
        FormatError: a tensor has not as many experts as are said to be on a rank.
    """
    found: dict[str, Shape] = {}
    for name, shape in shapes.items():
        n_local = packed.get(name)
        if n_local is None:
            found[name] = shape
        elif not shape or shape[0] != n_local:
            raise FormatError(
                f"has shape {list(shape)}, and {counted(n_local, 'expert', 'are')} on a rank", where=f"{where}: {name}"
            )
        else:
            found |= {f"{name}.{number}": shape[1:] for number in range(n_local)}
    return found


def paddings_apart(paddings: Sequence[int], names: Sequence[str], packed: Mapping[str, int]) -> tuple[int, ...]:
    """Padding behind each of what ``apart`` makes of ``names``; as given where it is not one for each name."""
    if len(paddings) != len(names):
        return tuple(paddings)
    return tuple(
        number
        for name, padding in zip(names, paddings, strict=True)
        for number in (*[0] * (packed.get(name, 1) - 1), padding)
    )


def check_not_packed(source: Manifest, blobs: Sequence[Blob]) -> None:
    """Nothing, when AutoEP has placed no expert of ``source``, which has the objects ``blobs``.

    Raises:
        Unsupported: it has, by an expert's name or by its record.
    """
    names = (*source.tensors.fqns, *(blob.fqn for blob in blobs))
    first = next((fqn for fqn in names if is_packed(fqn) or fqn.split(".")[0] == _LAYERS), None)
    if first is not None:
        raise Unsupported(
            "experts that AutoEP has placed are read, and not written",
            where=first,
            hint="write them --to dcp, or the weights with ckpt export",
        )
