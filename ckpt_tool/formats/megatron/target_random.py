"""Random states in a checkpoint that is being written: the source's, where the grid is the same, or new ones.

Distributed checkpoints have an object for each stage and tensor-parallel rank, per-rank files one entry in each folder.
Of several expert-parallel ranks with different states Megatron keeps the first one's, except in per-rank files.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Literal

from ckpt_tool.errors import UsageError
from ckpt_tool.formats._pickle.dump import dump_pickle
from ckpt_tool.formats._pickle.nodes import Stub
from ckpt_tool.formats._torch_file.nested import nest
from ckpt_tool.formats._torch_file.written import blob_entry, fresh_tensor
from ckpt_tool.formats._zip.layout import ZipLayout, torch_members
from ckpt_tool.formats.base import WriteRequest
from ckpt_tool.formats.megatron.fresh_rng import fresh_random_states
from ckpt_tool.formats.megatron.target_grid import TargetGrid
from ckpt_tool.formats.megatron.target_objects import TargetObject, filled, kept_item, written_object
from ckpt_tool.manifest.model import Blob, KeyPath, Manifest
from ckpt_tool.manifest.tables import TensorTable
from ckpt_tool.records import dataclass, field

__all__ = [
    "RNG",
    "SavedStates",
    "emitted_states",
    "is_rng",
    "random_states",
    "rank_of",
    "shard_grid",
    "state_number",
    "states_left_out",
]

RNG = "rng_state"
_SHARD = re.compile(r"rng_state/shard_(\d+)\.(\d+)_(\d+)\.(\d+)")
_RANK = re.compile(r"@rank(\d+)$")
_STARTED = "random states are those of the start of a run, made of args.seed"


def is_rng(fqn: str, path: KeyPath) -> bool:
    """Whether a tensor or object is (part of) a random state."""
    return fqn.startswith(f"{RNG}/") or (len(path) > 1 and path[0] == RNG)


def shard_grid(fqn: str) -> tuple[int, int] | None:
    """Stages and tensor-parallel ranks of the run that an object in pieces of random states is of.

    >>> shard_grid("rng_state/shard_0.1_2.4")
    (2, 4)
    """
    match = _SHARD.fullmatch(fqn)
    return None if match is None else (int(match[3]), int(match[4]))


def rank_of(fqn: str) -> int:
    """The rank that a tensor of a rank's file is named for; 0 where there is one rank only."""
    match = _RANK.search(fqn)
    return 0 if match is None else int(match[1])


def state_number(
    numbers: Collection[int], args: Mapping[str, Any], grid: TargetGrid, stage: int, tensor_rank: int, expert_rank: int
) -> int | None:
    """Which of the source's ranks has the random state of a rank of the target; None when none has.

    Another expert-parallel size than the source's takes the first expert-parallel rank that there is.

    Args:
        numbers: ranks of the source that have one, as ``rank_files.Grid`` numbers them.
        args: arguments of the source's run.
        grid: the target, with as many stages and tensor-parallel ranks as the source.
        stage: of the target's rank.
        tensor_rank: likewise.
        expert_rank: likewise; distributed checkpoints have the first.
    """
    n_experts = args.get("expert_model_parallel_size") or 1
    wanted = [expert_rank] if n_experts == grid.ep else []
    for expert in (*wanted, *range(n_experts)):
        number = (stage * n_experts + expert) * grid.tp + tensor_rank
        if number in numbers:
            return int(number)
    return None


def _why_none(
    source: Manifest, rng: set[str], grid: TargetGrid, rank_state: Literal["keep", "drop", "emit"] | None
) -> str | None:
    """Why random states are left out, None to keep them.

    Raises:
        UsageError: they are to be kept, and the source's grid is another.
    """
    if not rng:
        return None
    if rank_state == "emit":
        return _STARTED
    args = source.info.get("args", {})
    grids = {found for fqn in rng if (found := shard_grid(fqn)) is not None}
    before = grids.pop() if len(grids) == 1 else (
        args.get("pipeline_model_parallel_size"), args.get("tensor_model_parallel_size")
    )  # fmt: skip
    text = (
        f"random states of {before[0]} stages x {before[1]} tensor-parallel ranks; the target has {grid.pp} x {grid.tp}"
    )
    if before != (grid.pp, grid.tp):
        if rank_state == "keep":
            raise UsageError(text, hint="use --rank-state drop: Megatron then starts them afresh")
        return text
    return "random states are to be dropped" if rank_state == "drop" else None


