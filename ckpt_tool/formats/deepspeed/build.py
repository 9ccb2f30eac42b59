"""The manifest's tables of an opened checkpoint: weights, masters, states and values under one rule of names.

- a weight or buffer ``w`` is ``module.w``, path ``("module", "w")``;
- its master is ``optimizer.state.w.fp32``, its states ``optimizer.state.w.exp_avg`` and so on, as they are called;
- groups are ``optimizer.param_groups.0.lr``, with ``params`` as names in the order in which the program gave them;
- what the program added (``client_state``) and counters keep their keys at the top.

At stage 3 no low-precision weights are stored: ``module.w`` is then the master under a second name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ckpt_tool.dtypes import DTYPES, DType
from ckpt_tool.errors import FormatError
from ckpt_tool.formats._pickle.tensors import TensorRef
from ckpt_tool.formats._torch_file.archive import TorchFile
from ckpt_tool.formats._torch_file.assemble import Assembly, Part, PlacedBy, assemble, by_itself
from ckpt_tool.formats._torch_file.entries import Entries, Entry, entries_of
from ckpt_tool.formats._torch_file.placed import Piece, Placed, whole
from ckpt_tool.formats.deepspeed.modules import Weights
from ckpt_tool.formats.deepspeed.opened import INFO_KEY, Checkpoint
from ckpt_tool.formats.deepspeed.partition import round_robin_order
from ckpt_tool.formats.deepspeed.placement import Placement
from ckpt_tool.formats.deepspeed.states import StateChunks, scalar_names, scalar_of
from ckpt_tool.formats.deepspeed.vectors import MASTER, FlatSet, flat_sets, fragment_sets, group_names
from ckpt_tool.geometry.box import Box
from ckpt_tool.manifest.model import Blob, KeyPath
from ckpt_tool.manifest.sections import section_of
from ckpt_tool.records import dataclass, field

__all__ = ["Built", "build", "optimizer_values", "state_name", "value_entries", "weight_name"]

_STRUCTURE = frozenset(
    {
        "module", "buffer_names", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params",
        "universal_checkpoint_info", "optimizer", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions",
        "ds_version",
    }
)  # fmt: skip
_OPTIM_STRUCTURE = frozenset(
    {
        "base_optimizer_state", "single_partition_of_fp32_groups", "fp32_flat_groups", "optimizer_state_dict",
        "zero_stage", "group_paddings", "param_alignment_paddings", "partition_count", "param_slice_mappings",
        "ds_version", "universal_checkpoint_info", "ds_zero_partition_groups", "param_groups",
    }
)  # fmt: skip


@dataclass
class Built:
    """What `build` made."""

    assembly: Assembly
    chunks: StateChunks
    entries: list[Entries]
    absent: list[str] = field(default_factory=list)
    """Parameters whose bytes are in no file."""
    left_out: list[str] = field(default_factory=list)
    """States of a form that is not known."""


def state_name(name: str, state: str) -> tuple[str, KeyPath, str]:
    """``(fqn, path, section)`` of a parameter's state."""
    return f"optimizer.state.{name}.{state}", ("optimizer", "state", name, state), "optimizer"


def weight_name(name: str) -> tuple[str, KeyPath, str]:
    """``(fqn, path, section)`` of a weight or buffer."""
    return f"module.{name}", ("module", name), "model"


def build(
    found: Checkpoint,
    placement: Placement,
    weights: Weights,
    *,
    whole_parts: Sequence[Part] = (),
    lent: Collection[str] = (),
) -> Built:
    """All tensors and values.

    Args:
        found: the opened files.
        placement: where shards belong.
        weights: what the files hold of the module.
        whole_parts: entries that are whole tensors, under their final names.
        lent: names of weights that are among these, for want of others.

    Raises:
        FormatError: files contradict each other or themselves.
        Unsupported: a layout that cannot be read.
        NotFound: shards are missing without which shapes are not known.
    """
    sets = list(flat_sets(found))
    values, entries = _value_parts(found, placement)
    parts, located = _weight_parts(found, weights)
    entries += [Entries(notes=held.notes) for held in weights.files]
    repeated = Counter(entry.fqn for part in values for entry in part.entries if entry.is_tensor)
    apart = {fqn for fqn, count in repeated.items() if count > 1}
    assembly = assemble([*parts, *whole_parts, *values], _section, _placed_by(placement, located, apart))
    built = Built(assembly, StateChunks(assembly.rows, placement), entries)
    if found.tp_world_size > 1 and isinstance(found.universal_info, Mapping):
        record = Blob(INFO_KEY, "value", None, found.universal_info, (INFO_KEY,), is_loaded=True)
        assembly.blobs.append(record)  # whole: its keys are patterns, and a target's ranks need it
    fragments = list(fragment_sets(found))
    placed = {name for flat in fragments for name in flat.names} | set(lent)
    _declare(built, placement, weights, _master_dtypes(weights, sets), placed)
    for flat in fragments:
        built.chunks.add(flat, lambda target, state: [weight_name(target)])  # noqa: ARG005 - one signature
    for flat in sets:
        built.chunks.add(flat, _named(weights))
        _add_scalars(built, flat, placement)
        built.left_out += sorted({name for member in flat.members for name in member.left_out})
    return built


