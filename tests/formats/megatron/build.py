"""A small Megatron run, laid out by hand: what its ranks would hold and write, for layouts that no fixture has.

Written from the description of the formats, without the package: plain loops over parameters, one element range after
another. A weight of ``n`` elements has the values 0 to n - 1, plus a number of its own; so every element is told apart.
"""

from __future__ import annotations

import argparse
import io
import json
import pickle
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tests.formats.conformance import Truth

Array = npt.NDArray[np.float32]
HIDDEN, WIDTH, VOCAB = 8, 20, 12
SLOTS = ("param", "exp_avg", "exp_avg_sq")
GROUP = (torch.float32, torch.float32)

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
        for rest, shape, _ in (*NORMS_FIRST, *(() if self.n_experts else MLP)):
            shapes[f"decoder.layers.{rest}"] = (self.n_layers, *shape)
        if self.n_experts:
            shapes["decoder.layers.mlp.router.weight"] = (self.n_layers, self.n_experts, HIDDEN)
            for rest, shape, _ in MLP:
                key = f"decoder.layers.{rest.replace('mlp.', 'mlp.experts.experts.')}"
                shapes[key] = (self.n_layers, self.n_experts, *shape)
        shapes["decoder.final_layernorm.weight"] = (HIDDEN,)
        if not self.is_tied:
            shapes["output_layer.weight"] = (VOCAB, HIDDEN)
        return shapes

    def parts(self, stage: int, chunk: int, expert_rank: int, tensor_rank: int) -> list[Part]:
        """What one rank holds of a model chunk, in order of registration."""
        found = []

        def add(key: str, lead: tuple[int, ...], kind: str) -> None:
            found.append(Part(key, lead, kind, tensor_rank, self.tp))

        if stage == chunk == 0:
            add("embedding.word_embeddings.weight", (), "column")
        for layer in self.layers[stage][chunk]:
            for rest, _, kind in NORMS_FIRST if self.order == "local" else NORMS_INSIDE:
                add(f"decoder.layers.{rest}", (layer,), kind)
            if not self.n_experts:
                for rest, _, kind in MLP:
                    add(f"decoder.layers.{rest}", (layer,), kind)
                continue
            add("decoder.layers.mlp.router.weight", (layer,), "whole")
            own = self.n_experts // self.ep
            for expert in range(expert_rank * own, (expert_rank + 1) * own):
                for rest, _, kind in MLP:
                    add(f"decoder.layers.{rest.replace('mlp.', 'mlp.experts.experts.')}", (layer, expert), kind)
        if stage == self.pp - 1 and chunk == self.vpp - 1:
            add("decoder.final_layernorm.weight", (), "whole")
            if not self.is_tied:
                add("output_layer.weight", (), "column")
            elif self.pp > 1:
                add("embedding.word_embeddings.weight", (), "column")
        return found

    def is_apart(self, part: Part) -> bool:
        """Whether the parameter has a bucket of its own."""
        return self.is_tied and self.pp > 1 and part.key == "embedding.word_embeddings.weight"

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
                numels.append(memory - opened)
                memory = opened = _up(memory, int(np.lcm(run.dp, 128)))
                bucket += 1
            memory = _up(memory, 64)
            in_memory.append(memory)
            in_bucket.append((bucket, memory - opened))
            memory += size
            is_full = is_bucketed and run.bucket_numel is not None and memory - opened >= run.bucket_numel
            if run.is_apart(part) or is_full:
                numels.append(memory - opened)
                memory = opened = _up(memory, int(np.lcm(run.dp, 128)))
                bucket += 1
        if memory > opened:
            numels.append(memory - opened)
        return cls(parts[::-1], in_memory, in_bucket, numels, _up(memory, int(np.lcm(run.dp, 128))))

    def flat(self, run: Run, slot: str) -> list[Array]:
        """The unpadded elements of each bucket; gaps hold -1."""
        buckets = [np.full(numel, -1, dtype=np.float32) for numel in self.bucket_numels]
        for part, (bucket, start) in zip(self.parts, self.in_bucket, strict=True):
            values = part.of(run.values(slot, part.key)).ravel()
            buckets[bucket][start : start + values.size] = values
        return buckets


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


# --------------------------------------------------------------------------------------------------------- torch_dist


