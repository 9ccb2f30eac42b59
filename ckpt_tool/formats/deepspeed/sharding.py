"""A join says how the shards of tensor-parallel ranks make one tensor, by ``universal_checkpoint_info``.

DeepSpeed's AutoTP and Megatron-DeepSpeed write that record into the model files (version 0.2 to 0.4); its rules are
those of ``deepspeed/checkpoint/ds_to_universal.py``, first fit: affine map, replicated, averaged, two halves, several
parts, rows, and everything else is joined along dimension 0. Without the record nothing says how shards join.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt_tool.errors import FormatError, LayoutError, Unsupported
from ckpt_tool.formats.deepspeed.affine import Pair, View, box_pairs, clipped
from ckpt_tool.formats.deepspeed.patterns import Patterns
from ckpt_tool.geometry.box import Box
from ckpt_tool.records import dataclass, field
from ckpt_tool.sizes import counted

__all__ = ["KNOWN_KEYS", "Cut", "Join", "Rules", "Shape", "identity", "ints", "pieces"]

Shape = tuple[int, ...]
KNOWN_KEYS = (
    "universal_checkpoint_version", "original_vocab_size", "vocabulary_parameter_patterns",
    "pipeline_replicated_parameter_patterns", "tp_replicated_parameter_patterns", "parameter_to_average_patterns",
    "parameter_with_row_parallelism_patterns", "parameter_with_2_sub_params_cat_dim_0", "parameter_with_sub_params",
    "sub_param_shard_widths", "affine_map", "expert_parameter_patterns", "autotp_unsupported_parameter_patterns",
)  # fmt: skip
"""What a record may say (DeepSpeed 0.19, ``checkpoint/constants.py``); those of later versions may say more."""


@dataclass(frozen=True, slots=True)
class Join:
    """One tensor out of its shards."""

    shape: Shape
    """Of the whole."""
    pairs: Mapping[int, tuple[Pair, ...]]
    """By tensor-parallel rank; a rank whose shard another one holds as well has none."""
    how: str
    is_averaged: bool = False
    """The trainer takes the mean of the copies, which need not be equal; here the first rank's is taken."""
    padded_rows: int = 0
    """Rows of all shards together, where some are padding."""
    is_default: bool = False
    """No rule names it, and it is joined along dimension 0 as DeepSpeed does with the rest."""

    @property
    def replicated_on(self) -> tuple[int, ...]:
        """Ranks whose copy is not taken."""
        return tuple(rank for rank, pairs in self.pairs.items() if not pairs)


@dataclass(frozen=True, slots=True)
class Cut:
    """One rank's shard of a tensor."""

    shape: Shape
    pairs: tuple[Pair, ...]


def identity(shape: Shape) -> tuple[Pair, ...]:
    """The pair of a shard that is the whole."""
    return (Pair(Box.whole(shape), Box.whole(shape)),)


