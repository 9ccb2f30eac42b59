"""A target vector is one flat vector of each rank: which parameters are in it, and where.

At stages 1 and 2 there is one for each group of parameters, cut into equal partitions. At stage 3 a group is split into
sub-groups, and every parameter is cut by itself (``zero/stage_1_and_2.py`` and ``zero/stage3.py`` of DeepSpeed 0.19.8).
The layout follows from the configuration of the run that loads it, taken to be that of the source's but for the stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from math import gcd
from typing import Any

import numpy as np

from ckpt_tool.errors import LayoutError, Unsupported
from ckpt_tool.formats.deepspeed.experts import expert_of, is_expert, local_names
from ckpt_tool.formats.deepspeed.partition import Slices, round_robin_order
from ckpt_tool.formats.deepspeed.target_grid import Grid
from ckpt_tool.formats.deepspeed.target_pieces import Pieces, pieces_of
from ckpt_tool.formats.deepspeed.target_state import Parameter
from ckpt_tool.formats.deepspeed.vectors import MASTER, FlatSet
from ckpt_tool.manifest.tables import TensorTable
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["TargetVector", "ZeroConfig", "target_vectors"]

_SUB_GROUP_SIZE = 10**9
_ALIGNED_BYTES = 16


@dataclass(frozen=True, slots=True)
class ZeroConfig:
    """What of a run's configuration says how vectors are cut."""

    stage: int
    grid: Grid
    is_round_robin: bool
    alignment: int
    """Parameters start at multiples of so many elements."""
    sub_group_size: int
    data_first: bool
    """Whether ranks that share experts are neighbours."""

    @property
    def world_size(self) -> int:
        """Of data-parallel ranks."""
        return self.grid.dp

    @classmethod
    def of(cls, config: Mapping[str, Any], *, stage: int, grid: Grid, itemsize: int) -> ZeroConfig:
        """By ``ds_config``; ``itemsize`` is that of the model's weights."""
        zero = config.get("zero_optimization")
        own: Mapping[str, Any] = zero if isinstance(zero, Mapping) else {}
        size = own.get("sub_group_size")
        return cls(
            stage,
            grid,
            stage < 3 and bool(own.get("round_robin_gradients")),
            _ALIGNED_BYTES // gcd(_ALIGNED_BYTES, itemsize) if stage < 3 and own.get("parameter_alignment") else 1,
            int(size) if isinstance(size, (int, float)) else _SUB_GROUP_SIZE,
            bool(config.get("use_data_before_expert_parallelism")),
        )


