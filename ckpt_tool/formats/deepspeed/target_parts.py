"""The parts of a target of DeepSpeed: which boxes of tensors each rank stores, and where in a vector."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from ckpt_tool.dtypes import DTYPES, DType
from ckpt_tool.errors import LayoutError, Unsupported
from ckpt_tool.formats._pickle.same import same_value
from ckpt_tool.formats.base import WriterOptions
from ckpt_tool.formats.deepspeed.experts import is_expert
from ckpt_tool.formats.deepspeed.partition import per_parameter_slices
from ckpt_tool.formats.deepspeed.target_facts import config_of
from ckpt_tool.formats.deepspeed.target_grid import Grid
from ckpt_tool.formats.deepspeed.target_pieces import pieces_of
from ckpt_tool.formats.deepspeed.target_ranks import RankParts, rank_parts
from ckpt_tool.formats.deepspeed.target_slots import SlotBuilder, Slots
from ckpt_tool.formats.deepspeed.target_stages import Stages
from ckpt_tool.formats.deepspeed.target_state import TargetState
from ckpt_tool.formats.deepspeed.target_vectors import TargetVector, ZeroConfig, target_vectors
from ckpt_tool.geometry.columns import Int64Array
from ckpt_tool.manifest.model import Blob
from ckpt_tool.manifest.tables import TensorTable
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["TargetParts"]


@dataclass(frozen=True)
class TargetParts:
    """What is written, and how it is cut."""

    tensors: TensorTable
    state: TargetState
    zero: ZeroConfig
    stages: Stages | None
    """Of a pipeline."""
    ranks: tuple[RankParts, ...]
    """By model-parallel rank."""
    vectors: tuple[TargetVector, ...]
    """Of all of them."""
    config: Mapping[str, Any]
    """``ds_config`` of the target."""
    model_dtype: DType
    """Of trained weights."""
    is_bf16: bool
    """Whether the run has ``bf16.enabled``, which file names tell."""
    frozen: tuple[str, ...]
    """Parameters that the optimizer does not have."""
    is_from_deepspeed: bool
    differing: tuple[str, ...]
    """Objects of which ranks have different values."""

    @classmethod
    def of(
        cls,
        tensors: TensorTable,
        blobs: Sequence[Blob],
        info: Mapping[str, Any],
        *,
        mesh: Mapping[str, int],
        options: WriterOptions,
    ) -> TargetParts:
        """The parts for the ranks of ``mesh`` at ``info["zero_stage"]``.

        Raises:
            Unsupported: see `TargetState.of` and `target_vectors`; stages 2 and 3 of pipelines, 3 with experts.
            LayoutError: see `rank_parts`, `Stages.of` and `target_vectors`; a stage without a parameter of some group.
        """
        state = TargetState.of(tensors, blobs, info)
        stage = int(info["zero_stage"])
        given = config_of(state.model)
        dtype = DTYPES[str(info["model_dtype"])]
        is_bf16 = _is_enabled(given, "bf16") if given else dtype.name == "bfloat16"
        base: dict[str, Any] = given or {"bf16": {"enabled": is_bf16}, "fp16": {"enabled": dtype.name == "float16"}}
        found = base.get("zero_optimization")
        config = {**base, "zero_optimization": {**(found if isinstance(found, Mapping) else {}), "stage": stage}}
        grid = Grid.of(mesh)
        zero = ZeroConfig.of(config, stage=stage, grid=grid, itemsize=dtype.itemsize)
        stages = Stages.of(info, grid.pp, first=options.first_stage_layers, last=options.last_stage_layers)
        ranks = tuple(rank_parts(state, tensors, info, grid, stages))
        vectors = tuple(v for own in ranks for v in target_vectors(own.groups, own.mp, tensors, zero))
        _check_stage(stage, stages, ranks, grid)
        frozen = tuple(name for name in info.get("frozen", ()) if name in state.weights)
        own = "deepspeed_version" in info
        differing = tuple(_differing(blobs, state))
        return cls(tensors, state, zero, stages, ranks, vectors, config, dtype, is_bf16, frozen, own, differing)

    @property
    def is_elastic(self) -> bool:
        """Whether the source has no hyperparameters, as runs with ``elastic_checkpoint`` save."""
        return not any(group.hyperparameters for group in self.state.groups)

    @property
    def is_stage3(self) -> bool:
        """Whether parameters are cut by themselves, and every rank has a model state."""
        return self.zero.stage == 3

    @property
    def grid(self) -> Grid:
        """Sizes of the target's axes."""
        return self.zero.grid

    def vectors_of(self, mp: int, dp: int) -> list[tuple[int, TargetVector, int]]:
        """Of one rank's optimizer: number among all vectors, the vector, and which of its partitions."""
        return [
            (number, vector, vector.members.index(dp))
            for number, vector in enumerate(self.vectors)
            if vector.mp == mp and dp in vector.members
        ]

    def model_ranks(self) -> range:
        """Data-parallel ranks with a model state of their own."""
        return range(self.grid.dp if self.is_stage3 else 1)

    @cached_property
    def slots(self) -> Slots:
        """Each rank's part of every vector; weights of model states, at stage 3 on all ranks; frozen ones cut there.

        Keys: ``("state", number of vector, partition, state)``, ``("weight", mp, dp, name)`` and ``("other", mp, dp,
        row)``.
        """
        found = SlotBuilder(self.tensors.shape.shape[1])
        for number, vector in enumerate(self.vectors):
            rows = {state: _rows(vector, state) for state in vector.states}
            for index, dp in enumerate(vector.members):
                rank, own = self.grid.rank(vector.mp, dp), vector.pieces(index)
                for state, tensors in rows.items():
                    key = ("state", number, index, state)
                    found.add(key, rank, tensors[own.parameter], own.offsets, own.sizes, own.position)
        frozen = set(self.frozen) if self.is_stage3 else set[str]()
        for parts in self.ranks:
            cut = [weight for weight in parts.weights if weight.shard or weight.name in frozen]
            whole = [weight for weight in parts.weights if not weight.shard and weight.name not in frozen]
            whole_rows = np.array([one.row for one in whole] + [row for _, row in self.state.others], dtype=np.int64)
            for dp in self.model_ranks():
                rank, place = self.grid.rank(parts.mp, dp), (parts.mp, dp)
                for weight in cut:
                    share = (self.grid.dp, dp) if weight.name in frozen else (1, 0)
                    slices = per_parameter_slices(np.array([prod(weight.shape)], dtype=np.int64), *share)
                    own = pieces_of(slices, [weight.shape], [weight.shard])
                    row = np.full(len(own.parameter), weight.row, dtype=np.int64)
                    found.add(("weight", *place, weight.name), rank, row, own.offsets, own.sizes, own.position)
                keys = [("weight", *place, one.name) for one in whole]
                others = [("other", *place, number) for _, number in self.state.others]
                found.add_whole([*keys, *others], rank, whole_rows, self.tensors.shape[whole_rows])
        return found.slots()

    def notes(self) -> Iterator[str]:
        """What a person should know."""
        if not self.is_from_deepspeed:
            yield (
                "parameters of a group stand in the order of the source's optimizer: DeepSpeed loads them by position, "
                "so the run must give them to its optimizer in that order"
            )
        if self.stages is not None and self.stages.is_spread:
            yield self.stages.note()
        if self.is_elastic:
            yield (
                "an elastic checkpoint has no hyperparameters and stays elastic: a run with elastic_checkpoint "
                "loads it and goes on with its own"
            )
        dtypes = {self.tensors.dtypes[row].name for name, row in self.state.weights.items() if self._is_trained(name)}
        if dtypes - {self.model_dtype.name}:
            yield (
                f"weights are stored as fp32 masters, which DeepSpeed rounds to {self.model_dtype.name} when it loads "
                f"them; --dtype {self.model_dtype.name} stores them rounded"
            )
        if self.differing:
            shown = ", ".join(self.differing[:4]) + (" ..." if len(self.differing) > 4 else "")
            yield (
                f"{counted(len(self.differing), 'object', 'differ')} between ranks; the first rank's are written: "
                f"{shown}"
            )

    def _is_trained(self, name: str) -> bool:
        return name in self.state.parameters


