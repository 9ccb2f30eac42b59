"""The model of per-rank files: every rank's tensors with their place in the global weights.

A tensor's key, its leading indices (layer, expert) and its cut are reckoned once; they hold for the weight itself and
for each slot of its optimizer state, which has the same shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt_tool.errors import FormatError
from ckpt_tool.formats._pickle.tensors import TensorRef
from ckpt_tool.formats.megatron.before_mcore import is_before_mcore, with_todays_names
from ckpt_tool.formats.megatron.facts import Facts
from ckpt_tool.formats.megatron.live_names import LiveName, live_name, stage_offsets, uses_local_names
from ckpt_tool.formats.megatron.parallel import (
    ParallelRules,
    placed_parts,
    placed_views,
    view,
)
from ckpt_tool.formats.megatron.rank_census import EXTRA_STATE, Census, check_ends, local_experts
from ckpt_tool.formats.megatron.rank_cuts import Cutter
from ckpt_tool.formats.megatron.rank_files import Grid
from ckpt_tool.geometry.box import Box
from ckpt_tool.records import dataclass, field
from ckpt_tool.sizes import counted

__all__ = ["Member", "RankModel", "model_chunks"]

_NEMO_PREFIX = "model."
_WRAPPER = "module."
_MIXER = "mixer."
Coord = tuple[int, int, int]
"""Stage, expert-parallel rank, tensor-parallel rank."""


@dataclass(frozen=True, slots=True)
class Member:
    """One tensor of one rank."""

    name: str
    """As the file has it."""
    tensor: TensorRef
    key: str
    shape: tuple[int, ...]
    """Of the global weight."""
    lead: tuple[int, ...]
    cut: str
    rank: int
    n_ranks: int
    is_expert: bool
    n_fused: int = 0
    """Experts in it, when it is all of the rank's experts at once."""
    is_shared: bool = False
    """An embedding that the first and the last stage share: each has a copy."""
    rows: tuple[int, ...] = ()
    """Of each part of a fused weight, as the rank has them."""
    part_keys: tuple[str, ...] = ()
    """What parts that have a key of their own have behind the weight's."""

    def pieces(self, tensor: TensorRef) -> Iterator[tuple[str, tuple[int, ...], list[tuple[Box, TensorRef]]]]:
        """What comes behind the key, the shape, and what `placed` gives, of each weight that the tensor is of."""
        if not self.part_keys:
            yield "", self.shape, self.placed(tensor)
            return
        parts = placed_parts(tensor, self.lead, self.rank, self.n_ranks, self.rows)
        for key, n_rows, placed in zip(self.part_keys, self.rows, parts, strict=True):
            n_lead = len(self.lead)
            yield f".{key}", (*self.shape[:n_lead], n_rows * self.n_ranks, *self.shape[n_lead + 1 :]), placed

    def placed(self, tensor: TensorRef) -> list[tuple[Box, TensorRef]]:
        """The boxes of the global weight that ``tensor``, of this one's shape, holds, with the parts that they are."""
        if not self.n_fused:
            return placed_views(tensor, self.cut, self.lead, self.rank, self.n_ranks, self.rows)
        found = []
        for expert in range(self.n_fused):
            *lead, first = self.lead
            part = _transposed_expert(tensor, expert, self.n_fused, is_first="linear_fc1" in self.key)
            found += placed_views(part, self.cut, (*lead, first + expert), self.rank, self.n_ranks)
        return found


@dataclass
class RankModel:
    """All members, by rank and model chunk, in the order of the files."""

    members: dict[tuple[Coord, int], list[Member]] = field(default_factory=dict)
    stages: list[list[int]] = field(default_factory=list)
    """Global layers of each stage."""
    chunk_layers: list[list[list[int]]] = field(default_factory=list)
    """The same by model chunk."""
    extra_states: list[tuple[str, Any]] = field(default_factory=list)
    """Name and value of objects that belong to modules (``_extra_state``), by layer."""
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        chunks: Mapping[Coord, Sequence[Mapping[str, Any]]],
        grid: Grid,
        facts: Facts,
        rules: ParallelRules,
        where: str,
    ) -> RankModel:
        """The model in the state dicts of all ranks.

        Args:
            chunks: by rank, the state dict of each of its model chunks.
            grid: the ranks.
            facts: arguments of the run.
            rules: how weights are cut.
            where: names the checkpoint in messages.

        Raises:
            FormatError: ranks of a stage hold different layers, or fewer layers than the run had.
            LayoutError: a weight is cut, and no rule says how.
        """
        found = cls()
        plan = _plan(chunks, grid, facts, rules, where)
        found.chunk_layers = [
            [
                sorted(plan.offsets[stage, chunk] + layer for layer in layers)
                for (at, chunk), layers in sorted(plan.held.items())
                if at == stage
            ]
            for stage in range(grid.pp)
        ]
        found.stages = [sorted(layer for own in of_stage for layer in own) for of_stage in found.chunk_layers]
        if not plan.is_stacked:
            found.notes.append("layers differ in their tensors: each has names of its own")
        for coord, of_rank in chunks.items():
            for number, chunk in enumerate(of_rank):
                found.members[coord, number] = list(plan.members(coord, number, chunk))
                found.extra_states += plan.extra_states(coord, number, chunk)
        found.extra_states = list(dict(found.extra_states).items())
        return found


