"""Layouts of the largest jobs, exact to the box: Megatron's bucket-flat optimizer slices, experts, FSDP2.

What a rank of a real job stores, made without a loop over ranks: the parameters of one pipeline stage lie one behind
another in a buffer, which the data-parallel ranks cut into equal ranges; each range of a parameter is a few boxes
(Megatron-Core, ``param_and_grad_buffer`` and ``DistributedOptimizer``). All ranks of a stage cut alike, so a stage is
computed once and shifted for its tensor-parallel or expert-parallel ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ckpt_tool.dtypes import DTYPES
from ckpt_tool.formats.base import BoxTable
from ckpt_tool.geometry.flat import flat_boxes_columns
from ckpt_tool.geometry.grid import split_columns
from ckpt_tool.manifest.tables import IntArray, TensorTable

__all__ = ["Job", "Model", "fsdp_job", "llama_405b", "megatron_job", "moe_2t"]

STATES = ("", "optimizer.exp_avg.", "optimizer.exp_avg_sq.", "optimizer.fp32_param.")
"""Prefixes of a parameter's tensors: the weight, two moments, the master copy."""


@dataclass(frozen=True, eq=False)
class Model:
    """Parameters in the order of the layers, as columns."""

    fqns: tuple[str, ...]
    shape: IntArray  # int64[n, 2]; a vector is (length, 1)
    ndim: IntArray  # int64[n]
    tp_dim: IntArray  # int64[n], dimension that tensor parallelism cuts, -1 for none
    layer: IntArray  # int64[n], -1 for what comes before the first layer
    expert: IntArray  # int64[n], -1 for what is no expert's
    n_layers: int
    n_experts: int

    @property
    def n_elements(self) -> int:
        """Number of all parameters."""
        return int(self.shape.prod(axis=1).sum())


@dataclass(frozen=True, eq=False)
class Job:
    """What all ranks of a job store: every box once."""

    tensors: TensorTable
    boxes: BoxTable
    world_size: int


def _model(rows: list[tuple[str, tuple[int, ...], int, int, int]], n_layers: int, n_experts: int) -> Model:
    return Model(
        fqns=tuple(row[0] for row in rows),
        shape=np.array([(*row[1], 1)[:2] for row in rows], dtype=np.int64),
        ndim=np.array([len(row[1]) for row in rows], dtype=np.int64),
        tp_dim=np.array([row[2] for row in rows], dtype=np.int64),
        layer=np.array([row[3] for row in rows], dtype=np.int64),
        expert=np.array([row[4] for row in rows], dtype=np.int64),
        n_layers=n_layers,
        n_experts=n_experts,
    )


def llama_405b() -> Model:
    """Llama-3.1-405B under Megatron's names: 126 layers, 406 billion parameters."""
    h, f, v, n_layers = 16_384, 53_248, 128_256, 126
    rows: list[tuple[str, tuple[int, ...], int, int, int]] = [("embedding.word_embeddings.weight", (v, h), 0, -1, -1)]
    for layer in range(n_layers):
        for name, shape, dim in (
            ("input_layernorm.weight", (h,), -1),
            ("self_attention.linear_qkv.weight", (144 * 128, h), 0),
            ("self_attention.linear_proj.weight", (h, h), 1),
            ("pre_mlp_layernorm.weight", (h,), -1),
            ("mlp.linear_fc1.weight", (2 * f, h), 0),
            ("mlp.linear_fc2.weight", (h, f), 1),
        ):
            rows.append((f"decoder.layers.{layer}.{name}", shape, dim, layer, -1))
    rows.append(("decoder.final_layernorm.weight", (h,), -1, n_layers, -1))
    rows.append(("output_layer.weight", (v, h), 0, n_layers, -1))
    return _model(rows, n_layers, 0)


