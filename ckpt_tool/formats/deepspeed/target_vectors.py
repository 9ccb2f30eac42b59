"""A target vector is one flat vector of each rank: which parameters are in it, and where.

At stages 1 and 2 there is one for each group of parameters, cut into equal partitions. At stage 3 a group is split into
sub-groups, and every parameter is cut by itself (``zero/stage_1_and_2.py`` and ``zero/stage3.py`` of DeepSpeed 0.19.8).
The layout follows from the configuration of the run that loads it, taken to be that of the source's but for the stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from math import gcd
from typing import Any

import numpy as np

from ckpt_tool.errors import LayoutError, Unsupported
from ckpt_tool.formats.deepspeed.partition import Slices, round_robin_order
from ckpt_tool.formats.deepspeed.target_state import Parameter, TargetState
from ckpt_tool.formats.deepspeed.vectors import MASTER, FlatSet
from ckpt_tool.geometry.columns import Int64Array
from ckpt_tool.geometry.flat import flat_boxes_columns
from ckpt_tool.manifest.tables import TensorTable, pad_shapes
from ckpt_tool.records import dataclass

__all__ = ["Pieces", "TargetVector", "ZeroConfig", "target_vectors"]

_SUB_GROUP_SIZE = 10**9
_ALIGNED_BYTES = 16


@dataclass(frozen=True, slots=True)
class ZeroConfig:
    """What of a run's configuration says how vectors are cut."""

    stage: int
    world_size: int
    """Of data-parallel ranks."""
    is_round_robin: bool
    alignment: int
    """Parameters start at multiples of so many elements."""
    sub_group_size: int

    @classmethod
    def of(cls, config: Mapping[str, Any], *, stage: int, world_size: int, itemsize: int) -> ZeroConfig:
        """By ``ds_config``; ``itemsize`` is that of the model's weights."""
        zero = config.get("zero_optimization")
        own: Mapping[str, Any] = zero if isinstance(zero, Mapping) else {}
        size = own.get("sub_group_size")
        return cls(
            stage,
            world_size,
            stage < 3 and bool(own.get("round_robin_gradients")),
            _ALIGNED_BYTES // gcd(_ALIGNED_BYTES, itemsize) if stage < 3 and own.get("parameter_alignment") else 1,
            int(size) if isinstance(size, (int, float)) else _SUB_GROUP_SIZE,
        )


@dataclass(frozen=True, slots=True)
class Pieces:
    """Columns: boxes of parameters that follow one another in one rank's vector."""

    parameter: Int64Array  # int64[n], index into the vector's parameters
    offsets: Int64Array  # int64[n, D]
    sizes: Int64Array  # int64[n, D]
    position: Int64Array  # int64[n], element of the rank's vector


@dataclass(frozen=True)
class TargetVector:
    """One flat vector, of all ranks."""

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

    def lean_length(self, rank: int) -> int:
        """Elements up to the last one that belongs to a parameter."""
        if self.flat.starts is None:
            return self.length
        total = int(self.flat.starts[-1] + self.flat.numel[-1])
        return min(max(total - rank * self.length, 0), self.length)

    def slices(self, rank: int) -> Slices:
        """What a rank holds of each parameter."""
        return self.flat.slices(rank)

    def pieces(self, rank: int) -> Pieces:
        """The same as boxes."""
        slices = self.slices(rank)
        shape = pad_shapes(self.flat.shapes, max((len(s) for s in self.flat.shapes), default=0), 1)
        row, offsets, sizes, start = flat_boxes_columns(slices.start, slices.stop, shape[slices.parameter])
        return Pieces(slices.parameter[row], offsets, sizes, slices.position[row] + start - slices.start[row])


def target_vectors(state: TargetState, tensors: TensorTable, config: ZeroConfig) -> list[TargetVector]:
    """The vectors, in the order in which an optimizer of DeepSpeed numbers them.

    Raises:
        Unsupported: parameters of one vector have other states than the first, or states that are no vectors.
        LayoutError: a group names a parameter that has no state.
    """
    found: list[TargetVector] = []
    for number, group in enumerate(state.groups):
        missing = [name for name in group.names if name not in state.parameters]
        if missing:
            raise LayoutError(
                f"{len(missing):,} parameters of group {number} have no state, which DeepSpeed keeps for all of them",
                where=missing[0],
                hint="it has no step yet for them: write the weights alone, or train one step first",
            )
        own = [state.parameters[name] for name in group.names]
        own = [parameter for parameter in own if 0 not in parameter.shape]
        if own and config.stage == 3:
            found += [_per_parameter(number, part, config) for part in _sub_groups(own, config)]
        elif own:
            found.append(_contiguous(number, own, config))
    listed = {parameter.name for vector in found for parameter in vector.parameters}
    apart = [name for name, own in state.parameters.items() if name not in listed and 0 not in own.shape]
    if apart:
        raise LayoutError(
            f"{len(apart):,} parameters have state, but are in no group of the optimizer, as far as the source says",
            where=apart[0],
            hint="DeepSpeed flattens them by group; write the weights alone, or the state as dcp",
        )
    for vector in found:
        _check_states(vector, tensors)
    return found


def _contiguous(group: int, parameters: Sequence[Parameter], config: ZeroConfig) -> TargetVector:
    order = round_robin_order(len(parameters), config.world_size) if config.is_round_robin else range(len(parameters))
    own = [parameters[index] for index in order]
    shapes = tuple(parameter.shape for parameter in own)
    paddings, starts, at = [], [], 0
    for number, shape in enumerate(shapes):
        starts.append(at)
        at += int(np.prod(shape, dtype=np.int64))
        paddings.append(-at % config.alignment if number + 1 < len(shapes) else 0)
        at += paddings[-1]
    length = 2 * -(-at // (2 * config.world_size))
    names = tuple(parameter.name for parameter in own)
    flat = FlatSet(0, names, shapes, config.world_size, (), np.array(starts, dtype=np.int64), length)
    return TargetVector(group, tuple(own), flat, tuple(paddings))


def _per_parameter(group: int, parameters: Sequence[Parameter], config: ZeroConfig) -> TargetVector:
    names = tuple(parameter.name for parameter in parameters)
    shapes = tuple(parameter.shape for parameter in parameters)
    flat = FlatSet(0, names, shapes, config.world_size, ())
    return TargetVector(group, tuple(parameters), flat, (0,) * len(names))


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
            if tensors.shape_of(row) != own.shape or tensors.dtypes[row] != expected:
                raise Unsupported(
                    f"{state} is {tensors.dtypes[row].name}{list(tensors.shape_of(row))}, expected "
                    f"{expected.name}{list(own.shape)} like its parameter: it cannot be part of a flat vector",
                    where=own.name,
                    hint="leave it out with --exclude, or write another format",
                )
