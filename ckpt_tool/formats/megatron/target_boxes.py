"""Target boxes are the parts that tensors of a distributed checkpoint are stored in.

Any cut is right, as chunks have their place in the global tensor; one that is a rank's own makes ranks read no more
than they need. So layers and experts are apart, and where a rule knows the weight, tensor-parallel parts too.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from ckpt_tool.formats.base import BoxTable
from ckpt_tool.formats.megatron.parallel import ParallelRules, built_in_rules
from ckpt_tool.formats.megatron.registration import layer_key
from ckpt_tool.formats.megatron.target_grid import TargetGrid
from ckpt_tool.manifest.model import KeyPath
from ckpt_tool.manifest.tables import IntArray, TensorTable

__all__ = ["EXTRA_STATE", "target_boxes", "weight_key"]

EXTRA_STATE = "._extra_state/shard_"
"""In the key of a module's state (Transformer Engine's, for FP8), which is an object and no weight."""

_EXPERTS = "mlp.experts.experts."
_HALF = re.compile(r"_[wv]$")
"""Gate and up with keys of their own."""


def weight_key(path: KeyPath) -> str | None:
    """The key of the weight that a path is of, or is a state of; None for other paths.

    >>> weight_key(("optimizer", "state", "exp_avg", "output_layer.weight"))
    'output_layer.weight'
    """
    if len(path) == 2 and path[0] == "model":
        return str(path[1])
    return str(path[3]) if len(path) == 4 and path[:2] == ("optimizer", "state") else None


def target_boxes(
    tensors: TensorTable, grid: TargetGrid, args: Mapping[str, Any], *, halves_apart: bool = False
) -> BoxTable:
    """Boxes of all tensors, spread over the ranks' files so that none has much more bytes than another.

    Args:
        tensors: with paths; those that are no weights and no states of one are stored whole.
        grid: the target.
        args: the run's arguments, as far as they are known.
        halves_apart: have a gate and an up projection in boxes of their own though no rank has a part of them only.
    """
    rules = built_in_rules()
    width = tensors.shape.shape[1]
    numbers: list[IntArray] = []
    starts: list[IntArray] = []
    extents: list[IntArray] = []
    for row in range(len(tensors)):
        shape = tensors.shape_of(row)
        key = None if tensors.paths is None else weight_key(tensors.paths[row])
        if key is not None and EXTRA_STATE in key:
            key = None
        parts = [1] * len(shape) if key is None else _parts(key, shape, grid, args, rules, halves_apart=halves_apart)
        offsets, sizes = _cut(shape, parts)
        padding = ((0, 0), (0, width - len(shape)))
        numbers.append(np.full(len(offsets), row, dtype=np.int64))
        starts.append(np.pad(offsets, padding))
        extents.append(np.pad(sizes, padding, constant_values=1))
    if not numbers:
        nothing: IntArray = np.zeros((0, width), dtype=np.int64)
        return BoxTable(np.zeros(0, dtype=np.int32), nothing, nothing, np.zeros(0, dtype=np.int32))
    tensor, offsets, sizes = np.concatenate(numbers), np.concatenate(starts), np.concatenate(extents)
    nbytes = np.prod(sizes, axis=1) * tensors.bits[tensor] // 8
    return BoxTable(tensor.astype(np.int32), offsets, sizes, _spread(nbytes, grid.world_size))


def _parts(
    key: str,
    shape: tuple[int, ...],
    grid: TargetGrid,
    args: Mapping[str, Any],
    rules: ParallelRules,
    *,
    halves_apart: bool,
) -> list[int]:
    """Into how many equal parts each dimension is cut."""
    parts = [1] * len(shape)
    of_layer = layer_key(key)
    layer, name = of_layer if of_layer is not None else (0, key)
    is_expert = name.startswith(_EXPERTS)
    has_number = is_expert and name.removeprefix(_EXPERTS).partition(".")[0].isdecimal()
    n_lead = min((layer is None) + (is_expert and not has_number), len(shape))
    parts[:n_lead] = shape[:n_lead]
    plain = _HALF.sub("", name)
    if has_number:
        plain = _EXPERTS + plain.removeprefix(_EXPERTS).partition(".")[2]
    cut = rules.cut(plain)
    dim = n_lead + (cut == "row")
    if cut not in ("column", "row", "gated") or dim >= len(shape):
        return parts
    is_gated = cut == "gated" and _HALF.search(name) is None and args.get("swiglu") is True
    ranks = grid.expert_tensor_size(args) if is_expert else grid.tp
    n_parts = ranks * (2 if is_gated and (ranks > 1 or halves_apart) else 1)
    if shape[dim] and shape[dim] % n_parts == 0:
        parts[dim] = n_parts
    return parts


def _cut(shape: tuple[int, ...], parts: list[int]) -> tuple[IntArray, IntArray]:
    """Offsets and sizes of a grid of equal boxes, row by row; dimensions are multiples of their number of parts."""
    if not shape or 0 in shape:
        return np.zeros((1, len(shape)), dtype=np.int64), np.array([shape], dtype=np.int64).reshape(1, len(shape))
    size: IntArray = np.array([n // count for n, count in zip(shape, parts, strict=True)], dtype=np.int64)
    index = np.indices(parts, dtype=np.int64).reshape(len(shape), -1).T
    return index * size, np.tile(size, (len(index), 1))


def _spread(nbytes: IntArray, n_ranks: int) -> Any:
    """int32[n]: a rank for each box, the biggest first, each to the rank that has least."""
    rank = np.zeros(len(nbytes), dtype=np.int32)
    filled = [(0, number) for number in range(n_ranks)]
    for box in np.argsort(-nbytes, kind="stable").tolist():
        held, number = filled[0]
        rank[box] = number
        heapq.heapreplace(filled, (held + int(nbytes[box]), number))
    return rank