def _section(path: KeyPath, fqn: str) -> str:
    """By the first key, also where a rank's number was put behind the last one."""
    if path[:1] == ("module",):
        return "model"
    name = fqn.partition("@rank")[0]
    return section_of((*path[:-1], str(path[-1]).partition("@rank")[0]), name)


# -------------------------------------------------------------------------------------------------------- weights


def _weight_parts(found: Checkpoint, weights: Weights) -> tuple[list[Part], Mapping[tuple[str, str], tuple[int, str]]]:
    """Parts of stored weights; and by file and fqn of each entry, its rank and name."""
    parts: list[Part] = []
    located: dict[tuple[str, str], tuple[int, str]] = {}
    for held in weights.files:
        own: list[Entry] = []
        for name, entry in held.items:
            fqn, path, _ = weight_name(name)
            own.append(Entry(fqn, entry.path if entry.fqn == fqn else path, entry.value))
            located[held.file.path, fqn] = (held.mp, name)
        rank = found.global_rank(held.mp, 0)
        parts.append(Part(held.file.path, rank, own, held.file.storages, held.file.big_endian))
    return parts, located


def _placed_by(placement: Placement, located: Mapping[tuple[str, str], tuple[int, str]], apart: set[str]) -> PlacedBy:
    """Weights go where the placement puts them; of other tensors that several files have, each is its rank's own."""

    def placed(part: Part, entry: Entry) -> list[tuple[str, KeyPath, Placed]] | None:
        where = located.get((part.where, entry.fqn))
        tensor = entry.value
        if where is None or not isinstance(tensor, TensorRef):
            if entry.fqn in apart and isinstance(tensor, TensorRef):
                name = f"{entry.fqn}@rank{part.rank}"
                return [(name, (*entry.path[:-1], f"{entry.path[-1]}@rank{part.rank}"), whole(tensor))]
            return by_itself(part, entry)
        result = []
        for target in placement.targets(*where):
            pieces = tuple(Piece(pair.whole, pair.local, tensor) for pair in target.pairs if pair.whole.volume)
            fqn, path, _ = weight_name(target.name)
            one = Placed(tensor.dtype, target.shape, pieces, "layout")
            result.append((fqn, entry.path if fqn == entry.fqn else path, one))
        return result

    return placed


def _named(weights: Weights) -> Any:
    second_names: dict[str, list[str]] = {}
    for alias, owner in weights.aliases.items():
        second_names.setdefault(owner, []).append(alias)

    def named(target: str, state: str) -> list[tuple[str, KeyPath, str]]:
        names = [state_name(target, state)]
        if weights.is_stage3 and state == MASTER:
            names += [weight_name(name) for name in (target, *second_names.get(target, ()))]
        return names

    return named


def _master_dtypes(weights: Weights, sets: Sequence[FlatSet]) -> dict[str, DType]:
    """Of masters that stand for weights: all of them at stage 3, none before."""
    if not weights.is_stage3:
        return {}
    return {name: flat.members[0].vectors[MASTER][0].dtype for flat in sets if flat.members for name in flat.names}


def _declare(
    built: Built, placement: Placement, weights: Weights, masters: Mapping[str, DType], placed: set[str]
) -> None:
    """Tensors of weights that are not stored as such, in module order; those without masters are absent."""
    for mp, known in weights.shapes.items():
        stored = weights.stored(mp)
        placeholders = weights.placeholders.get(mp, {})
        for name in dict.fromkeys([*placeholders, *known]):
            owner = weights.aliases.get(name, name)
            if name in stored or name in placed:
                continue
            if owner not in known:
                built.absent.append(name)  # not even its shape is told
                continue
            dtype = masters.get(owner) or placeholders.get(name, weights.dtype or DTYPES["float32"])
            targets = placement.targets(mp, owner)
            for target in targets:
                fqn, path, section = weight_name(name if target.name == owner else target.name)
                built.assembly.rows.add_tensor(fqn, dtype, target.shape, section, path)
            if targets and owner not in masters and 0 not in known[owner]:
                built.absent.append(name)


# --------------------------------------------------------------------------------------------------------- values