class DistWriter:
    """A ``torch_dist`` folder, item by item."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._files: dict[str, bytearray] = {}
        self._tensors: dict[str, tuple[tuple[int, ...], list[ChunkStorageMetadata]]] = {}
        self._metadata: dict[str, Any] = {}
        self._storage: dict[MetadataIndex, _StorageInfo] = {}

    def add(self, key: str, shape: tuple[int, ...], offsets: tuple[int, ...], values: Array, rank: int) -> None:
        """One chunk; one that is there already is a replica, and left out."""
        index = MetadataIndex(key, torch.Size(offsets))
        if index not in self._storage:
            self._put(index, torch.from_numpy(values.copy()), rank)
            chunks = self._tensors.setdefault(key, (shape, []))[1]
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(values.shape)))

    def add_object(self, key: str, value: Any, rank: int = 0) -> None:
        """One object, in its list."""
        self._put(MetadataIndex(key), [value], rank)
        self._metadata[key] = BytesStorageMetadata()

    def files(self, mcore_data: dict[str, Any] | None = None) -> dict[str, bytes]:
        """The finished folder."""
        for key, (shape, chunks) in self._tensors.items():
            self._metadata[key] = TensorStorageMetadata(TensorProperties(), torch.Size(shape), chunks)
        metadata = Metadata(self._metadata, None, self._storage)
        if mcore_data is not None:
            metadata.mcore_data = mcore_data
        config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        files = {path: bytes(data) for path, data in self._files.items()}
        return {**files, ".metadata": pickle.dumps(metadata), "metadata.json": json.dumps(config).encode()}

    def _put(self, index: MetadataIndex, value: Any, rank: int) -> None:
        path = f"__{rank}_0.distcp"
        item = io.BytesIO()
        torch.save(value, item)
        data = self._files.setdefault(path, bytearray())
        self._storage[index] = _StorageInfo(path, len(data), len(item.getvalue()))
        data += item.getvalue()


def ranks_of(run: Run) -> Iterator[tuple[int, int, int, int]]:
    """(rank, stage, data-parallel rank, tensor-parallel rank) of every rank; tensor parallelism varies fastest."""
    for stage in range(run.pp):
        for data in range(run.dp):
            for tensor in range(run.tp):
                yield (stage * run.dp + data) * run.tp + tensor, stage, data, tensor


def add_weights(writer: DistWriter) -> None:
    """The weights of all ranks, cut as mcore cuts them."""
    run = writer.run
    for rank, stage, data, tensor in ranks_of(run):
        for chunk in range(run.vpp):
            for part in run.parts(stage, chunk, data % run.ep, tensor):
                if part.key == "embedding.word_embeddings.weight" and stage:
                    continue
                whole, n_lead = run.values("model", part.key), len(part.lead)
                mine, ones = part.of(whole), (1,) * n_lead
                halves = np.split(mine, 2) if part.kind == "gated" else [mine]
                for number, half in enumerate(halves):
                    offsets = [0] * half.ndim
                    if part.kind in ("column", "row"):
                        dim = 0 if part.kind == "column" else 1
                        offsets[dim] = tensor * half.shape[dim]
                    if part.kind == "gated":
                        offsets[0] = (number * run.tp + tensor) * half.shape[0]
                    box = half.reshape(*ones, *half.shape)
                    writer.add(part.key, whole.shape, (*part.lead, *offsets), box, rank)


def optimizer_buffers(run: Run) -> Iterator[tuple[str, int, int, int, Buffer]]:
    """(prefix of keys, group, model chunk, rank that holds it, buffer) of all model-parallel ranks."""
    for rank, stage, data, tensor in ranks_of(run):
        if data >= run.ep:
            continue
        for chunk in range(run.vpp):
            parts = run.parts(stage, chunk, data, tensor)
            dense = [part for part in parts if run.ep == 1 or not part.is_expert]
            is_bucketed = stage == chunk == 0
            if data == 0:
                prefix = "chained_0." if run.ep > 1 else ""
                yield prefix, stage * run.tp + tensor, chunk, rank, Buffer.of(run, dense, is_bucketed=is_bucketed)
            if run.ep > 1:
                experts = [part for part in parts if part.is_expert]
                group = (stage * run.ep + data) * run.tp + tensor
                yield "chained_1.", group, chunk, rank, Buffer.of(run, experts, is_bucketed=is_bucketed)


def add_buckets(writer: DistWriter) -> None:
    """State as ``dp_reshardable`` stores it: pieces end with parameters and with data-parallel ranks' shares."""
    run = writer.run
    for prefix, group, chunk, rank, buffer in optimizer_buffers(run):
        for slot in SLOTS:
            for bucket, values in enumerate(buffer.flat(run, slot)):
                key = (
                    f"{prefix}optimizer.distributed.dp_group_idx_{group}.gbuf_idx_{chunk}.dtype_(torch.float32, "
                    f"torch.float32).bucket_idx_{bucket}.{slot}"
                )
                share = _up(values.size, int(np.lcm(run.dp, 128))) // run.dp
                ends = {share * (data + 1) for data in range(run.dp)} | {values.size}
                for part, (of, start) in zip(buffer.parts, buffer.in_bucket, strict=True):
                    if of == bucket:
                        ends |= {start, start + part.of(run.values(slot, part.key)).size}
                bounds = [0, *sorted(end for end in ends if 0 < end <= values.size)]
                for start, stop in pairwise(bounds):
                    owner = rank + min(start // share, run.dp - 1) * run.tp
                    writer.add(key, values.shape, (start,), values[start:stop], owner % run.world_size)


def add_gathered(writer: DistWriter) -> None:
    """State as ``dp_zero_gather_scatter`` stores it: an object for each group."""
    run = writer.run
    objects: dict[str, dict[Any, Any]] = {}
    for prefix, group, chunk, _, buffer in optimizer_buffers(run):
        key = f"{prefix}optimizer.distributed.dp_group_idx_{group}.param_state/shard_0_1"
        objects.setdefault(key, {"buckets_coalesced": True})[chunk] = coalesced(run, buffer)
    for key, value in objects.items():
        writer.add_object(key, value)


def coalesced(run: Run, buffer: Buffer) -> dict[Any, Any]:
    """Buckets end to end."""
    slots: dict[str, Any] = {slot: torch.from_numpy(np.concatenate(buffer.flat(run, slot))) for slot in SLOTS}
    return {GROUP: {**slots, "numel_unpadded": sum(buffer.bucket_numels)}}


def common_state(run: Run, **changes: Any) -> dict[str, Any]:
    """What is the same on all ranks."""
    return {"args": run.args(**changes), "checkpoint_version": 3.0, "iteration": 7}


# ------------------------------------------------------------------------------------------------------ per-rank files


def legacy_files(run: Run, *, shares_storage: bool = True, with_optimizer: bool = True) -> dict[str, bytes]:
    """The folders ``mp_rank_*`` of a run."""
    files: dict[str, bytes] = {}
    for rank, stage, data, tensor in ranks_of(run):
        if data >= run.ep:
            continue
        folder = f"mp_rank_{tensor:02d}"
        folder += f"_{stage:03d}" if run.pp > 1 else ""
        folder += f"_{data:03d}" if run.ep > 1 else ""
        root: dict[str, Any] = common_state(run, rank=rank)
        dense_state: dict[Any, Any] = {"buckets_coalesced": True}
        expert_state: dict[Any, Any] = {"buckets_coalesced": True}
        for chunk in range(run.vpp):
            parts = run.parts(stage, chunk, data, tensor)
            groups = [[p for p in parts if run.ep == 1 or not p.is_expert], [p for p in parts if p.is_expert]]
            tensors: dict[Part, torch.Tensor] = {}
            for state, members in zip((dense_state, expert_state), groups[: 1 + (run.ep > 1)], strict=False):
                buffer = Buffer.of(run, members, is_bucketed=stage == chunk == 0)
                state[chunk] = coalesced(run, buffer)
                memory = torch.zeros(buffer.memory_numel)
                for part, start in zip(buffer.parts, buffer.in_memory, strict=True):
                    values = torch.from_numpy(part.of(run.values("model", part.key)))
                    view = memory[start : start + values.numel()].view(values.shape)
                    view.copy_(values)
                    tensors[part] = view if shares_storage else values.clone()
            name = "model" if run.vpp == 1 else f"model{chunk}"
            root[name] = {live_name(run, part, stage, chunk): tensors[part] for part in parts}
        optimizer: Any = dense_state if run.ep == 1 else [dense_state if data == 0 else None, expert_state]
        files[f"{folder}/model_optim_rng.pt"] = saved(root)
        if with_optimizer:
            files[f"{folder}/distrib_optim.pt"] = saved(optimizer)
    return files


def live_name(run: Run, part: Part, stage: int, chunk: int) -> str:
    """What the module calls a parameter."""
    if not part.key.startswith("decoder.layers."):
        is_copy = part.key == "embedding.word_embeddings.weight" and (stage, chunk) != (0, 0)
        return "output_layer.weight" if is_copy else part.key
    rest = part.key.removeprefix("decoder.layers.")
    layer = run.layers[stage][chunk].index(part.lead[0])
    if part.is_expert:
        expert = part.lead[1] % (run.n_experts // run.ep)
        rest = rest.replace("experts.experts.", f"experts.local_experts.{expert}.")
    return f"decoder.layers.{layer}.{LOCAL_NAMES.get(rest, rest) if run.order == 'local' else rest}"


def saved(value: Any) -> bytes:
    """What ``torch.save`` writes."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def write(files: dict[str, bytes], folder: Path) -> Path:
    """Files on disk."""
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder
