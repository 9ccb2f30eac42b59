"""What the ranks of a `Run` write: items of ``torch_dist``, and per-rank files.

Written from the description of the formats, with torch's own classes, without the package.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
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

from tests.formats.megatron.run import LOCAL_NAMES, SLOTS, Array, Buffer, Part, Run, rounded_up

GROUP = (torch.float32, torch.float32)


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


def add_buckets(writer: DistWriter, zero_from: Mapping[str, int] | None = None) -> None:
    """State as ``dp_reshardable`` stores it: pieces end with parameters and with data-parallel ranks' shares.

    ``zero_from`` names, by slot, the element from which on each bucket is zero, as after a save that went wrong.
    """
    run = writer.run
    for prefix, group, chunk, rank, buffer in optimizer_buffers(run):
        for slot in SLOTS:
            for bucket, values in enumerate(buffer.flat(run, slot)):
                values[(zero_from or {}).get(slot, values.size) :] = 0
                key = (
                    f"{prefix}optimizer.distributed.dp_group_idx_{group}.gbuf_idx_{chunk}.dtype_(torch.float32, "
                    f"torch.float32).bucket_idx_{bucket}.{slot}"
                )
                share = rounded_up(values.size, int(np.lcm(run.dp, 128))) // run.dp
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
    nothing = np.zeros(0, dtype=np.float32)
    slots: dict[str, Any] = {
        slot: torch.from_numpy(np.concatenate([nothing, *buffer.flat(run, slot)])) for slot in SLOTS
    }
    return {GROUP: {**slots, "numel_unpadded": sum(buffer.bucket_numels)}}


def common_state(run: Run, **changes: Any) -> dict[str, Any]:
    """What is the same on all ranks."""
    return {"args": run.args(**changes), "checkpoint_version": 3.0, "iteration": 7}


# ------------------------------------------------------------------------------------------------------ per-rank files


def legacy_files(
    run: Run, *, shares_storage: bool = True, with_optimizer: bool = True, **changes: Any
) -> dict[str, bytes]:
    """The folders ``mp_rank_*`` of a run, whose arguments may be changed."""
    files: dict[str, bytes] = {}
    for rank, stage, data, tensor in ranks_of(run):
        if data >= run.ep:
            continue
        folder = f"mp_rank_{tensor:02d}"
        folder += f"_{stage:03d}" if run.pp > 1 else ""
        folder += f"_{data:03d}" if run.ep > 1 else ""
        root: dict[str, Any] = common_state(run, rank=rank, **changes)
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
    if part.key.startswith("mtp."):
        *front, rest = part.key.partition("transformer_layer.")
        return f"{front[0]}{'mtp_model_layer.' if rest else ''}{in_layer(run, part, rest)}"
    if not part.key.startswith("decoder.layers."):
        is_copy = part.key == "embedding.word_embeddings.weight" and (stage, chunk) != (0, 0) and run.is_tied
        return "output_layer.weight" if is_copy else part.key
    rest = part.key.removeprefix("decoder.layers.")
    number = part.lead[0] if not run.n_dense else int(rest.partition(".")[0])
    rest = rest if not run.n_dense else rest.partition(".")[2]
    layer = run.layers[stage][chunk].index(number)
    return f"decoder.layers.{layer}.{in_layer(run, part, rest)}"


def in_layer(run: Run, part: Part, rest: str) -> str:
    """What the module of a layer calls a parameter."""
    if part.is_expert:
        expert = part.lead[-1] % (run.n_experts // run.ep)
        rest = rest.replace("experts.experts.", f"experts.local_experts.{expert}.")
    return LOCAL_NAMES.get(rest, rest) if run.order == "local" else rest


def saved(value: Any) -> bytes:
    """What ``torch.save`` writes."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()
