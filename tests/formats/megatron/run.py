"""A small Megatron run, laid out by hand: how a model is spread over ranks, and where gradient buffers put it.

Written from the description of the formats, without the package: plain loops over parameters. A weight of ``n``
elements has the values 0 to n - 1, plus a number of its own; so every element is told apart.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.formats.conformance import Truth

Array = npt.NDArray[np.float32]
HIDDEN, WIDTH, VOCAB = 8, 20, 12
SLOTS = ("param", "exp_avg", "exp_avg_sq")

NORMS_FIRST = (
    ("self_attention.linear_qkv.layer_norm_weight", (HIDDEN,), "whole"),
    ("self_attention.linear_proj.weight", (HIDDEN, HIDDEN), "row"),
    ("self_attention.linear_qkv.weight", (16, HIDDEN), "column"),
    ("mlp.linear_fc1.layer_norm_weight", (HIDDEN,), "whole"),
)
NORMS_INSIDE = (NORMS_FIRST[1], NORMS_FIRST[0], NORMS_FIRST[2], NORMS_FIRST[3])
MLP = (
    ("mlp.linear_fc1.weight", (2 * WIDTH, HIDDEN), "gated"),
    ("mlp.linear_fc2.weight", (HIDDEN, WIDTH), "row"),
)
LOCAL_NAMES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


@dataclass(frozen=True)
class Part:
    """One rank's part of a weight."""

    key: str
    lead: tuple[int, ...]
    kind: str
    rank: int
    n_ranks: int

    @property
    def is_expert(self) -> bool:
        """Whether it is an expert's."""
        return "experts.experts" in self.key

    def of(self, whole: Array) -> Array:
        """This part of a global array."""
        return np.ascontiguousarray(cut(whole[self.lead], self.kind, self.rank, self.n_ranks))


def cut(array: Array, kind: str, rank: int, n_ranks: int) -> Array:
    """What one tensor-parallel rank has of an array."""
    if kind == "column":
        return np.split(array, n_ranks, 0)[rank]
    if kind == "row":
        return np.split(array, n_ranks, 1)[rank]
    if kind == "gated":
        return np.concatenate([np.split(half, n_ranks, 0)[rank] for half in np.split(array, 2, 0)])
    return array


