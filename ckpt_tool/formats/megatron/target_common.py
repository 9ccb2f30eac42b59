"""The common state of a checkpoint that is being written: the source's, rewritten for the run that is to load it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt_tool.errors import Unsupported
from ckpt_tool.formats._pickle.nodes import Stub
from ckpt_tool.formats._torch_file.nested import nest
from ckpt_tool.formats._torch_file.written import blob_entry, fresh_tensor
from ckpt_tool.formats.base import WriteRequest
from ckpt_tool.formats.megatron.target_boxes import weight_key
from ckpt_tool.formats.megatron.target_grid import TargetGrid, target_args
from ckpt_tool.formats.megatron.target_optimizer import combined, parts_of
from ckpt_tool.manifest.model import KeyPath

__all__ = ["TargetCommon", "is_common", "is_distributed", "target_common"]

_EMBEDDING = "embedding.word_embeddings.weight"
_OF_RANKS = ("rng_state", "rerun_state_machine", "rerun_state_machine_state")


@dataclass(frozen=True)
class TargetCommon:
    """The common state, ready to be pickled."""

    root: dict[str, Any]
    rows: tuple[int, ...]
    """Tensors of the request that fill its storages, in order."""
    notes: tuple[str, ...]


def is_common(fqn: str, path: KeyPath) -> bool:
    """Whether a tensor or object with this path is part of the common state."""
    return "/shard_" not in fqn and weight_key(path) is None and path[:1] != ("model",) and path[0] not in _OF_RANKS


def is_distributed(info: Mapping[str, Any]) -> bool:
    """Whether the optimizer is the distributed one, by what the reader says of its form."""
    return info.get("optimizer_form") != "not distributed"


def target_common(request: WriteRequest, grid: TargetGrid, *, has_rng: bool, iteration: int) -> TargetCommon:
    """The common state of the target.

    Raises:
        Unsupported: the source has no arguments of a run, or its optimizer no groups.
    """
    tensors, paths = request.tensors, _paths(request)
    rows = tuple(row for row, path in enumerate(paths) if is_common(tensors.fqns[row], path))
    entries: list[tuple[KeyPath, Any]] = [
        (paths[row], fresh_tensor(key, tensors.dtypes[row], tensors.shape_of(row))) for key, row in enumerate(rows)
    ]
    common = [blob for blob in request.blobs if is_common(blob.fqn, blob.path or (blob.fqn,))]
    entries += [blob_entry(blob) for blob in common]
    root = nest(entries, int_keyed=request.info.get("int_keyed_dicts", ())) if entries else {}
    args = root.get("args")
    if not isinstance(args, Stub) or not isinstance(args.state, dict):
        raise Unsupported(
            "the source has no args of a Megatron run, which Megatron needs to resume",
            hint="megatron-dist takes checkpoints of Megatron, see ckpt inspect",
        )
    notes: list[str] = []
    flags: dict[str, Any] = _vocabulary(request, paths)
    if not has_rng:
        flags["no_save_rng"] = True
        notes.append("args.no_save_rng is set: no random states are written, and Megatron starts them afresh")
    tp_before = args.attribute("tensor_model_parallel_size")
    if _has_experts(paths) and grid.tp != tp_before:
        size = grid.expert_tensor_size(args.state)
        notes.append(f"experts are written for {size:,} tensor-parallel ranks (args.expert_tensor_parallel_size)")
    parts = parts_of(root.pop("optimizer", None), request.blobs)
    slots = {path[2] for path in paths if len(path) == 4 and weight_key(path) is not None}
    if not slots:
        flags["no_save_optim"] = True
        notes.append("args.no_save_optim is set: no optimizer state is written")
    elif not any(_has_groups(part) for part in parts):
        raise Unsupported(
            "there is optimizer state, but no param_groups with its hyperparameters and step",
            hint="leave the state out: --include 'model.*'",
        )
    else:
        root["optimizer"] = combined(
            parts,
            is_distributed=is_distributed(request.info),
            has_expert_optimizer=_has_experts(paths) and grid.parts_experts(args.state),
        )
    if slots and is_distributed(request.info):
        flags["dist_ckpt_optim_fully_reshardable"] = True
    root["args"] = target_args(args, grid, **flags)
    root["iteration"] = iteration
    root["content_metadata"] = _content(root, is_distributed=bool(slots) and is_distributed(request.info))
    return TargetCommon(root, rows, tuple(notes))


def _paths(request: WriteRequest) -> Sequence[KeyPath]:
    tensors = request.tensors
    return [(fqn,) for fqn in tensors.fqns] if tensors.paths is None else tensors.paths


def _content(root: Mapping[str, Any], *, is_distributed: bool) -> dict[str, Any]:
    """What the loader builds its request from."""
    before = root.get("content_metadata")
    known = before if isinstance(before, Mapping) else {}
    content: dict[str, Any] = {}
    if is_distributed:
        content["distrib_optim_sharding_type"] = "fully_reshardable"
        content["distrib_optim_fully_reshardable_mem_efficient"] = False
    content["singleton_local_shards"] = known.get("singleton_local_shards", False)
    content["chained_optim_avoid_prefix"] = True
    return content


def _has_groups(part: Mapping[str, Any]) -> bool:
    inner = part.get("optimizer", part)
    return isinstance(inner, Mapping) and bool(inner.get("param_groups"))


def _has_experts(paths: Sequence[KeyPath]) -> bool:
    return any(".mlp.experts." in key for path in paths if (key := weight_key(path)) is not None)


def _vocabulary(request: WriteRequest, paths: Sequence[KeyPath]) -> dict[str, int]:
    """How many rows the vocabulary has, as an argument; nothing where no tensor tells."""
    rows = next((row for row, path in enumerate(paths) if path[-1] == _EMBEDDING and path[0] == "model"), None)
    return {} if rows is None else {"padded_vocab_size": int(request.tensors.shape[rows, 0])}