@dataclass(frozen=True)
class Rules:
    """``universal_checkpoint_info``, parsed."""

    where: str
    affine: Patterns[Mapping[str, Any]]
    replicated: Patterns[bool]
    averaged: Patterns[bool]
    halves: Patterns[bool]
    parts: Patterns[tuple[int, tuple[int, ...]]]
    part_widths: Patterns[Sequence[Sequence[int]]]
    rows: Patterns[bool]
    vocabulary: Patterns[bool]
    vocabulary_size: int | None
    _joins: dict[tuple[str, tuple[tuple[int, Shape], ...]], Join] = field(default_factory=dict, repr=False)

    @classmethod
    def parse(cls, info: object, where: str) -> Rules:
        """The rules of a record.

        Raises:
            FormatError: it is no record of this kind.
        """
        if not isinstance(info, Mapping):
            raise FormatError(f"expected a dict of rules, got {type(info).__name__}", where=where)
        affine = info.get("affine_map") or {}
        params = affine.get("params", {}) if isinstance(affine, Mapping) else {}
        if not isinstance(params, Mapping):
            raise FormatError("the affine map has no dict of parameters", where=where)
        try:
            return cls._parsed(info, params, where)
        except (FormatError, Unsupported) as error:
            error.where = error.where or where
            raise

    @classmethod
    def _parsed(cls, info: Mapping[str, Any], params: Mapping[str, Any], where: str) -> Rules:
        size = info.get("original_vocab_size")
        widths = info.get("sub_param_shard_widths") or {}
        return cls(
            where=where,
            affine=Patterns({str(key): value for key, value in params.items() if isinstance(value, Mapping)}),
            replicated=_patterns(info, "tp_replicated_parameter_patterns"),
            averaged=_patterns(info, "parameter_to_average_patterns"),
            halves=_patterns(info, "parameter_with_2_sub_params_cat_dim_0"),
            parts=_parts(info.get("parameter_with_sub_params") or (), where),
            part_widths=Patterns({str(key): value for key, value in widths.items()}),
            rows=_patterns(info, "parameter_with_row_parallelism_patterns"),
            vocabulary=_patterns(info, "vocabulary_parameter_patterns"),
            vocabulary_size=size if type(size) is int and size > 0 else None,
        )

    def join(self, name: str, shards: Mapping[int, Shape]) -> Join:
        """How the shards of ``name``, by tensor-parallel rank, make one tensor.

        Raises:
            FormatError: their shapes do not fit the rule.
            Unsupported: a rule that is more than copies of boxes.
        """
        key = (name, tuple(sorted(shards.items())))
        if key not in self._joins:
            try:
                self._joins[key] = self._without_padding(name, self._join(name, dict(sorted(shards.items()))))
            except (FormatError, Unsupported) as error:
                error.where = error.where or f"{self.where}: {name}"
                raise
        return self._joins[key]

    def cut(self, name: str, shape: Shape, world_size: int, padded_rows: int = 0) -> dict[int, Cut]:
        """The shard of each of ``world_size`` ranks of a tensor; the reverse of `join`.

        Args:
            name: of the parameter.
            shape: of the whole.
            world_size: number of tensor-parallel ranks.
            padded_rows: rows that all shards have together where that is more than the whole has.

        Raises:
            LayoutError: the rule does not say how so many ranks share it.
            Unsupported: a rule that is more than copies of boxes.
        """
        entry = self.affine.get(name)
        whole = {rank: Cut(shape, identity(shape)) for rank in range(world_size)}
        if world_size == 1 or (entry is None and (self.replicated.get(name) or self.averaged.get(name))):
            return whole
        if entry is not None:
            return _affine_cuts(entry, name, world_size)
        parts = self.parts.get(name)
        widths = self.part_widths.get(name)
        if self.halves.get(name):
            dim, sizes = 0, [(padded_rows or shape[0]) // 2] * 2
        elif parts is not None:
            dim, sizes = parts[0], list(parts[1])
        else:
            dim = 1 if self.rows.get(name) and len(shape) > 1 else 0
            sizes = [(padded_rows if dim == 0 else 0) or shape[dim]] if shape else []
        if parts is not None and widths is not None:
            own = {rank: [int(part[rank]) for part in widths if rank < len(part)] for rank in whole}
        else:
            own = {rank: [size // world_size for size in sizes] for rank in whole}
        if [sum(column) for column in zip(*own.values(), strict=True)] != sizes or len(own) != world_size:
            raise LayoutError(
                f"{sizes} along dimension {dim} of {list(shape)} are not {world_size} equal shares",
                where=name,
                hint="choose a number of tensor-parallel ranks that divides it",
            )
        shards = {rank: (*shape[:dim], sum(own[rank]), *shape[dim + 1 :]) for rank in whole}
        joined = _concatenated(shards, dim, own, "")
        bounds = Box.whole(shape)
        return {
            rank: Cut(shards[rank], tuple(cut for pair in pairs if (cut := clipped(pair, bounds)) is not None))
            for rank, pairs in joined.pairs.items()
        }

    def _join(self, name: str, shards: Mapping[int, Shape]) -> Join:
        entry = self.affine.get(name)
        if entry is not None:
            return _affine(entry, shards)
        if self.replicated.get(name):
            return _replicated(shards, is_averaged=False)
        if self.averaged.get(name):
            return _replicated(shards, is_averaged=True)
        if self.halves.get(name):
            _check_rows(shards, 2)
            return _concatenated(shards, 0, {rank: [s[0] // 2] * 2 for rank, s in shards.items()}, "two halves")
        parts = self.parts.get(name)
        if parts is not None:
            return self._in_parts(name, shards, *parts)
        is_row = bool(self.rows.get(name))
        dim = 1 if is_row and min(map(len, shards.values())) > 1 else 0
        own = {rank: [s[dim]] for rank, s in shards.items() if s}
        join = _concatenated(shards, dim, own, f"along dimension {dim}")
        return replace(join, is_default=not (is_row or self.vocabulary.get(name)))

    def _in_parts(self, name: str, shards: Mapping[int, Shape], dim: int, sizes: tuple[int, ...]) -> Join:
        widths = self.part_widths.get(name)
        if any(dim >= len(shape) for shape in shards.values()):
            raise Unsupported(f"parts along dimension {dim} of a shard of shape {list(next(iter(shards.values())))}")
        if widths is not None:
            own = {rank: [int(part[rank]) for part in widths] for rank in shards}
        else:
            own = {rank: [size // len(shards) for size in sizes] for rank in shards}
        for rank, shape in shards.items():
            if sum(own[rank]) != shape[dim]:
                raise Unsupported(f"parts of {own[rank]} in a shard of shape {list(shape)}, which views it otherwise")
        return _concatenated(shards, dim, own, f"{counted(len(sizes), 'part')} along dimension {dim}")

    def _without_padding(self, name: str, join: Join) -> Join:
        """Rows behind the vocabulary are padding, and nobody's."""
        size = self.vocabulary_size
        if size is None or not join.shape or join.shape[0] <= size or not self.vocabulary.get(name):
            return join
        shape = (size, *join.shape[1:])
        bounds = Box.whole(shape)
        pairs = {
            rank: tuple(cut for pair in own if (cut := clipped(pair, bounds)) is not None)
            for rank, own in join.pairs.items()
        }
        how = f"{join.how}, {counted(join.shape[0] - size, 'row')} of padding left out"
        return Join(shape, pairs, how, join.is_averaged, join.shape[0], join.is_default)


def _patterns(info: Mapping[str, Any], key: str) -> Patterns[bool]:
    listed = info.get(key) or ()
    return Patterns.of(listed if isinstance(listed, (list, tuple, set, frozenset)) else (), value=True)


def _parts(entries: object, where: str) -> Patterns[tuple[int, tuple[int, ...]]]:
    """``[{"patterns", "shape", "partition_dim"}]``; the shape's entry along the dimension lists the parts' sizes."""
    found: dict[str, tuple[int, tuple[int, ...]]] = {}
    for entry in entries if isinstance(entries, (list, tuple)) else ():
        fields = entry if isinstance(entry, Mapping) else getattr(entry, "state", None)
        if not isinstance(fields, Mapping):
            raise FormatError("parameter_with_sub_params lists something that is no record", where=where)
        shape, dim = fields.get("shape"), fields.get("partition_dim")
        if not isinstance(shape, (list, tuple)) or type(dim) is not int or not 0 <= dim < len(shape):
            raise FormatError(f"parts of shape {shape!r} along dimension {dim!r}", where=where)
        sizes = shape[dim] if isinstance(shape[dim], (list, tuple)) else (shape[dim],)
        for pattern in fields.get("patterns") or ():
            found[str(pattern)] = (dim, tuple(int(size) for size in sizes))
    return Patterns(found)


def _replicated(shards: Mapping[int, Shape], *, is_averaged: bool) -> Join:
    shapes = set(shards.values())
    if len(shapes) != 1:
        raise FormatError(f"said to be replicated, but shards have shapes {sorted(map(list, shapes))}")
    (shape,) = shapes
    first = min(shards)
    pairs = {rank: identity(shape) if rank == first else () for rank in shards}
    return Join(shape, pairs, "averaged" if is_averaged else "replicated", is_averaged)


def _check_rows(shards: Mapping[int, Shape], divisor: int) -> None:
    for shape in shards.values():
        if not shape or shape[0] % divisor:
            raise FormatError(f"a shard of shape {list(shape)} is not {divisor} equal parts along dimension 0")


def _concatenated(shards: Mapping[int, Shape], dim: int, own: Mapping[int, Sequence[int]], how: str) -> Join:
    """Part ``i`` of the whole is part ``i`` of every rank, one behind the other; then part ``i + 1``."""
    shapes = list(shards.values())
    rest = {(*s[:dim], *s[dim + 1 :]) for s in shapes}
    if not all(shapes) or len(rest) != 1:
        raise FormatError(f"shards of shapes {list(map(list, shapes))} cannot be joined along dimension {dim}")
    pairs: dict[int, list[Pair]] = {rank: [] for rank in shards}
    position = 0
    done = dict.fromkeys(shards, 0)
    for part in range(len(next(iter(own.values())))):
        for rank, shape in shards.items():
            size = own[rank][part]
            sizes = (*shape[:dim], size, *shape[dim + 1 :])
            zeros = [0] * len(shape)
            local, whole = zeros.copy(), zeros.copy()
            local[dim], whole[dim] = done[rank], position
            pairs[rank].append(Pair(Box(tuple(local), sizes), Box(tuple(whole), sizes)))
            done[rank] += size
            position += size
    shape = (*shapes[0][:dim], position, *shapes[0][dim + 1 :])
    return Join(shape, {rank: tuple(own_pairs) for rank, own_pairs in pairs.items()}, how)


def _affine(entry: Mapping[str, Any], shards: Mapping[int, Shape]) -> Join:
    shape = ints(entry.get("logical_shape"), "logical_shape")
    ranks = entry.get("ranks")
    if not isinstance(ranks, Mapping):
        raise FormatError("an affine map without ranks")
    by_rank = {int(rank): value for rank, value in ranks.items()}
    pairs: dict[int, tuple[Pair, ...]] = {}
    taken: set[Box] = set()
    for rank, shard in shards.items():
        own = by_rank.get(rank)
        if not isinstance(own, Mapping) or ints(own.get("shard_shape"), "shard_shape") != shard:
            raise FormatError(
                f"the affine map does not describe the shard {list(shard)} of tensor-parallel rank {rank}"
            )
        found = pieces(own, shard, shape)
        pairs[rank] = tuple(pair for pair in found if pair.whole not in taken)
        taken |= {pair.whole for pair in found}
    return Join(shape, pairs, "affine map")


def _affine_cuts(entry: Mapping[str, Any], name: str, world_size: int) -> dict[int, Cut]:
    shape = ints(entry.get("logical_shape"), "logical_shape")
    ranks = entry.get("ranks")
    by_rank = {int(rank): value for rank, value in ranks.items()} if isinstance(ranks, Mapping) else {}
    if sorted(by_rank) != list(range(world_size)):
        raise LayoutError(
            f"the affine map says how {counted(len(by_rank), 'tensor-parallel rank', 'share')} it, not how "
            f"{world_size:,} would",
            where=name,
            hint=f"choose --tp {len(by_rank)}, or a divisor of it where ranks have equal shares, or write "
            "--to deepspeed-universal, which a run cuts for itself",
        )
    found = {}
    for rank, own in by_rank.items():
        shard = ints(own.get("shard_shape"), "shard_shape")
        found[rank] = Cut(shard, tuple(pieces(own, shard, shape)))
    return found


def pieces(own: Mapping[str, Any], shard: Shape, shape: Shape) -> list[Pair]:
    """What one rank of an affine map has of a tensor.

    Raises:
        FormatError: a piece that is none.
        Unsupported: one that is more than a copy of boxes.
    """
    found: list[Pair] = []
    for piece in own.get("pieces") or ():
        if piece.get("scale", 1.0) != 1.0:
            raise Unsupported(f"a piece is scaled by {piece['scale']}: only copies are read here")
        sizes = ints(piece.get("shape"), "shape of a piece")
        found += box_pairs(sizes, _view(piece.get("dest"), shard), _view(piece.get("source"), shape))
    return found


def _view(value: object, of_shape: Shape) -> View:
    if not isinstance(value, (list, tuple)) or len(value) != 2 or type(value[0]) is not int:
        raise FormatError("a piece of the affine map has no offset and strides")
    strides = ints(value[1], "strides of a piece")
    return View(value[0], strides, of_shape)


def ints(value: object, what: str) -> tuple[int, ...]:
    """``value``, numbers of an affine map.

    Raises:
        FormatError: it is no list of numbers.
    """
    if not isinstance(value, (list, tuple)) or any(type(n) is not int or n < 0 for n in value):
        raise FormatError(f"{what} in the affine map: expected a list of numbers, got {value!r:.80}")
    return tuple(value)
