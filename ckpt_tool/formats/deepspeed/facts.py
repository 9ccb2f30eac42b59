"""What a manifest says of a DeepSpeed checkpoint beyond its tables: mesh, info, notes; and how its shards join."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpt_tool.formats.deepspeed.build import Built
from ckpt_tool.formats.deepspeed.experts import expert_of
from ckpt_tool.formats.deepspeed.locate import Located
from ckpt_tool.formats.deepspeed.modules import Weights
from ckpt_tool.formats.deepspeed.opened import INFO_FILE, Checkpoint
from ckpt_tool.formats.deepspeed.placement import Placement
from ckpt_tool.formats.deepspeed.sharding import Rules
from ckpt_tool.manifest.missing import missing_facts
from ckpt_tool.manifest.model import MeshInfo
from ckpt_tool.sizes import counted

__all__ = ["add_notes", "facts_of", "mesh_of", "placement_of"]

_SHOWN = 8


def placement_of(found: Checkpoint, weights: Weights) -> Placement:
    """How the ranks' shards are parts of tensors.

    Raises:
        FormatError: the record of it is none.
        Unsupported: a pattern in it could take unbounded time.
    """
    info = found.universal_info
    return Placement(
        tp_world_size=found.tp_world_size,
        rules=None if info is None else Rules.parse(info, found.universal_info_in),
        shapes=weights.shapes,
        buffers=frozenset(weights.buffers),
        owners=weights.aliases,
    )


def mesh_of(found: Checkpoint) -> MeshInfo:
    """Pipeline stages, data-parallel and tensor-parallel ranks."""
    pp = found.mp_world_size // found.tp_world_size
    evidence = "file names, partition_count and checkpoint_parallel_dimensions"
    return MeshInfo(("pp", "dp", "tp"), (pp, found.dp_world_size, found.tp_world_size), evidence)


def facts_of(
    found: Checkpoint,
    located: Located,
    built: Built,
    weights: Weights,
    placement: Placement,
    missing: Sequence[str],
    *,
    stage: int | None,
) -> dict[str, Any]:
    """``Manifest.info``: only what there is to say."""
    root: Mapping[str, Any] = found.first.root
    facts: dict[str, Any] = {
        "tag": located.tag,
        "step": _plain(root.get("global_steps")),
        "zero_stage": stage,
        "deepspeed_version": _plain(root.get("ds_version")),
        "world_size": found.dp_world_size * found.mp_world_size,
        "model_dtype": None if weights.dtype is None else weights.dtype.name,
        **missing_facts(missing, sections={} if weights.is_stage3 else dict.fromkeys(_optims(found), "optimizer")),
        "absent_weights": built.absent,
        "states_left_out": sorted(set(built.left_out)),
        "replicated": sorted(placement.copies),
        "averaged": sorted(placement.averaged),
        "unjoined": sorted(placement.unjoined),
        "shared": dict(sorted(weights.aliases.items())),
        "buffers": sorted(weights.buffers),
        "pipeline": _pipeline(found, weights),
        "expert_layers": _expert_layers(found),
        "padded_rows": dict(sorted(placement.padded.items())),
        "weights_are_masters": weights.is_stage3 and bool(found.optims),
    }
    return {key: value for key, value in facts.items() if type(value) is int or value}


def _optims(found: Checkpoint) -> list[str]:
    """Partitions that are missing; below stage 3 they hold what optimizers keep, and weights are in model states."""
    return found.files.missing_optims(found.dp_world_size, found.mp_world_size)


def values_of_ranks(found: Checkpoint) -> Iterator[tuple[str, int, Any]]:
    """``(name, global rank, value)`` of what several files say alike where they are of one save.

    Of optimizers only ranks of one model-parallel rank are comparable: stages have parameter groups of their own.
    """
    for model in found.models:
        yield "global_steps", found.global_rank(model.mp, model.dp or 0), model.root.get("global_steps")
    for state in found.optims:
        rank = found.global_rank(state.mp, state.dp)
        prefix = "optimizer." if found.mp_world_size == 1 else f"optimizer.mp_rank_{state.mp:02d}."
        for number, values in enumerate(state.states):
            yield f"{prefix}state.{number}.step", rank, values.get("step")
        for number, group in enumerate(state.param_groups):
            yield from ((f"{prefix}param_groups.{number}.{key}", rank, group[key]) for key in group if key != "params")


def _pipeline(found: Checkpoint, weights: Weights) -> dict[str, Any]:
    """Which numbered layers each stage of a pipeline has, and the first layer and the stages of tied parameters.

    A layer whose parameters are all frozen or tied is on the stage of the one before it, as far as is told.
    """
    if not found.layers:
        return {}
    stages: dict[int, int] = {}
    for mp, names in weights.trained.items():
        for name in names:
            number = name.partition(".")[0]
            if number.isdecimal():
                stages.setdefault(int(number), mp // found.tp_world_size)
    tied = {}
    for own, name in weights.renamed.items():
        held = sorted({mp // found.tp_world_size for mp, names in weights.trained.items() if name in names})
        layer = int(own.partition(".")[0])
        tied[name] = {"layer": layer, "stages": held}
        stages.setdefault(layer, held[0])
    by_stage: list[list[int]] = [[] for _ in range(found.mp_world_size // found.tp_world_size)]
    current = 0
    for layer in sorted({file.layer for file, _ in found.layers} | set(stages)):
        current = stages.get(layer, current)
        by_stage[current].append(layer)
    return {"stages": by_stage, "tied": tied, "has_model_axis": any(file.tp is not None for file, _ in found.layers)}


def _expert_layers(found: Checkpoint) -> dict[str, int]:
    """The numbers that files of experts have, by what the names of their layer's experts begin with."""
    layers: dict[str, int] = {}
    for file, opened in found.experts:
        for name in opened.root if isinstance(opened.root, Mapping) else ():
            expert = expert_of(str(name))
            if expert is not None:
                layers.setdefault(expert[0], file.layer)
    return layers