def moe_2t() -> Model:
    """A mixture of 256 experts in each of 78 layers: 2.0 trillion parameters, a tensor for each expert's matrix."""
    h, f, v, n_layers, n_experts = 8_192, 4_096, 131_072, 78, 256
    rows: list[tuple[str, tuple[int, ...], int, int, int]] = [("embedding.word_embeddings.weight", (v, h), 0, -1, -1)]
    for layer in range(n_layers):
        prefix = f"decoder.layers.{layer}."
        for name, shape, dim in (
            ("input_layernorm.weight", (h,), -1),
            ("self_attention.linear_qkv.weight", (80 * 128, h), 0),
            ("self_attention.linear_proj.weight", (h, h), 1),
            ("pre_mlp_layernorm.weight", (h,), -1),
            ("mlp.router.weight", (n_experts, h), -1),
        ):
            rows.append((prefix + name, shape, dim, layer, -1))
        for expert in range(n_experts):
            rows.append((f"{prefix}mlp.experts.linear_fc1.weight{expert}", (2 * f, h), -1, layer, expert))
            rows.append((f"{prefix}mlp.experts.linear_fc2.weight{expert}", (h, f), -1, layer, expert))
    rows.append(("decoder.final_layernorm.weight", (h,), -1, n_layers, -1))
    rows.append(("output_layer.weight", (v, h), 0, n_layers, -1))
    return _model(rows, n_layers, n_experts)