@dataclass(frozen=True)
class Run:
    """How a model is spread."""

    tp: int = 1
    dp: int = 1
    ep: int = 1
    layers: tuple[tuple[tuple[int, ...], ...], ...] = (((0, 1),),)
    """Global layers by stage and model chunk."""
    order: str = "local"
    is_tied: bool = False
    n_experts: int = 0
    n_predicting: int = 0
    """Layers for multi-token prediction, on the last stage, which then has a copy of the embedding."""
    n_dense: int = 0
    """First layers that have no experts where the others have; keys are then per layer."""
    bucket_numel: int | None = None

    @property
    def pp(self) -> int:
        """Stages."""
        return len(self.layers)

    @property
    def vpp(self) -> int:
        """Chunks of a stage."""
        return len(self.layers[0])

    @property
    def n_layers(self) -> int:
        """Layers of the model."""
        return sum(len(chunk) for stage in self.layers for chunk in stage)

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.tp * self.pp * self.dp

    def args(self, **changes: Any) -> argparse.Namespace:
        """What Megatron pickles of its arguments, as far as it matters."""
        known = {
            "tensor_model_parallel_size": self.tp, "pipeline_model_parallel_size": self.pp,
            "virtual_pipeline_model_parallel_size": self.vpp if self.vpp > 1 else None,
            "expert_model_parallel_size": self.ep, "expert_tensor_parallel_size": self.tp,
            "data_parallel_size": self.dp, "world_size": self.world_size, "num_layers": self.n_layers,
            "untie_embeddings_and_output_weights": not self.is_tied, "num_experts": self.n_experts or None,
            "overlap_grad_reduce": self.bucket_numel is not None, "ddp_bucket_size": self.bucket_numel,
            "transformer_impl": "local" if self.order == "local" else "transformer_engine", "swiglu": True,
            "moe_grouped_gemm": False,
        }  # fmt: skip
        return argparse.Namespace(**{**known, **changes})

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Global shapes, by key, in the order in which a first-stage rank registers them."""
        shapes: dict[str, tuple[int, ...]] = {"embedding.word_embeddings.weight": (VOCAB, HIDDEN)}
        for layer in range(self.n_layers if self.n_dense else 1):
            stacked = () if self.n_dense else (self.n_layers,)
            for rest, shape, _ in self.layer_weights(layer):
                experts = (self.n_experts,) if "experts.experts" in rest else ()
                shapes[self.key(layer, rest)] = (*stacked, *experts, *shape)
        shapes["decoder.final_layernorm.weight"] = (HIDDEN,)
        for number in range(self.n_predicting):
            for rest, shape, _ in self.predicting_weights():
                experts = (self.n_experts,) if "experts.experts" in rest else ()
                shapes[f"mtp.layers.{number}.{rest}"] = (*experts, *shape)
        if not self.is_tied:
            shapes["output_layer.weight"] = (VOCAB, HIDDEN)
        return shapes

    def key(self, layer: int, rest: str) -> str:
        """The key of a layer's weight."""
        return f"decoder.layers.{layer}.{rest}" if self.n_dense else f"decoder.layers.{rest}"

    def layer_weights(self, layer: int) -> list[tuple[str, tuple[int, ...], str]]:
        """Name, shape and cut of a layer's weights, in order of registration; of an expert's once."""
        norms = NORMS_FIRST if self.order == "local" else NORMS_INSIDE
        if not self.n_experts or layer < self.n_dense:
            return [*norms, *MLP]
        router = ("mlp.router.weight", (self.n_experts, HIDDEN), "whole")
        return [*norms, router, *((r.replace("mlp.", "mlp.experts.experts."), shape, cut_) for r, shape, cut_ in MLP)]

    def predicting_weights(self) -> list[tuple[str, tuple[int, ...], str]]:
        """The same of a layer for multi-token prediction."""
        inner = [(f"transformer_layer.{rest}", shape, kind) for rest, shape, kind in self.layer_weights(self.n_layers)]
        norms = [(f"{name}.weight", (HIDDEN,), "whole") for name in ("enorm", "hnorm", "final_layernorm")]
        return [*norms[:2], ("eh_proj.weight", (HIDDEN, 2 * HIDDEN), "column"), *inner, norms[2]]

    def predicting_parts(self, expert_rank: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """Key, expert and cut of what one rank holds of these layers, in order of registration."""
        own = self.n_experts // self.ep
        for number in range(self.n_predicting):
            for rest, _, kind in self.predicting_weights():
                if "experts.experts" not in rest:
                    yield f"mtp.layers.{number}.{rest}", (), kind
                elif rest.endswith("linear_fc1.weight"):
                    for expert in range(expert_rank * own, (expert_rank + 1) * own):
                        yield f"mtp.layers.{number}.{rest}", (expert,), "gated"
                        yield f"mtp.layers.{number}.{rest.replace('fc1', 'fc2')}", (expert,), "row"

    def parts(self, stage: int, chunk: int, expert_rank: int, tensor_rank: int) -> list[Part]:
        """What one rank holds of a model chunk, in order of registration."""
        found = []

        def add(key: str, lead: tuple[int, ...], kind: str) -> None:
            found.append(Part(key, lead, kind, tensor_rank, self.tp))

        is_last = stage == self.pp - 1 and chunk == self.vpp - 1
        if stage == chunk == 0 or (is_last and self.n_predicting):
            add("embedding.word_embeddings.weight", (), "column")
        for layer in self.layers[stage][chunk]:
            lead = () if self.n_dense else (layer,)
            weights = self.layer_weights(layer)
            experts = [weight for weight in weights if "experts.experts" in weight[0]]
            for rest, _, kind in weights:
                if "experts.experts" not in rest:
                    add(self.key(layer, rest), lead, kind)
            own = self.n_experts // self.ep if experts else 0
            for expert in range(expert_rank * own, (expert_rank + 1) * own):
                for rest, _, kind in experts:
                    add(self.key(layer, rest), (*lead, expert), kind)
        if is_last:
            add("decoder.final_layernorm.weight", (), "whole")
            for predicting in self.predicting_parts(expert_rank):
                add(*predicting)
            if not self.is_tied:
                add("output_layer.weight", (), "column")
            elif self.pp > 1:
                add("embedding.word_embeddings.weight", (), "column")
        return found

    def is_apart(self, part: Part) -> bool:
        """Whether the parameter has a bucket of its own."""
        return (
            (self.is_tied or self.n_predicting > 0) and self.pp > 1 and part.key == "embedding.word_embeddings.weight"
        )

    def values(self, slot: str, key: str) -> Array:
        """The global array of a slot of a weight; ``model`` for the weight."""
        shape = self.shapes()[key]
        base = zlib.crc32(f"{slot}:{key}".encode()) % 1000
        return (np.arange(np.prod(shape), dtype=np.float32) + np.float32(base * 1000)).reshape(shape)

    def truth(self, slots: tuple[str, ...] = SLOTS) -> dict[str, Truth]:
        """Every tensor, by our names."""
        found = {}
        for key, shape in self.shapes().items():
            found[f"model.{key}"] = Truth("float32", shape, self.values("model", key).tobytes())
            for slot in slots:
                found[f"optimizer.state.{slot}.{key}"] = Truth("float32", shape, self.values(slot, key).tobytes())
        return found


@dataclass
class Buffer:
    """A gradient buffer: its parameters, and where each lies."""

    parts: list[Part]
    in_memory: list[int]
    in_bucket: list[tuple[int, int]]
    bucket_numels: list[int]
    memory_numel: int

    @classmethod
    def of(cls, run: Run, parts: list[Part], *, is_bucketed: bool) -> Buffer:
        """The buffer of parameters in order of registration."""
        sizes = [run_part.of(run.values("model", run_part.key)).size for run_part in parts]
        memory, bucket, opened = 0, 0, 0
        in_memory, in_bucket, numels = [], [], []
        for part, size in zip(parts[::-1], sizes[::-1], strict=True):
            if run.is_apart(part) and memory > opened:
                memory = rounded_up(memory, 64)  # the bucket before it ends where it could have begun
                numels.append(memory - opened)
                memory = opened = rounded_up(memory, int(np.lcm(run.dp, 128)))
                bucket += 1
            memory = rounded_up(memory, 64)
            in_memory.append(memory)
            in_bucket.append((bucket, memory - opened))
            memory += size
            is_full = is_bucketed and run.bucket_numel is not None and memory - opened >= run.bucket_numel
            if run.is_apart(part) or is_full:
                numels.append(memory - opened)
                memory = opened = rounded_up(memory, int(np.lcm(run.dp, 128)))
                bucket += 1
        if memory > opened:
            numels.append(memory - opened)
        return cls(parts[::-1], in_memory, in_bucket, numels, rounded_up(memory, int(np.lcm(run.dp, 128))))

    def flat(self, run: Run, slot: str) -> list[Array]:
        """The unpadded elements of each bucket; gaps hold -1."""
        buckets = [np.full(numel, -1, dtype=np.float32) for numel in self.bucket_numels]
        for part, (bucket, start) in zip(self.parts, self.in_bucket, strict=True):
            values = part.of(run.values(slot, part.key)).ravel()
            buckets[bucket][start : start + values.size] = values
        return buckets


def rounded_up(number: int, multiple: int) -> int:
    """The next multiple."""
    return -(-number // multiple) * multiple