def value_entries(root: Mapping[str, Any]) -> Entries:
    """What a model state holds besides the model: counters, schedulers, configuration, what the program added."""
    return entries_of({key: value for key, value in root.items() if key not in _STRUCTURE and value is not None})


def _value_parts(found: Checkpoint, placement: Placement) -> tuple[list[Part], list[Entries]]:
    """Parts of everything that is neither a weight nor in a flat set."""
    parts: list[Part] = []
    all_entries: list[Entries] = []

    def add(file: TorchFile, entries: Entries, rank: int) -> None:
        parts.append(Part(file.path, rank, entries.items, file.storages, file.big_endian))
        all_entries.append(entries)

    for model in found.models:
        rank = found.global_rank(model.mp, model.dp or 0)
        add(model.file, value_entries(model.root), rank)
        if isinstance(model.root.get("optimizer"), Mapping):  # stage 0: a state dict of torch
            prefix = ("optimizer",) if found.mp_world_size == 1 else ("optimizer", f"mp_rank_{model.mp:02d}")
            add(model.file, entries_of(model.root["optimizer"], prefix=prefix), rank)
    for number, state in enumerate(found.optims):
        values = optimizer_values(found, placement, state.fields, None if number else state.param_groups)
        add(state.file, entries_of(values, prefix=("optimizer",)), found.global_rank(state.mp, state.dp))
    return parts, all_entries


def optimizer_values(
    found: Checkpoint,
    placement: Placement,
    fields: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]] | None,
) -> dict[str, Any]:
    """What an optimizer's file holds besides states; ``groups`` with names, None to leave them out."""
    rest = {key: value for key, value in fields.items() if key not in _OPTIM_STRUCTURE and value is not None}
    return rest if groups is None else {**rest, "param_groups": _parameter_groups(found, placement, groups)}


def _parameter_groups(
    found: Checkpoint, placement: Placement, groups: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """``groups`` with the names of their parameters in place of the numbers of flat vectors."""
    n_flat = max((len(model.groups or ()) for model in found.models), default=0)
    found_groups: list[Mapping[str, Any]] = list(groups) or [{"params": [number]} for number in range(n_flat)]
    result: list[dict[str, Any]] = []
    for group in found_groups:
        listed = group.get("params")
        names: dict[str, None] = {}
        for mp in sorted({model.mp for model in found.models}):
            for number in listed if isinstance(listed, (list, tuple)) else ():
                for name in _in_given_order(found, mp, number) if type(number) is int else ():
                    names.update(dict.fromkeys(target.name for target in placement.targets(mp, name)))
        result.append({**group, "params": list(names)})
    return result


def _in_given_order(found: Checkpoint, mp: int, number: int) -> list[str]:
    """Names in a group in the order in which the program gave them to its optimizer, also where they were shuffled."""
    names = group_names(found, mp, number)
    zero = found.ds_config.get("zero_optimization")
    optims = [state for state in found.optims if state.mp == mp]
    is_shuffled = isinstance(zero, Mapping) and zero.get("round_robin_gradients") and optims
    if not is_shuffled or optims[0].is_per_parameter or len(optims[0].partition_count) <= number:
        return names
    world_size = optims[0].partition_count[number]
    n_local = len(names) * world_size // found.dp_world_size  # of experts each expert-parallel rank shuffles its own
    given = list(names)
    for place, index in enumerate(round_robin_order(n_local, world_size)):
        for first in range(0, len(names), n_local):
            given[first + index] = names[first + place]
    return given


def _add_scalars(built: Built, flat: FlatSet, placement: Placement) -> None:
    """States that all parameters of a set share, such as ``step``: each parameter's, at the first rank's bytes.

    What the other ranks hold is the first parameter's too, so that files of two saves are told by it.
    """
    for state in scalar_names(flat.members):
        member, value = scalar_of(flat.members, state)
        copies = [each for each in flat.members if isinstance(each.scalars.get(state), TensorRef)]
        for name in flat.names:
            for target in placement.targets(flat.mp, name):
                fqn, path, section = state_name(target.name, state)
                if not isinstance(value, TensorRef):
                    built.assembly.blobs.append(Blob(fqn, "value", None, value, path, None, is_loaded=True))
                    continue
                row = built.assembly.rows.add_tensor(fqn, value.dtype, value.shape, section, path)
                box = Box.whole(value.shape)
                for each in copies or [member]:
                    own = each.scalars[state]
                    place = each.file.storages.get(own.storage.key)
                    if place is None:
                        raise FormatError(f"needs storage {own.storage.key!r}, which is not here", where=each.file.path)
                    built.assembly.rows.add_piece(
                        row, Piece(box, box, own), place, rank=each.rank, big_endian=each.file.big_endian
                    )
                copies = []
