"""A flat set is some parameters that were flattened together, and the vectors in which ranks hold their parts.

Every vector of a set (masters, first moments, ...) has the same layout, so that one computation serves them all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from ckpt_tool.errors import FormatError, Unsupported
from ckpt_tool.formats._pickle.tensors import TensorRef
from ckpt_tool.formats._torch_file.archive import TorchFile
from ckpt_tool.formats.deepspeed.experts import global_names, is_expert
from ckpt_tool.formats.deepspeed.opened import Checkpoint, ModelState, OptimState, is_vector
from ckpt_tool.formats.deepspeed.partition import (
    Slices,
    contiguous_slices,
    flat_starts,
    partition_length,
    per_parameter_slices,
)
from ckpt_tool.geometry.columns import Int64Array
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["MASTER", "FlatSet", "Member", "flat_sets", "fragment_sets", "group_names"]

MASTER = "fp32"
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Member:
    """One rank's part of a flat set."""

    index: int
    """Which partition it is."""
    rank: int
    """Global rank."""
    file: TorchFile
    vectors: Mapping[str, tuple[TensorRef, ...]]
    """By state: the rank's vector, in consecutive segments."""
    scalars: Mapping[str, Any]
    """States that are one value for all parameters of the set."""
    left_out: tuple[str, ...] = ()
    """States of a form that is not known."""


@dataclass(frozen=True)
class FlatSet:
    """Parameters that were flattened together on one model-parallel rank."""

    mp: int
    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    world_size: int
    """Number of partitions."""
    members: tuple[Member, ...]
    """Of the partitions that are here."""
    starts: Int64Array | None = None
    """Contiguous layout: where parameters start in the flat vector; None when each is cut by itself."""
    length: int = 0
    """Contiguous layout: elements of a partition."""

    @property
    def numel(self) -> Int64Array:
        """int64[n]: elements of each parameter."""
        return _numel(self.shapes)

    def slices(self, index: int) -> Slices:
        """What partition ``index`` holds."""
        if self.starts is None:
            return per_parameter_slices(self.numel, self.world_size, index)
        return contiguous_slices(self.starts, self.numel, self.length, index)


def flat_sets(found: Checkpoint) -> Iterator[FlatSet]:
    """The sets of the optimizer's states.

    Raises:
        FormatError: partitions do not have the length that the parameters' shapes give them.
        Unsupported: names are not recorded, or partitions form a layout that is not known.
    """
    for mp in sorted({state.mp for state in found.optims}):
        optims = [state for state in found.optims if state.mp == mp]
        model = found.model_of(mp)
        if model is None:
            continue  # said by whoever lists missing files
        if model.groups is None:
            raise Unsupported(
                "no param_shapes, so that the partitions cannot be told apart",
                where=model.file.path,
                hint="for the weights alone, copy the *_model_states.pt into a folder of their own",
            )
        _check_counts(model, optims)
        if not optims[0].is_per_parameter:  # groups of ranks that shard by themselves count their own
            _check_ranks(found, model, optims)
        counts = {len(state.fp32) for state in optims} | {len(model.groups)}
        if len(counts) != 1 and not optims[0].is_per_parameter:
            raise FormatError(f"files differ in their number of groups: {sorted(counts)}", where=optims[0].file.path)
        yield from (_stage3(found, model, optims) if optims[0].is_per_parameter else _stage12(found, model, optims))


def _check_counts(model: ModelState, optims: Sequence[OptimState]) -> None:
    """Nothing, when all files say that there are as many partitions: a save by fewer ranks leaves older files there."""
    told = [state for state in optims if state.partition_count]
    counts = Counter(state.partition_count for state in told)
    if len(counts) < 2:
        return
    recorded = model.root.get("dp_world_size")
    right = next((count for count in counts if max(count) == recorded), counts.most_common(1)[0][0])
    other = next(state for state in told if state.partition_count != right)
    raise FormatError(
        f"holds one of {counted(max(other.partition_count), 'partition')}, {counted(counts[right], 'file')} beside it "
        f"one of {max(right):,}",
        where=other.file.path,
        hint="files of a save by another number of ranks are mixed in: move them away",
    )


