"""The common state of a checkpoint that is being written: the source's, rewritten for the run that is to load it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpt_tool.errors import LayoutError, Unsupported
from ckpt_tool.formats._pickle.nodes import Global, Stub
from ckpt_tool.formats._pickle.walk import storages
from ckpt_tool.formats._torch_file.nested import nest
from ckpt_tool.formats._torch_file.objects import check_objects
from ckpt_tool.formats._torch_file.written import blob_entry, fresh_tensor
from ckpt_tool.formats.base import WriteRequest
from ckpt_tool.formats.megatron.target_boxes import weight_key
from ckpt_tool.formats.megatron.target_dialect import Dialect, dialect_of
from ckpt_tool.formats.megatron.target_grid import TargetGrid, target_args
from ckpt_tool.formats.megatron.target_optimizer import BUCKET_FACTS, SHARDED_PART, combined, parts_of
from ckpt_tool.manifest.model import Blob, KeyPath, Manifest
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = [
    "COMMON_STEP",
    "TargetCommon",
    "is_common",
    "is_distributed",
    "parts_of_ranks",
    "refuse_undecoded",
    "target_common",
]

COMMON_STEP = "common_step"
"""In the state of an optimizer that is not the distributed one: the step that its parameters share."""

_EMBEDDING = "embedding.word_embeddings.weight"
_OF_RANKS = ("rng_state", "rerun_state_machine", "rerun_state_machine_state")
_FACTS_OF_PARAMETERS = ("optimizer", "param_state")
"""Each parameter's step, which mcore up to 0.14 has besides the groups'."""


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


def parts_of_ranks(
    named: Sequence[tuple[str, KeyPath]], blobs: Sequence[Blob], *, has_one_optimizer: bool
) -> Iterator[tuple[str, str]]:
    """What describes the source's ranks, with the reason to leave it out; random states apart."""
    for fqn, path in named:
        if path[:2] == _FACTS_OF_PARAMETERS:
            yield fqn, "a parameter's own step; the groups of the optimizer have it"
        elif has_one_optimizer and is_common(fqn, path) and path[0] == "optimizer" and type(path[1]) is int and path[1]:
            yield fqn, "of the experts' optimizer; without expert parallelism there is one optimizer"
    for blob in blobs:
        match = SHARDED_PART.fullmatch(blob.fqn)
        if match is not None and match["name"] in BUCKET_FACTS:
            yield blob.fqn, "describes the buckets of the source's ranks; the target has none"
        elif match is not None and storages(blob.value):
            yield blob.fqn, "has tensors inside, which the common state cannot take over; Megatron starts it afresh"
        elif blob.fqn.startswith("rerun_state_machine"):
            yield blob.fqn, "the rerun state machine's, which Megatron ignores on another number of ranks"


def refuse_undecoded(source: Manifest, strange: Sequence[str], blobs: Sequence[Blob]) -> None:
    """Raise LayoutError where state would be lost because a fact is missing that its place follows from.

    Args:
        source: what is to be written; its reader says what is missing.
        strange: its tensors of optimizer state that belong to no weight.
        blobs: its objects, of which gathered buffers are such state too.
    """
    undecoded = source.info.get("optimizer_undecoded")
    matches = [(blob.fqn, SHARDED_PART.fullmatch(blob.fqn)) for blob in blobs]
    gathered = [fqn for fqn, match in matches if match is not None and match["name"] == "param_state"]
    if undecoded and (strange or gathered):
        raise LayoutError(
            f"the optimizer's state is not in the shape of the weights: {undecoded}",
            where=(*strange, *gathered)[0],
            hint="write the weights alone: --include 'model.*'",
        )


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
    check_objects(common)
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
    size = grid.expert_tensor_size(args.state)
    if _has_experts(paths) and (grid.tp != tp_before or size != grid.tp):
        notes.append(
            f"experts are written for {counted(size, 'tensor-parallel rank')} (args.expert_tensor_parallel_size)"
        )
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
        is_old = dialect_of(request.options.mcore_version).is_flattened
        flags["ckpt_fully_parallel_save" if is_old else "dist_ckpt_optim_fully_reshardable"] = True
    if dialect_of(request.options.mcore_version).has_common_file:
        args, unknown = _plain_args(args)
        if unknown:
            notes.append(
                f"{len(unknown)} args of classes that older versions may lack are left out: {', '.join(unknown)}"
            )
    root["args"] = target_args(args, grid, **flags)
    root["iteration"] = iteration
    dialect = dialect_of(request.options.mcore_version)
    content = _content(root, dialect, is_distributed=bool(slots) and is_distributed(request.info))
    root.pop("content_metadata", None)
    if dialect.has_content:
        root["content_metadata"] = content
    if dialect.is_flattened and slots and is_distributed(request.info):
        _restate(root["optimizer"], dialect.sharding_type)
    return TargetCommon(root, rows, tuple(notes))


def _paths(request: WriteRequest) -> Sequence[KeyPath]:
    tensors = request.tensors
    return [(fqn,) for fqn in tensors.fqns] if tensors.paths is None else tensors.paths


def _plain_args(args: Stub) -> tuple[Stub, list[str]]:
    """The arguments without those that are of a class of Megatron's, and the names of these."""
    values = [(name, value if isinstance(value, list) else [value]) for name, value in args.state.items()]
    unknown = [name for name, held in values if any(_is_of_megatron(one) for one in held)]
    if not unknown:
        return args, []
    copy = type(args).__new__(type(args), *args.args, **args.kwargs)
    copy.made, copy.entries, copy.items = args.made, args.entries, args.items
    copy.state = {name: value for name, value in args.state.items() if name not in unknown}
    return copy, unknown


def _is_of_megatron(value: object) -> bool:
    made_by = value.cls if isinstance(value, Stub) else value
    return isinstance(made_by, Global) and made_by.module.startswith("megatron")


def _restate(entry: dict[Any, Any], sharding_type: str) -> None:
    """Have the optimizers' entries say in which form their state is."""
    for part in entry.values() if all(type(key) is int for key in entry) else [entry]:
        part["param_state_sharding_type"] = sharding_type


def _content(root: Mapping[str, Any], dialect: Dialect, *, is_distributed: bool) -> dict[str, Any]:
    """What the loader builds its request from."""
    before = root.get("content_metadata")
    known = before if isinstance(before, Mapping) else {}
    content: dict[str, Any] = {}
    if is_distributed:
        content["distrib_optim_sharding_type"] = dialect.sharding_type
        if not dialect.is_flattened:
            content["distrib_optim_fully_reshardable_mem_efficient"] = False
    content["singleton_local_shards"] = known.get("singleton_local_shards", False)
    content["chained_optim_avoid_prefix"] = not dialect.has_chained_keys
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