def states_left_out(
    source: Manifest,
    blobs: Sequence[Blob],
    grid: TargetGrid,
    rank_state: Literal["keep", "drop", "emit"] | None,
    *,
    expert_ranks: Iterable[int],
    why_unneeded: str,
) -> dict[str, str]:
    """Random states of the source that the target has no use for, by fqn, each with the reason.

    Args:
        source: what is to be written.
        blobs: its objects.
        grid: the target.
        rank_state: what to do with states of single ranks.
        expert_ranks: expert-parallel ranks of the target that have a state of their own.
        why_unneeded: the reason for those that no rank of the target takes.

    Raises:
        UsageError: they are to be kept, and the source's grid is another.
    """
    named = [(meta.fqn, meta.path) for meta in source.tensors]
    rng = {fqn for fqn, path in (*named, *((b.fqn, b.path or (b.fqn,)) for b in blobs)) if is_rng(fqn, path)}
    reason = _why_none(source, rng, grid, rank_state)
    if reason is not None:
        return dict.fromkeys(sorted(rng), reason)
    saved, args = SavedStates.of(source.tensors, ()), source.info.get("args", {})
    kept = {
        state_number(saved.rows, args, grid, stage, tensor_rank, expert_rank)
        for stage, expert_rank, tensor_rank in product(range(grid.pp), expert_ranks, range(grid.tp))
    }
    unneeded = [row for number in saved.rows if number not in kept for row in saved.rows[number]]
    return {named[row][0]: why_unneeded for row in unneeded}


@dataclass
class SavedStates:
    """Random states of a source's ranks, as per-rank files have them, by the rank's number."""

    values: dict[int, list[tuple[KeyPath, Any]]] = field(default_factory=dict)
    """Parts of each, with their key paths; tensors stand in storages numbered from 0 on."""
    rows: dict[int, list[int]] = field(default_factory=dict)
    """The rows of the request's tensors that fill these storages."""

    @classmethod
    def of(cls, tensors: TensorTable, blobs: Sequence[Blob]) -> SavedStates:
        """The states among ``tensors`` and ``blobs``."""
        found = cls()
        for row, path in enumerate([(fqn,) for fqn in tensors.fqns] if tensors.paths is None else tensors.paths):
            if is_rng(tensors.fqns[row], path):
                rank = rank_of(tensors.fqns[row])
                own = found.rows.setdefault(rank, [])
                tensor = fresh_tensor(len(own), tensors.dtypes[row], tensors.shape_of(row))
                found.values.setdefault(rank, []).append(((*path[:-1], _RANK.sub("", str(path[-1]))), tensor))
                own.append(row)
        for blob in blobs:
            if is_rng(blob.fqn, blob.path) and shard_grid(blob.fqn) is None:
                found.values.setdefault(blob.rank or 0, []).append(blob_entry(blob))
        return found

    def value(self, number: int) -> Any:
        """One rank's ``rng_state``."""
        return nest(self.values[number])[RNG]


def random_states(request: WriteRequest, grid: TargetGrid) -> Iterator[tuple[TargetObject, tuple[int, ...]]]:
    """The source's states as objects in pieces, with the tensors of the request that are in them."""
    for blob in request.blobs:
        if shard_grid(blob.fqn) is not None:
            yield TargetObject(blob.fqn, kept_item(blob, request.blob_bytes)), ()
    saved = SavedStates.of(request.tensors, request.blobs)
    for stage in range(grid.pp):
        for tensor_rank in range(grid.tp):
            number = state_number(saved.values, request.info.get("args", {}), grid, stage, tensor_rank, 0)
            if number is not None:
                taken = tuple(saved.rows.get(number, ()))
                key = f"{RNG}/shard_{stage}.{tensor_rank}_{grid.pp}.{grid.tp}"
                yield written_object(key, [saved.value(number)], request.tensors, taken), taken


def emitted_states(args: Stub, grid: TargetGrid) -> Iterator[TargetObject]:
    """Random states of every stage and tensor-parallel rank, as at the start of a run.

    Raises:
        LayoutError: the arguments do not tell the seed.
    """
    for stage in range(grid.pp):
        for tensor_rank in range(grid.tp):
            states, payloads = fresh_random_states(args, grid, stage, tensor_rank)
            layout = ZipLayout(torch_members(dump_pickle([states]), [len(payload) for payload in payloads]))
            yield TargetObject(f"{RNG}/shard_{stage}.{tensor_rank}_{grid.pp}.{grid.tp}", filled(layout, payloads))