def model_chunks(root: Any, where: str) -> list[Mapping[str, Any]]:
    """The state dicts of a file's model chunks: ``model``, or ``model0``, ``model1`` ...; of NeMo 1, the file itself.

    Raises:
        FormatError: no model in it.
        Unsupported: a model from before mcore that differs in more than names.
    """
    keys = [key for key in root if isinstance(key, str)] if isinstance(root, dict) else []
    names = [key for key in keys if key.startswith("model") and key[5:].isdecimal()]
    ordered = ["model"] if "model" in keys else sorted(names, key=lambda name: int(name[5:]))
    chunks: list[Mapping[str, Any]] = [root[name] for name in ordered]
    if not chunks and keys and len(keys) == len(root) and all(key.startswith(_NEMO_PREFIX) for key in keys):
        chunks = [{key.removeprefix(_NEMO_PREFIX): value for key, value in root.items()}]
    while chunks and all(_is_wrapped(chunk) for chunk in chunks):
        chunks = [{key.removeprefix(_WRAPPER): value for key, value in chunk.items()} for chunk in chunks]
    if not chunks or not all(isinstance(chunk, dict) and all(type(k) is str for k in chunk) for chunk in chunks):
        raise FormatError(f"no model among the keys {keys[:8]}", where=where)
    return [with_todays_names(chunk, root, where) if is_before_mcore(chunk) else chunk for chunk in chunks]


def _is_wrapped(chunk: Any) -> bool:
    """Whether a model was saved with what Megatron puts around it (``Float16Module``, DDP), each under ``module``."""
    return isinstance(chunk, dict) and len(chunk) > 0 and all(str(key).startswith(_WRAPPER) for key in chunk)


