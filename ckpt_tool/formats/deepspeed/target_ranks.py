"""What each model-parallel rank of a target has: the groups of its optimizer, and the weights that its files hold.

Pipeline stages have parameters whole, tensor-parallel ranks a shard of each, by the rules of the source's record.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt_tool.errors import LayoutError, Unsupported
from ckpt_tool.formats.deepspeed.affine import Pair
from ckpt_tool.formats.deepspeed.fewer_ranks import for_ranks
from ckpt_tool.formats.deepspeed.opened import INFO_KEY
from ckpt_tool.formats.deepspeed.sharding import Cut, Rules
from ckpt_tool.formats.deepspeed.target_grid import Grid
from ckpt_tool.formats.deepspeed.target_stages import Stages
from ckpt_tool.formats.deepspeed.target_state import Parameter, TargetState
from ckpt_tool.manifest.tables import TensorTable
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["RankParts", "Weight", "rank_parts", "record_of"]

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight or buffer of one rank."""

    name: str
    row: int
    shape: Shape
    """Of its shard."""
    shard: tuple[Pair, ...] = ()
    """As in `Parameter`."""


@dataclass(frozen=True)
class RankParts:
    """One model-parallel rank's part of the state."""

    mp: int
    groups: tuple[tuple[Parameter, ...], ...]
    weights: tuple[Weight, ...]
    """Those that the rank stores: of tied ones the first stage has the only copy."""


def rank_parts(
    state: TargetState, tensors: TensorTable, info: Mapping[str, Any], grid: Grid, stages: Stages | None
) -> list[RankParts]:
    """The parts of all model-parallel ranks.

    Raises:
        LayoutError: a group names a parameter that has no state, or nothing says how tensor-parallel ranks share one.
    """
    groups = _groups(state)
    cutter = _Cutter.of(state, info, grid.tp)
    found = []
    for mp in range(grid.mp):
        stage, tp = divmod(mp, grid.tp)
        own = tuple(
            tuple(
                _local(parameter, cutter.cut(parameter.name, parameter.shape, tp))
                for parameter in group
                if stages is None or stage in stages.of_parameter(parameter.name)
            )
            for group in groups
        )
        weights = []
        for name, row in state.weights.items():
            if stages is None or stages.of_parameter(name)[0] == stage:
                cut = cutter.cut(name, tensors.shape_of(row), tp)
                weights.append(Weight(name, row, cut.shape, cut.pairs))
        found.append(RankParts(mp, own, tuple(weights)))
    return found


def _local(parameter: Parameter, cut: Cut) -> Parameter:
    return replace(parameter, shape=cut.shape, shard=cut.pairs)


def _groups(state: TargetState) -> list[list[Parameter]]:
    """Parameters by group."""
    found = []
    for number, group in enumerate(state.groups):
        _refuse_missing((name for name in group.names if name not in state.parameters), number)
        found.append([state.parameters[name] for name in group.names])
    listed = {parameter.name for group in found for parameter in group}
    apart = [name for name, own in state.parameters.items() if name not in listed and 0 not in own.shape]
    if apart:
        raise LayoutError(
            f"{counted(len(apart), 'parameter', 'have')} state, but are in no group of the optimizer, as far as the "
            "source says",
            where=apart[0],
            hint="DeepSpeed flattens them by group; write the weights alone, or the state as dcp",
        )
    return found


def _refuse_missing(names: Iterable[str], group: int) -> None:
    missing = list(names)
    if missing:
        raise LayoutError(
            f"{counted(len(missing), f'parameter of group {group}', 'have')} no state, which DeepSpeed keeps for all "
            "of them",
            where=missing[0],
            hint="it has no step yet for them: write the weights alone, or train one step first",
        )


@dataclass(frozen=True)
class _Cutter:
    """How tensor-parallel ranks share a tensor."""

    world_size: int
    rules: Rules | None
    whole: frozenset[str]
    """Names that every rank has whole: buffers."""
    owners: Mapping[str, str]
    padded_rows: Mapping[str, int]

    @classmethod
    def of(cls, state: TargetState, info: Mapping[str, Any], world_size: int) -> _Cutter:
        record = record_of(state.model)
        if world_size > 1 and record is None:
            raise Unsupported(
                f"{counted(world_size, 'tensor-parallel rank')}: nothing says how they share tensors, as "
                "universal_checkpoint_info does in files of DeepSpeed's AutoTP and of Megatron-DeepSpeed",
                hint="leave out --tp, or write --to deepspeed-universal, which a run cuts for itself",
            )
        rules = None if record is None or world_size == 1 else Rules.parse(for_ranks(record, world_size), INFO_KEY)
        shared = info.get("shared", {})
        return cls(world_size, rules, frozenset(info.get("buffers", ())), shared, info.get("padded_rows", {}))

    def cut(self, name: str, shape: Shape, tp: int) -> Cut:
        """Rank ``tp``'s shard."""
        if self.rules is None or name in self.whole:
            return Cut(shape, ())
        owner = self.owners.get(name, name)
        return self.rules.cut(owner, shape, self.world_size, self.padded_rows.get(owner, 0))[tp]


def record_of(entries: Sequence[tuple[Any, Any]]) -> Mapping[str, Any] | None:
    """``universal_checkpoint_info`` among the source's objects, None when it has none."""
    return next((value for path, value in entries if path == (INFO_KEY,) and isinstance(value, Mapping)), None)