def add_notes(
    found: Checkpoint,
    built: Built,
    weights: Weights,
    placement: Placement,
    missing: Sequence[str],
    *,
    has_states: bool,
) -> None:
    """What a person should know, into ``built.assembly.notes``."""
    notes = built.assembly.notes
    if missing:
        n_expected = found.dp_world_size * found.mp_world_size
        shown = ", ".join(missing[:_SHOWN]) + (" ..." if len(missing) > _SHOWN else "")
        notes.append(f"have {len(found.optims):,} of {counted(n_expected, 'partition')}; missing files: {shown}")
    if not found.optims and not has_states:
        notes.append("no optimizer partitions are here: weights only")
    if built.absent:
        shown = ", ".join(built.absent[:_SHOWN])
        notes.append(f"weight data absent (frozen?) of {counted(len(built.absent), 'parameter')}: {shown}")
    if built.left_out:
        notes.append(f"states of an unknown form are left out: {', '.join(sorted(set(built.left_out)))}")
    if weights.is_stage3 and found.optims:
        dtype = "low-precision" if weights.dtype is None else weights.dtype.name
        notes.append(f"stage 3 stores no {dtype} weights: module.* are the fp32 masters under a second name")
    if placement.averaged:
        notes.append(
            f"{counted(len(placement.averaged), 'tensor', 'are')} averaged over ranks by DeepSpeed; the first copy is "
            "taken"
        )
    if placement.unjoined:
        notes.append(
            f"nothing says how the shards of {counted(len(placement.unjoined), 'tensor')} on {found.tp_world_size:,} "
            f"tensor-parallel ranks join, so each is called name@tpN; put rules, as universal_checkpoint_info has "
            f"them, into {INFO_FILE} beside the files"
        )
    if placement.by_default and placement.rules is not None and placement.rules.where.endswith(INFO_FILE):
        names = sorted(placement.by_default)
        more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
        notes.append(
            f"no rule of {INFO_FILE} names {', '.join(names[:_SHOWN])}{more}: joined along dimension 0, as DeepSpeed "
            "does with the rest"
        )
    for own, tied in weights.renamed.items():
        notes.append(f"{own!r} is called {tied!r}: the optimizer knows no other parameter of its name")
    if found.files.expert_optims:
        notes.append(f"left out: {counted(len(found.files.expert_optims), 'file')} expp_rank_*_optim_states.pt")


def _plain(value: object) -> str | int | None:
    """What can stand in JSON."""
    return value if isinstance(value, str) or (type(value) is int and value.bit_length() < 64) else None