def megatron_job(model: Model, *, tp: int, pp: int, dp: int, ep: int = 1) -> Job:
    """Weights as tensor-parallel shards on the first data-parallel rank, optimizer states as bucket-flat slices.

    Ranks count tp fastest, pp slowest. Experts lie whole on one of ``ep`` ranks (no expert tensor parallelism), and
    what is data-parallel for them are the other ``tp * dp / ep`` ranks of a stage.
    """
    per_stage = -(-model.n_layers // pp)
    stage = np.clip(model.layer, 0, model.n_layers - 1) // per_stage
    weights: list[tuple[IntArray, ...]] = []
    slices: list[tuple[IntArray, ...]] = []
    for number in range(pp):
        first_rank = number * dp * tp
        dense = np.flatnonzero((stage == number) & (model.expert < 0))
        weights.append(_spread(model, dense, *_whole(model, dense, tp), first_rank + np.arange(tp), tp))
        ids, offsets, sizes, turn = _cut_buffer(dense, _local_shape(model, dense, tp), dp)
        parts = _spread(model, ids, offsets, sizes, np.arange(tp), tp)
        slices.append((*parts[:3], first_rank + np.tile(turn, tp)[parts[4]] * tp + parts[3]))
        if model.n_experts:
            experts, expert_sizes, owner, expert_turn = _expert_slices(model, stage == number, ep, tp * dp // ep)
            slices.append((*experts, expert_sizes, first_rank + expert_turn * ep + owner))
            own = np.flatnonzero((stage == number) & (model.expert >= 0))
            holder = first_rank + model.expert[own] // (model.n_experts // ep)
            weights.append((own, np.zeros((len(own), 2), dtype=np.int64), model.shape[own], holder))
    return _job(model, [_joined(weights), *[_joined(slices)] * 3], tp * pp * dp)


def fsdp_job(model: Model, *, world_size: int, states: int = 1) -> Job:
    """Every tensor cut along dimension 0 over all ranks (FSDP2, ``Shard(0)``); empty parts are left out."""
    n = len(model.fqns)
    ids = np.repeat(np.arange(n), world_size)
    rank = np.tile(np.arange(world_size), n)
    sizes = model.shape[ids].copy()
    offsets = np.zeros_like(sizes)
    split_columns(offsets, sizes, 0, rank, world_size)
    kept = np.flatnonzero(sizes[:, 0] > 0)
    boxes = (ids[kept], offsets[kept], sizes[kept], rank[kept])
    return _job(model, [boxes] * states, world_size)


def _local_shape(model: Model, rows: IntArray, tp: int) -> IntArray:
    shape = model.shape[rows].copy()
    cut = np.flatnonzero(model.tp_dim[rows] >= 0)
    shape[cut, model.tp_dim[rows][cut]] //= tp
    return shape


def _whole(model: Model, rows: IntArray, tp: int) -> tuple[IntArray, IntArray]:
    shape = _local_shape(model, rows, tp)
    return np.zeros_like(shape), shape


def _cut_buffer(ids: IntArray, shape: IntArray, parts: int) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Boxes of the parameters ``ids`` of local ``shape`` in a buffer cut into ``parts``, and the part of each."""
    numel = shape.prod(axis=1)
    end = np.cumsum(numel)
    start = end - numel
    cut = np.minimum(np.arange(parts + 1) * -(-end[-1] // parts), end[-1])
    points = np.unique(np.concatenate([start, cut]))
    low, high = points[:-1], points[1:]
    owner = np.searchsorted(start, low, side="right") - 1
    row, offsets, sizes, _ = flat_boxes_columns(low - start[owner], high - start[owner], shape[owner])
    part = np.searchsorted(cut, low, side="right") - 1
    return ids[owner[row]], offsets, sizes, part[row]


def _spread(
    model: Model, ids: IntArray, offsets: IntArray, sizes: IntArray, ranks: IntArray, tp: int
) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
    """The boxes of one tensor-parallel rank, shifted for each of them; what is replicated is the first one's."""
    n = len(ids)
    place = np.repeat(np.arange(tp), n)
    row = np.tile(np.arange(n), tp)
    kept = np.flatnonzero((place == 0) | (model.tp_dim[ids[row]] >= 0))
    place, row = place[kept], row[kept]
    moved = offsets[row].copy()
    dim = model.tp_dim[ids[row]]
    cut = np.flatnonzero(dim >= 0)
    moved[cut, dim[cut]] += place[cut] * (model.shape[ids[row[cut]], dim[cut]] // tp)
    return ids[row], moved, sizes[row], ranks[place], kept


def _expert_slices(
    model: Model, in_stage: np.ndarray, ep: int, parts: int
) -> tuple[tuple[IntArray, IntArray], IntArray, IntArray, IntArray]:
    """Slices of the experts of one stage: of those of the first owner, and alike of all others."""
    per_owner = model.n_experts // ep
    own = np.flatnonzero(in_stage & (model.expert >= 0) & (model.expert < per_owner))
    ids, offsets, sizes, turn = _cut_buffer(own, model.shape[own], parts)
    n = len(ids)
    owner = np.repeat(np.arange(ep), n)
    shift = 2 * per_owner  # an expert's two matrices stand one behind another in the columns
    return (
        (np.tile(ids, ep) + owner * shift, np.tile(offsets, (ep, 1))),
        np.tile(sizes, (ep, 1)),
        owner,
        np.tile(turn, ep),
    )


def _joined(parts: list[tuple[IntArray, ...]]) -> tuple[IntArray, ...]:
    return tuple(np.concatenate([part[column] for part in parts]) for column in range(4))


def _job(model: Model, states: list[tuple[IntArray, ...]], world_size: int) -> Job:
    n, k = len(model.fqns), len(states)
    dtypes = (DTYPES["bfloat16"],) * n + (DTYPES["float32"],) * (n * (k - 1))
    tensors = TensorTable(
        fqns=tuple(prefix + fqn for prefix in STATES[:k] for fqn in model.fqns),
        dtypes=dtypes,
        shape=np.tile(model.shape, (k, 1)),
        ndim=np.tile(model.ndim, k).astype(np.int8),
        section=np.repeat(np.array([0] + [1] * (k - 1), dtype=np.int8), n),
    )
    tensor = np.concatenate([state[0] + number * n for number, state in enumerate(states)]).astype(np.int32)
    offsets, sizes, rank = (np.concatenate([state[i] for state in states]) for i in (1, 2, 3))
    order = np.lexsort((rank, tensor))
    return Job(tensors, BoxTable(tensor[order], offsets[order], sizes[order], rank[order].astype(np.int32)), world_size)
