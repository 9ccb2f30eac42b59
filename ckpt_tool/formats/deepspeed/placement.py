"""A placement answers which tensors, and which boxes of them, one rank's copy of a parameter is.

Ranks here are model-parallel ones: stage times tensor-parallel ranks plus tensor-parallel rank. Of copies that several
ranks hold (replicated shards, parameters tied between stages) the lowest rank's is taken; the others are listed, to be
compared. Where nothing tells how shards join, each keeps a name of its own, ``name@tp1``.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_tool.errors import FormatError, NotFound
from ckpt_tool.formats.deepspeed.affine import Pair
from ckpt_tool.formats.deepspeed.sharding import Join, Rules, identity
from ckpt_tool.geometry.absent import absent_numbers
from ckpt_tool.records import dataclass, field

__all__ = ["Placement", "Target"]

Shape = tuple[int, ...]
_MAX_NAMED = 100
_COMPLETE_BY_ITSELF = frozenset({"affine map", "replicated", "averaged"})


@dataclass(frozen=True, slots=True)
class Target:
    """A tensor that a shard is a part of."""

    name: str
    shape: Shape
    pairs: tuple[Pair, ...]


@dataclass
class Placement:
    """Targets by rank and parameter.

    ``copies``, ``averaged``, ``unjoined``, ``by_default`` and ``padded`` fill as targets are asked for.
    """

    tp_world_size: int
    rules: Rules | None
    shapes: Mapping[int, Mapping[str, Shape]]
    """Of the shards, by rank and name."""
    buffers: frozenset[str]
    """Names that are no parameters: equal on all tensor-parallel ranks."""
    owners: Mapping[str, str] = field(default_factory=dict)
    """Second names, with the first: their rule is that of the first."""
    apart: frozenset[str] = frozenset()
    """Names of which every rank's copy is a tensor of its own, ``name@mp1``: to compare them."""
    copies: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By name: ranks that hold the same elements, the one that is taken first."""
    averaged: set[str] = field(default_factory=set)
    unjoined: set[str] = field(default_factory=set)
    by_default: set[str] = field(default_factory=set)
    """Names that no rule names, see `Join`."""
    padded: dict[str, int] = field(default_factory=dict)
    """By name: rows that all shards have together, where some of them are padding."""

    def targets(self, mp: int, name: str) -> tuple[Target, ...]:
        """What rank ``mp``'s copy of ``name`` is; nothing when another rank's is taken.

        Raises:
            FormatError: shards do not fit each other.
            NotFound: shards are missing, so that the shape of the whole is not known.
        """
        shape = self.shapes[mp][name]
        if name in self.apart:
            return (Target(f"{name}@mp{mp}", shape, identity(shape)),)
        holders = sorted(rank for rank, shapes in self.shapes.items() if name in shapes)
        stage, tp = divmod(mp, self.tp_world_size)
        first_stage = holders[0] // self.tp_world_size
        if stage != first_stage:
            self.copies.setdefault(name, tuple(holders))
            return ()
        if self.tp_world_size == 1:
            return (Target(name, shape, identity(shape)),)
        shards = {
            rank % self.tp_world_size: self.shapes[rank][name]
            for rank in holders
            if rank // self.tp_world_size == first_stage
        }
        if name in self.buffers and len(set(shards.values())) == 1:
            return self._placed(name, mp, holders, tp, Join(shape, _first_only(shards), "replicated"))
        if self.rules is None or name in self.buffers:
            self.unjoined.add(name)
            return (Target(f"{name}@tp{tp}", shape, identity(shape)),)
        join = self.rules.join(self.owners.get(name, name), shards)
        if len(shards) < self.tp_world_size and join.how not in _COMPLETE_BY_ITSELF:
            missing = absent_numbers(shards, self.tp_world_size, at_most=_MAX_NAMED)
            raise NotFound(
                f"its shards on tensor-parallel ranks {missing} are missing, so that its shape is not known",
                where=name,
                hint="fetch the files of all ranks",
            )
        if join.is_averaged:
            self.averaged.add(name)
        if join.is_default:
            self.by_default.add(name)
        if join.padded_rows:
            self.padded[name] = join.padded_rows
        return self._placed(name, mp, holders, tp, join)

    def _placed(self, name: str, mp: int, holders: list[int], tp: int, join: Join) -> tuple[Target, ...]:
        if join.replicated_on or holders[-1] // self.tp_world_size != mp // self.tp_world_size:
            self.copies.setdefault(name, tuple(holders))
        pairs = join.pairs.get(tp)
        if pairs is None:
            raise FormatError(f"tensor-parallel rank {tp} has a shard that its rule does not know", where=name)
        return (Target(name, join.shape, pairs),) if pairs else ()


def _first_only(shards: Mapping[int, Shape]) -> dict[int, tuple[Pair, ...]]:
    first = min(shards)
    return {rank: identity(shape) if rank == first else () for rank, shape in shards.items()}