@dataclass(frozen=True)
class TargetVector:
    """One flat vector, of all ranks that share it."""

    mp: int
    """The model-parallel rank."""
    members: tuple[int, ...]
    """Data-parallel ranks, in the order of their partitions."""
    group: int
    parameters: tuple[Parameter, ...]
    flat: FlatSet
    paddings: tuple[int, ...]
    """Elements behind each parameter that belong to none."""

    @cached_property
    def states(self) -> tuple[str, ...]:
        """Names of the states that are vectors; the master first."""
        return (MASTER, *(name for name in self.parameters[0].states if name != MASTER))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the parameters, in flat order."""
        return {own.name: own.shape for own in self.parameters}

    @property
    def length(self) -> int:
        """Elements of a rank's vector, padding included."""
        if self.flat.starts is not None:
            return self.flat.length
        return int((-(-self.flat.numel // self.flat.world_size)).sum())

    def lean_length(self, index: int) -> int:
        """Elements of a partition up to the last one that belongs to a parameter."""
        if self.flat.starts is None:
            return self.length
        total = int(self.flat.starts[-1] + self.flat.numel[-1])
        return min(max(total - index * self.length, 0), self.length)

    def slices(self, index: int) -> Slices:
        """What a partition holds of each parameter."""
        return self.flat.slices(index)

    def pieces(self, index: int) -> Pieces:
        """The same as boxes of the whole tensors."""
        return pieces_of(self.slices(index), self.flat.shapes, [own.shard for own in self.parameters])


def target_vectors(
    groups: Sequence[Sequence[Parameter]], mp: int, tensors: TensorTable, config: ZeroConfig
) -> list[TargetVector]:
    """The vectors of a model-parallel rank, in the order in which its optimizer numbers them.

    Args:
        groups: its parameters.
        mp: its number.
        tensors: the target's.
        config: how they are cut.

    Raises:
        Unsupported: parameters of one vector have other states than the first, or states that are no vectors.
        LayoutError: experts that the expert-parallel ranks cannot share evenly.
    """
    found: list[TargetVector] = []
    for number, members in enumerate(groups):
        own = [parameter for parameter in members if 0 not in parameter.shape]
        if own and config.stage == 3:
            everyone = _Members(mp, number, tuple(range(config.world_size)))
            found += [_per_parameter(everyone, part) for part in _sub_groups(own, config)]
        elif own:
            found += _of_group(mp, number, own, config)
    for vector in found:
        _check_states(vector, tensors)
    return found


@dataclass(frozen=True, slots=True)
class _Members:
    """Who shares a vector."""

    mp: int
    group: int
    ranks: tuple[int, ...]


def _of_group(mp: int, number: int, own: Sequence[Parameter], config: ZeroConfig) -> Iterator[TargetVector]:
    """One vector, or of experts one for each expert-parallel rank."""
    by_name = {parameter.name: parameter for parameter in own}
    experts = [name for name in by_name if is_expert(name)]
    if not experts:
        yield _contiguous(_Members(mp, number, tuple(range(config.world_size))), own, config)
        return
    if len(experts) != len(by_name):
        raise Unsupported(f"group {number} has parameters of experts and others, which share no partitions")
    ep_size = config.grid.ep
    for prefix, numbers in _numbers_of(experts).items():
        if numbers != set(range(len(numbers))) or len(numbers) % ep_size:
            raise LayoutError(
                f"{counted(len(numbers), 'expert')} cannot be shared by {counted(ep_size, 'expert-parallel rank')}",
                where=prefix,
                hint="choose an --ep that divides it",
            )
    for ep, names in enumerate(local_names(experts, ep_size)):
        ranks = config.grid.expert_ranks(ep, data_first=config.data_first)
        renamed = [replace(by_name[name], name=local) for name, local in names]
        yield _contiguous(_Members(mp, number, ranks), renamed, config)


def _numbers_of(names: Sequence[str]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for name in names:
        expert = expert_of(name)
        if expert is not None:
            found.setdefault(expert[0], set()).add(expert[1])
    return found


def _contiguous(who: _Members, parameters: Sequence[Parameter], config: ZeroConfig) -> TargetVector:
    world_size = len(who.ranks)
    order = round_robin_order(len(parameters), world_size) if config.is_round_robin else range(len(parameters))
    own = [parameters[index] for index in order]
    shapes = tuple(parameter.shape for parameter in own)
    paddings, starts, at = [], [], 0
    for number, shape in enumerate(shapes):
        starts.append(at)
        at += int(np.prod(shape, dtype=np.int64))
        paddings.append(-at % config.alignment if number + 1 < len(shapes) else 0)
        at += paddings[-1]
    length = 2 * -(-at // (2 * world_size))
    names = tuple(parameter.name for parameter in own)
    flat = FlatSet(who.mp, names, shapes, world_size, (), np.array(starts, dtype=np.int64), length)
    return TargetVector(who.mp, who.ranks, who.group, tuple(own), flat, tuple(paddings))


def _per_parameter(who: _Members, parameters: Sequence[Parameter]) -> TargetVector:
    names = tuple(parameter.name for parameter in parameters)
    shapes = tuple(parameter.shape for parameter in parameters)
    flat = FlatSet(who.mp, names, shapes, len(who.ranks), ())
    return TargetVector(who.mp, who.ranks, who.group, tuple(parameters), flat, (0,) * len(names))


def _sub_groups(parameters: Sequence[Parameter], config: ZeroConfig) -> Iterator[list[Parameter]]:
    """A sub-group ends with the parameter that makes a rank's part of it reach the limit."""
    per_rank = [-(-int(np.prod(own.shape, dtype=np.int64)) // config.world_size) for own in parameters]
    if config.sub_group_size >= sum(per_rank):
        yield list(parameters)
        return
    number, held = 0, 0
    numbers = []
    for size in per_rank:
        numbers.append(number)
        held += size
        if held >= config.sub_group_size:
            number, held = number + 1, 0
    for _, members in groupby(zip(numbers, parameters, strict=True), key=lambda pair: pair[0]):
        yield [own for _, own in members]


def _check_states(vector: TargetVector, tensors: TensorTable) -> None:
    """Nothing, when all parameters have the same states, which all have a parameter's shape, and one dtype each."""
    for own in vector.parameters:
        if set(own.states) != set(vector.states):
            differing = sorted(set(own.states) ^ set(vector.states))
            raise Unsupported(
                f"not all parameters of group {vector.group} have the states {', '.join(differing)}, of which "
                "DeepSpeed makes one vector",
                where=own.name,
            )
        for state, row in own.states.items():
            expected = tensors.dtypes[vector.parameters[0].states[state]]
            shape = tensors.shape_of(own.states[MASTER])
            if tensors.shape_of(row) != shape or tensors.dtypes[row] != expected:
                raise Unsupported(
                    f"{state} is {tensors.dtypes[row].name}{list(tensors.shape_of(row))}, expected "
                    f"{expected.name}{list(shape)} like its parameter: it cannot be part of a flat vector",
                    where=own.name,
                    hint="leave it out with --exclude, or write another format",
                )