def _check_ranks(found: Checkpoint, model: ModelState, optims: Sequence[OptimState]) -> None:
    """Nothing, when the model state knows the ranks of all partitions: no save has more than it says."""
    recorded = model.root.get("dp_world_size")
    if type(recorded) is not int or found.dp_world_size <= recorded:
        return
    beyond = next((state for state in optims if state.dp >= recorded > 0), None)
    if beyond is not None:
        raise FormatError(
            f"is of data-parallel rank {beyond.dp:,}, {model.file.path} of a save by {counted(recorded, 'such rank')}",
            where=beyond.file.path,
            hint="it was left by a save of more ranks, or renamed: move it away",
        )


def group_names(found: Checkpoint, mp: int, group: int) -> list[str]:
    """Names in one group of a rank, experts of all ranks by their global number."""
    model = found.model_of(mp)
    if model is None or model.groups is None or group >= len(model.groups):
        return []
    names = tuple(model.groups[group])
    optims = [state for state in found.optims if state.mp == mp]
    if not any(map(is_expert, names)) or not optims or len(optims[0].partition_count) <= group:
        return list(names)
    ep_size = max(found.dp_world_size // max(optims[0].partition_count[group], 1), 1)
    return [name for ep in range(ep_size) for name in global_names(names, ep)]


def _numel(shapes: Sequence[Shape]) -> Int64Array:
    return np.array([prod(shape) for shape in shapes], dtype=np.int64)


# ------------------------------------------------------------------------------------------------- stages 1 and 2


def _stage12(found: Checkpoint, model: ModelState, optims: Sequence[OptimState]) -> Iterator[FlatSet]:
    for group, shapes in enumerate(model.groups or ()):
        names = tuple(shapes)
        if not names:
            continue  # a pipeline stage may have no parameter of a group
        counts = {state.partition_count[group] for state in optims if len(state.partition_count) > group}
        world_size = counts.pop() if len(counts) == 1 else found.dp_world_size
        if counts or world_size < 1 or found.dp_world_size % world_size:
            raise FormatError(
                f"group {group} has {counted(world_size, 'partition')} on {counted(found.dp_world_size, 'rank')}",
                where=optims[0].file.path,
            )
        if world_size == found.dp_world_size:
            yield _contiguous(found, model, optims, group, names, world_size, [state.dp for state in optims])
            continue
        # Experts: ranks of one expert-parallel rank share partitions (``deepspeed/utils/groups.py``).
        ep_size = found.dp_world_size // world_size
        data_first = bool(found.ds_config.get("use_data_before_expert_parallelism"))
        for ep in range(ep_size):
            own = [s for s in optims if (s.dp // world_size if data_first else s.dp % ep_size) == ep]
            indices = [state.dp % world_size if data_first else state.dp // ep_size for state in own]
            if own:
                yield _contiguous(found, model, own, group, global_names(names, ep), world_size, indices)


def _contiguous(
    found: Checkpoint,
    model: ModelState,
    optims: Sequence[OptimState],
    group: int,
    names: tuple[str, ...],
    world_size: int,
    indices: Sequence[int],
) -> FlatSet:
    shapes = tuple((model.groups or ())[group].values())
    numel = _numel(shapes)
    first = optims[0]
    listed = first.paddings[group] if first.paddings and group < len(first.paddings) else ()
    padding = np.array(listed if len(listed) == len(numel) else [0] * len(numel), dtype=np.int64)
    starts = flat_starts(numel, padding)
    total = int(starts[-1] + numel[-1])
    held = [state.fp32[group].numel for state in optims]
    length = partition_length(total, world_size, held, indices)
    if length is None:
        over = names[int(np.searchsorted(starts + numel, sum(held), side="right"))] if total > sum(held) else None
        detail = f"; {over!r} runs over" if over is not None and len(held) == world_size else ""
        raise FormatError(
            f"group {group}: partitions hold {', '.join(f'{n:,}' for n in held[:8])} = "
            f"{counted(sum(held), 'element')}, "
            f"expected {total:,} of {counted(len(names), 'parameter')} over {counted(world_size, 'rank')}, and "
            f"padding{detail}",
            where=first.file.path,
        )
    members = tuple(
        _member(found, state, index, (group,), {length, state.fp32[group].numel})
        for state, index in zip(optims, indices, strict=True)
    )
    return FlatSet(model.mp, names, shapes, world_size, members, starts, length)


# -------------------------------------------------------------------------------------------------------- stage 3


def _stage3(found: Checkpoint, model: ModelState, optims: Sequence[OptimState]) -> Iterator[FlatSet]:
    world_size = optims[0].partition_count[0] if optims[0].partition_count else found.dp_world_size
    zero = found.ds_config.get("zero_optimization")
    if world_size != found.dp_world_size:
        shard_size = zero.get("mics_shard_size") if isinstance(zero, Mapping) else None
        if shard_size != world_size:
            raise Unsupported(
                f"{counted(world_size, 'partition')} on {counted(found.dp_world_size, 'rank')}, and nothing says "
                "which ranks share them",
                where=optims[0].file.path,
            )
        optims = [state for state in optims if state.dp < world_size]  # MiCS: the other groups hold the same
    groups = model.groups or ()
    needed = [int((-(-_numel(tuple(shapes.values())) // world_size)).sum()) for shapes in groups]
    if all([v.numel for v in state.fp32] == needed for state in optims):
        for number, shapes in enumerate(groups):
            members = tuple(_member(found, s, s.dp, (number,), {needed[number]}) for s in optims)
            yield FlatSet(model.mp, tuple(shapes), tuple(shapes.values()), world_size, members)
        return
    names = tuple(name for shapes in groups for name in shapes)
    all_shapes = tuple(shape for shapes in groups for shape in shapes.values())
    for state in optims:
        held = sum(vector.numel for vector in state.fp32)
        if held != sum(needed):
            ends = np.cumsum(-(-_numel(all_shapes) // world_size))
            over = np.flatnonzero(ends > held)
            detail = f"; {names[int(over[0])]!r} runs over" if len(over) else ""
            raise FormatError(
                f"partitions hold {counted(held, 'element')}, expected {sum(needed):,} of "
                f"{counted(len(names), 'parameter')}{detail}",
                where=state.file.path,
            )
    # Sub-groups whose ends are not those of the recorded ones: a rank's vectors follow one another all the same.
    members = tuple(_member(found, s, s.dp, range(len(s.fp32)), None) for s in optims)
    yield FlatSet(model.mp, names, all_shapes, world_size, members)


def fragment_sets(found: Checkpoint) -> Iterator[FlatSet]:
    """Stage 3: frozen parameters, which are cut like the others and stored in the model states, by dtype."""
    for mp in sorted({state.mp for state in found.models}):
        models = [state for state in found.models if state.mp == mp and state.dp is not None]
        by_dtype: dict[str, list[str]] = {}
        for name, shape in models[0].frozen.items() if models else ():
            fragment = models[0].fragments.get(name)
            if isinstance(fragment, TensorRef) and is_vector(fragment) and 0 not in shape:
                by_dtype.setdefault(fragment.dtype.name, []).append(name)
        for names in by_dtype.values():
            shapes = tuple(models[0].frozen[name] for name in names)
            members = tuple(
                Member(
                    index=state.dp or 0,
                    rank=found.global_rank(mp, state.dp or 0),
                    file=state.file,
                    vectors={MASTER: tuple(state.fragments[name] for name in names)},
                    scalars={},
                )
                for state in models
                if all(is_vector(state.fragments.get(name)) for name in names)
            )
            yield FlatSet(mp, tuple(names), shapes, found.dp_world_size, members)


def _member(
    found: Checkpoint, state: OptimState, index: int, groups: Sequence[int], lengths: set[int] | None
) -> Member:
    """A member whose vectors are those of ``groups``; states of other lengths than the master's are scalars."""
    vectors: dict[str, tuple[TensorRef, ...]] = {MASTER: tuple(state.fp32[group] for group in groups)}
    scalars: dict[str, Any] = {}
    left_out: list[str] = []
    by_group = [state.states[group] for group in groups]
    for name in dict.fromkeys(name for states in by_group for name in states):
        values = [states.get(name) for states in by_group]
        expected = lengths or {sum(vector.numel for vector in state.fp32)}
        if all(map(is_vector, values)) and sum(value.numel for value in values) in expected:  # type: ignore[union-attr]
            vectors[str(name)] = tuple(value for value in values if isinstance(value, TensorRef))
        elif isinstance(values[0], (int, float)) or (isinstance(values[0], TensorRef) and values[0].numel == 1):
            scalars[str(name)] = values[0]
        elif values[0] is not None:
            left_out.append(str(name))
    rank = found.global_rank(state.mp, state.dp)
    return Member(index, rank, state.file, vectors, scalars, tuple(left_out))