@dataclass(frozen=True)
class _Plan:
    """What holds for all ranks."""

    grid: Grid
    facts: Facts
    cutter: Cutter
    local_names: Mapping[str, str]
    held: Mapping[tuple[int, int], set[int]]
    offsets: Mapping[tuple[int, int], int]
    n_layers: int
    n_local_experts: int
    is_stacked: bool
    predicts_ahead: bool
    """Whether there are layers for multi-token prediction, whose stage has a copy of the embedding."""

    def members(self, coord: Coord, chunk: int, state: Mapping[str, Any]) -> Iterator[Member]:
        """The tensors of one chunk of one rank."""
        stage, expert_rank, tensor_rank = coord
        for name, tensor in state.items():
            if not isinstance(tensor, TensorRef):
                continue
            live = live_name(name, self.local_names)
            if name.endswith(EXTRA_STATE):
                yield from self._extra_tensor(name, live, tensor, coord, self.offsets[stage, chunk])
                continue
            key, lead, lead_shape = self._key(live, self.offsets[stage, chunk])
            n_fused = 0
            if live.is_expert:
                n_fused = self.n_local_experts if live.is_fused else 0
                lead = (*lead, expert_rank * self.n_local_experts + (live.expert or 0))
                lead_shape = (*lead_shape, self.n_local_experts * self.grid.ep)
            n_ranks = self.grid.etp if live.is_expert else self.grid.tp
            cut, rows = self.cutter.cut(name, live, tensor, state, n_ranks)
            member = Member(
                name, tensor, key, (), lead, cut.kind, tensor_rank % n_ranks, n_ranks, live.is_expert, n_fused,
                is_shared=self._is_shared(stage, name), rows=rows, part_keys=cut.keys,
            )  # fmt: skip
            if member.is_shared and name == "output_layer.weight":
                member = replace(member, key="embedding.word_embeddings.weight")
            shape = _local_shape(member)
            if cut.kind not in ("whole", "buffer"):
                dim = 1 if cut.kind == "row" else 0
                shape = (*shape[:dim], shape[dim] * n_ranks, *shape[dim + 1 :])
            yield replace(member, shape=(*lead_shape, *shape))

    def _extra_tensor(
        self, name: str, live: LiveName, tensor: TensorRef, coord: Coord, first_layer: int
    ) -> Iterator[Member]:
        """A module's serialised state (Transformer Engine): of any length, as the first rank of each stage has it."""
        if self._is_first(coord, live):
            key = self._extra_key(live, coord, first_layer)
            yield Member(name, tensor, key, tensor.shape, (), "buffer", 0, 1, live.is_expert)

    def _extra_key(self, live: LiveName, coord: Coord, first_layer: int) -> str:
        """What distributed checkpoints call the piece of an object that a module's state is."""
        if live.layer is None and not live.rest.startswith("mtp."):
            return live.rest
        is_stacked = live.layer is not None and self.is_stacked
        index, shape, prefix = [0], [1], ""
        if live.layer is not None:
            prefix = "decoder.layers." if is_stacked else f"decoder.layers.{first_layer + live.layer}."
        if live.layer is not None and is_stacked:
            index, shape = [first_layer + live.layer], [self.n_layers]
        if live.is_expert and live.expert is not None:
            index = [*index[:is_stacked], coord[1] * self.n_local_experts + live.expert]
            shape = [*shape[:is_stacked], self.n_local_experts * self.grid.ep]
        joined = [".".join(map(str, numbers)) for numbers in (index, shape)]
        return f"{prefix}{live.rest}/shard_{joined[0]}_{joined[1]}"

    def extra_states(self, coord: Coord, chunk: int, state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Objects of modules, named as distributed checkpoints name them."""
        for name, value in state.items():
            live = live_name(name, self.local_names)
            if not isinstance(value, TensorRef) and self._is_first(coord, live):
                yield f"model.{self._extra_key(live, coord, self.offsets[coord[0], chunk])}", value

    def _is_first(self, coord: Coord, live: LiveName) -> bool:
        """Whether no rank of the stage before this one has the same module, or part of it."""
        _, expert_rank, tensor_rank = coord
        if live.is_expert:
            return tensor_rank == expert_rank * self.grid.etp % self.grid.tp
        return tensor_rank == expert_rank == 0

    def _key(self, live: LiveName, first_layer: int) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """Key, leading index and leading shape, without the expert's."""
        if live.layer is None:
            return live.rest, (), ()
        layer = first_layer + live.layer
        if self.is_stacked:
            return f"decoder.layers.{live.rest}", (layer,), (self.n_layers,)
        return f"decoder.layers.{layer}.{live.rest}", (), ()

    def _is_shared(self, stage: int, name: str) -> bool:
        """Whether it is one of the copies of an embedding that stages share."""
        is_tied = self.facts.untie_embeddings_and_output_weights is False
        if self.grid.pp == 1 or not (is_tied or self.predicts_ahead):
            return False
        is_output = is_tied and (stage, name) == (self.grid.pp - 1, "output_layer.weight")
        return is_output or name == "embedding.word_embeddings.weight"


def _plan(
    chunks: Mapping[Coord, Sequence[Mapping[str, Any]]], grid: Grid, facts: Facts, rules: ParallelRules, where: str
) -> _Plan:
    names = [name for of_rank in chunks.values() for chunk in of_rank for name in chunk]
    local_names = rules.local_names if uses_local_names(names, facts.transformer_impl) else {}
    census = Census()
    n_chunks = {len(of_rank) for of_rank in chunks.values()}
    if len(n_chunks) != 1:
        raise FormatError(f"ranks have {' and '.join(map(str, sorted(n_chunks)))} model chunks", where=where)
    for coord, of_rank in chunks.items():
        for number, chunk in enumerate(of_rank):
            census.add(coord, number, chunk, local_names, where)
    if facts.vpp > 1 and n_chunks != {facts.vpp}:
        raise FormatError(
            f"ranks have {counted(n_chunks.pop(), 'model chunk')}, the run's arguments say {facts.vpp}", where=where
        )
    check_ends(census, grid, where)
    n_local_experts = local_experts(census, grid, facts, where)
    offsets = stage_offsets({place: sorted(layers) for place, layers in census.held.items()}, where)
    n_layers = sum(len(layers) for layers in census.held.values())
    if facts.num_layers not in (None, n_layers):
        raise FormatError(
            f"the files hold {counted(n_layers, 'layer')} in {grid.pp} stages, the run's arguments say "
            f"{facts.num_layers:,}",
            where=where,
        )
    is_alike = len({tuple(sorted(layer.items())) for layer in census.layers.values()}) <= 1
    # mcore numbers the layers of Mamba's models in their names, alike or not
    is_stacked = is_alike and not any(rest.startswith(_MIXER) for layer in census.layers.values() for rest in layer)
    return _Plan(
        grid, facts, Cutter(rules, facts.swiglu, where), local_names, census.held, offsets, n_layers, n_local_experts,
        is_stacked, census.predicts_ahead,
    )  # fmt: skip


def _local_shape(member: Member) -> tuple[int, ...]:
    """The shape of one expert's, or one layer's, part on this rank, in the order of the global weight."""
    if not member.n_fused:
        return member.tensor.shape
    is_first = "linear_fc1" in member.key
    return _transposed_expert(member.tensor, 0, member.n_fused, is_first=is_first).shape


def _transposed_expert(tensor: TensorRef, expert: int, n_experts: int, *, is_first: bool) -> TensorRef:
    """One expert out of a fused weight: stored input by output, one expert after another.

    mcore's ``GroupedMLP`` views its two-dimensional parameters as ``[experts, hidden, -1]`` and ``[experts, -1,
    hidden]`` (transformer/moe/experts.py, 0.8 to 0.15), whatever their own two dimensions say.
    """
    hidden = tensor.shape[0] if is_first else tensor.shape[1]
    width, left = divmod(tensor.numel, n_experts * hidden)
    if left or len(tensor.shape) != 2:
        raise FormatError(f"a fused weight of shape {list(tensor.shape)} does not hold {counted(n_experts, 'expert')}")
    rows, columns = (hidden, width) if is_first else (width, hidden)
    one = view(tensor, expert * rows * columns, (rows, columns))
    return replace(one, shape=(columns, rows), strides=(1, columns))