def _rows(vector: TargetVector, state: str) -> Int64Array:
    """int64[n_parameters]: the tensors of one state."""
    return np.array([own.states[state] for own in vector.parameters], dtype=np.int64)


def _check_stage(stage: int, stages: Stages | None, ranks: Sequence[RankParts], grid: Grid) -> None:
    """Nothing, when DeepSpeed has such runs (``runtime/pipe/engine.py``, ``runtime/engine.py`` of 0.19.8)."""
    if stages is not None and stage > 1:
        raise Unsupported(
            f"stage {stage} of a pipeline, which DeepSpeed runs at stage 1 alone", hint="use --zero-stage 1"
        )
    for rank in ranks if stages is not None else ():
        empty = next((number for number, group in enumerate(rank.groups) if not group), None)
        if empty is not None:
            raise LayoutError(
                f"stage {rank.mp // grid.tp} has no parameter of group {empty}, and DeepSpeed runs no empty group",
                hint="choose other stages with --pp, --first-stage-layers and --last-stage-layers, or write --to "
                "deepspeed-universal",
            )
    experts = next((own.name for rank in ranks for group in rank.groups for own in group if is_expert(own.name)), None)
    if experts is not None and (stage == 3 or stages is not None):
        raise Unsupported(
            "experts of a pipeline" if stages is not None else "experts at stage 3, where DeepSpeed does not load them",
            where=experts,
            hint="use --zero-stage 1 or 2, or write --to deepspeed-universal",
        )
    if experts is None and grid.ep > 1:
        raise Unsupported(
            f"{counted(grid.ep, 'expert-parallel rank')}, and there are no experts", hint="leave out --ep"
        )


def _is_enabled(config: Mapping[str, Any], key: str) -> bool:
    own = config.get(key)
    return isinstance(own, Mapping) and bool(own.get("enabled"))


def _differing(blobs: Sequence[Blob], state: TargetState) -> Iterator[str]:
    first: dict[str, Blob] = {}
    seen: set[str] = set()
    for blob in blobs:
        known = first.setdefault(blob.fqn, blob)
        if known is blob or blob.fqn in seen or blob.fqn.startswith(state.groups_name):
            continue
        if not same_value(known.value, blob.value):
            seen.add(blob.fqn)
            yield blob.fqn
