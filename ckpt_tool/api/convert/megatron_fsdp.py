"""Megatron-FSDP's checkpoints (``fsdp_dtensor``): plain DCP, names of wrapped modules, hyperparameters by parameter.

Weights are the optimizer's masters there, and state stands under ``optimizer.state.module.module.module.<parameter>``.
Source: megatron-core 0.19, ``transformer/fsdp_dtensor_checkpoint.py``; ``optimizer/distrib_optimizer.py``,
``sharded_param_state_fsdp_dtensor``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ckpt_tool.api.checkpoint import Checkpoint
from ckpt_tool.api.convert.conversion import Dropped
from ckpt_tool.api.convert.taken import Taken
from ckpt_tool.api.convert.weight_states import (
    MASTER,
    MOMENTS,
    WeightStates,
    check_is_decoded,
    state_views,
    states_of,
    step_of,
    with_all_masters,
)
from ckpt_tool.dtypes import dtype
from ckpt_tool.errors import LayoutError, UsageError
from ckpt_tool.formats._pickle.nodes import Stub
from ckpt_tool.formats._torch_file.nested import nest
from ckpt_tool.formats._torch_file.written import blob_entry
from ckpt_tool.formats.megatron.facts import facts_of
from ckpt_tool.formats.megatron.fresh import fresh_objects
from ckpt_tool.formats.megatron.live_names import uses_local_names
from ckpt_tool.formats.megatron.parameter_groups import in_group
from ckpt_tool.formats.megatron.target_optimizer import groups_of, parts_of
from ckpt_tool.layout.naming import rename
from ckpt_tool.layout.naming_back import rename_back
from ckpt_tool.layout.naming_match import match_names
from ckpt_tool.layout.naming_rules import Naming, builtin_namings
from ckpt_tool.layout.naming_sizes import Fact
from ckpt_tool.layout.views import View, apply_views
from ckpt_tool.manifest.model import Blob, Manifest
from ckpt_tool.manifest.tables import SECTIONS
from ckpt_tool.sizes import counted

__all__ = ["as_fsdp_dtensor", "from_fsdp_dtensor", "is_fsdp_dtensor"]

_WRAPPERS = re.compile(r"(?:module\.)+")
_GROUPS = ("optimizer", "param_to_group_meta")
_STATE = ("optimizer", "state")
_COMMON = ("args", "checkpoint_version", "iteration", "num_floating_point_operations_so_far", "opt_param_scheduler")
_MODEL, _OPTIMIZER = "module.", "module.module.module."


def is_fsdp_dtensor(manifest: Manifest, blobs: Sequence[Blob]) -> bool:
    """Whether a checkpoint in DCP is one of Megatron-FSDP: wrapped modules beside a run's arguments."""
    is_wrapped = any(
        path[:1] == ("model",) and str(path[-1]).startswith(_MODEL) for path in manifest.tensors.paths or ()
    )
    return is_wrapped and any(blob.fqn == "args" for blob in blobs)


def from_fsdp_dtensor(checkpoint: Checkpoint, manifest: Manifest, blobs: Sequence[Blob]) -> Taken:
    """The same state as ``torch_dist`` names it: layers and experts stacked, gate and up joined, groups listed once.

    Args:
        checkpoint: the source.
        manifest: the tensors that are taken, resolved.
        blobs: its objects, loaded.

    Raises:
        LayoutError: a tensor has no place, or a part, layer or expert is missing.
    """
    paths = manifest.tensors.paths or ()
    weights = {
        _WRAPPERS.sub("", str(path[1]), count=1): manifest.tensors.fqns[row]
        for row, path in enumerate(paths)
        if path[0] == "model" and len(path) == 2 and "_extra_state" not in str(path[1])
    }
    args = next(blob.value for blob in blobs if blob.fqn == "args")
    facts = facts_of(args)
    naming = _naming(is_gated=any(name.endswith("_w") for name in weights))
    variant = "local" if uses_local_names(list(weights), facts.transformer_impl) else ""
    shapes = {name: manifest.tensor(fqn).shape for name, fqn in weights.items()}
    renaming = rename_back(naming, shapes, _counts(facts.described(), "args"), n_rows={}, variant=variant)
    views = [_with_sources(view, weights) for view in renaming.views]
    states = _states(manifest, blobs, weights)
    notes = [
        f"{counted(len(weights), 'tensor')} of Megatron-FSDP become {len(views):,} ({naming.name}, read backwards)"
    ]
    objects = [blob for blob in blobs if blob.path[:1] and blob.path[0] in _COMMON]
    dtypes = {}
    if states.tensors:
        manifest, states, n_weights = with_all_masters(manifest, states)
        held, _ = state_views(
            views, states.tensors, (MASTER, *MOMENTS), lambda slot, view: (*_STATE, slot, view.fqn)
        )  # fmt: skip
        groups = list(_listed_groups(blobs))
        if not any("step" in group for group in groups):
            step = step_of(checkpoint, manifest, blobs, states)
            groups = [{**group, "step": step} for group in groups]
        entry = {"optimizer": {"param_groups": groups}}
        objects.append(Blob("optimizer", "value", None, entry, ("optimizer",), is_loaded=True))
        notes.append(f"masters are the weights as Megatron-FSDP has them, {n_weights:,}" if n_weights else "")
        width = _width(args)
        if width is not None:
            dtypes = {f"model.{view.fqn}": width for view in views if _is_wide(manifest, view)}
    else:
        held = []
    weights_as = [replace(view, fqn=f"model.{view.fqn}", path=("model", view.fqn)) for view in views]
    result = apply_views(manifest, [*weights_as, *held])
    keys = {view.fqn: view.shape for view in views}
    objects += [blob for blob in fresh_objects({}, keys) if blob.path[0] == "model"]
    info = {
        "args": facts.described(),
        "step": next((blob.value for blob in blobs if blob.fqn == "iteration"), None),
        "optimizer_form": "fully_reshardable" if held else None,
    }
    used = {part.source_fqn for view in (*views, *held) for part in view.parts} | set(states.steps.values())
    left = [fqn for fqn in (*manifest.tensors.fqns, *(blob.fqn for blob in blobs)) if fqn not in used]
    kept = {blob.fqn for blob in objects}
    dropped = [
        Dropped(fqn, why)
        for fqn in dict.fromkeys(left)
        if fqn not in kept and not fqn.startswith("@") and (why := _why_not(fqn)) is not None
    ]
    return Taken(
        result.replace(info={k: v for k, v in info.items() if v is not None}, blobs=()), tuple(objects),
        tuple(dropped), tuple(filter(None, notes)), dtypes,
    )  # fmt: skip


def as_fsdp_dtensor(checkpoint: Checkpoint, manifest: Manifest, blobs: Sequence[Blob], *, is_whole: bool) -> Taken:
    """Megatron's state as Megatron-FSDP names it, masters in the weights' place.

    Args:
        checkpoint: the source, of Megatron.
        manifest: the tensors that are taken, resolved.
        blobs: its objects, loaded.
        is_whole: no part of the model was left out on purpose.

    Raises:
        UsageError: the source is none of Megatron's.
        LayoutError: the optimizer's state is not in the shape of the weights, or its groups do not fit.
    """
    args = next((blob.value for blob in blobs if blob.fqn == "args"), None)
    if not isinstance(args, Stub) or not isinstance(args.state, dict):
        raise UsageError("Megatron-FSDP's names are given to checkpoints of Megatron", where=checkpoint.url)
    check_is_decoded(manifest, checkpoint.url)
    model = SECTIONS.index("model")
    names = [fqn for row, fqn in enumerate(manifest.tensors.fqns) if manifest.tensors.section[row] == model]
    shapes = {fqn: manifest.tensor(fqn).shape for fqn in names}
    naming = _naming(is_gated=_is_gated(shapes))
    renaming = rename(
        naming, match_names(naming, names), shapes, _counts(manifest.info.get("args", {}), "args"), is_whole=is_whole
    )
    states = states_of(manifest, blobs).of_adam()
    moments, _ = state_views(
        renaming.views, states.tensors, MOMENTS, lambda slot, view: (*_STATE, f"{_OPTIMIZER}{view.fqn}", slot)
    )
    views = [_master_of(view, states) for view in renaming.views]
    weights = [replace(v, fqn=f"model.{_MODEL}{v.fqn}", path=("model", f"{_MODEL}{v.fqn}")) for v in views]
    result = apply_views(manifest, [*weights, *moments])
    section = np.array(
        [model] * len(weights) + [SECTIONS.index("optimizer")] * len(moments), result.tensors.section.dtype
    )
    result = result.replace(
        tensors=replace(result.tensors, section=section), blobs=(), info={"step": manifest.info.get("step")}
    )
    objects = [blob for blob in blobs if blob.path[:1] and blob.path[0] in _COMMON]
    objects = [replace(blob, value=_fsdp_args(args)) if blob.fqn == "args" else blob for blob in objects]
    if moments:
        objects += _groups_of_parameters(blobs, renaming.views, states)
    kept = {blob.fqn for blob in objects}
    used = {part.source_fqn for view in (*views, *moments, *renaming.views) for part in view.parts}
    dropped = [Dropped(fqn, why) for fqn, why in renaming.dropped]
    dropped += [
        Dropped(fqn, "no weight and no moment of one: Megatron-FSDP has no place for it")
        for fqn in manifest.tensors.fqns
        if fqn not in used and fqn not in dict(renaming.dropped)
    ]
    dropped += [
        Dropped(blob.fqn, "of the layout that saved it; Megatron-FSDP starts it afresh")
        for blob in blobs
        if blob.fqn not in kept and "param_groups" not in blob.fqn
    ]
    step = manifest.info.get("step")
    notes = [
        *renaming.notes,
        f"for --ckpt-format fsdp_dtensor: the target is the folder iter_{step:07d} of a run, whose "
        f"latest_checkpointed_iteration.txt says {step}"
        if type(step) is int
        else "for --ckpt-format fsdp_dtensor",
    ]
    if any(view is not own for view, own in zip(views, renaming.views, strict=True)):
        notes.append("weights are the optimizer's masters in float32, as Megatron-FSDP saves them")
    return Taken(result, tuple(objects), tuple(dropped), tuple(notes))


def _naming(*, is_gated: bool) -> Naming:
    return builtin_namings()["megatron-fsdp" if is_gated else "megatron-fsdp-plain"]


def _counts(args: Mapping[str, Any], where: str) -> dict[str, Fact]:
    """How many layers and experts there are."""
    named = {"layers": "num_layers", "experts": "num_experts"}
    return {fact: Fact(int(args[name]), f"{where}.{name}") for fact, name in named.items() if args.get(name)}


def _is_gated(shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether first layers of MLPs are twice as wide as the second ones are deep; True where gates are apart."""
    for fqn, shape in shapes.items():
        second = shapes.get(fqn.replace("linear_fc1", "linear_fc2"))
        if fqn.endswith("linear_fc1.weight") and second is not None:
            return shape[-2] == 2 * second[-1]
    return True


def _with_sources(view: View, weights: Mapping[str, str]) -> View:
    """The view, of the tensors as the source calls them."""
    return replace(view, parts=tuple(replace(part, source_fqn=weights[part.source_fqn]) for part in view.parts))


def _master_of(view: View, states: WeightStates) -> View:
    """The same view of the masters, where all of what it is made of has one."""
    masters = [states.tensors.get(part.source_fqn, {}).get(MASTER) for part in view.parts]
    if not all(masters):
        return view
    parts = zip(view.parts, masters, strict=True)
    return replace(view, parts=tuple(replace(part, source_fqn=str(fqn)) for part, fqn in parts))


def _states(manifest: Manifest, blobs: Sequence[Blob], weights: Mapping[str, str]) -> WeightStates:
    """State by weight; names of parameters have other wrappers in front than those of weights."""
    tensors: dict[str, dict[str, str]] = {}
    steps: dict[str, str] = {}
    named = [(meta.fqn, meta.path) for meta in manifest.tensors] + [(blob.fqn, blob.path) for blob in blobs]
    for fqn, path in named:
        weight = (
            weights.get(_WRAPPERS.sub("", str(path[2]), count=1)) if path[:2] == _STATE and len(path) == 4 else None
        )
        if weight is None:
            continue
        if path[3] == "step":
            steps[weight] = fqn
        elif path[3] in (MASTER, *MOMENTS):
            tensors.setdefault(weight, {})[str(path[3])] = fqn
    return WeightStates(tensors, steps, ()).of_adam()


def _listed_groups(blobs: Sequence[Blob]) -> Iterator[dict[str, Any]]:
    """Each set of hyperparameters once; parameters of one group have the same."""
    fields: dict[str, dict[str, Any]] = {}
    for blob in blobs:
        if blob.path[:2] == _GROUPS and len(blob.path) == 4:
            fields.setdefault(str(blob.path[2]), {})[str(blob.path[3])] = blob.value
    seen: dict[str, dict[str, Any]] = {}
    for own in fields.values():
        seen.setdefault(repr(sorted(own.items(), key=str)), own)
    yield from seen.values()


def _groups_of_parameters(blobs: Sequence[Blob], views: Sequence[View], states: WeightStates) -> list[Blob]:
    """Hyperparameters of each parameter, of the group that it belongs to."""
    entries = [blob_entry(blob) for blob in blobs if blob.path[:1] == ("optimizer",)]
    root = nest(entries) if entries else {}
    groups = groups_of(parts_of(root.get("optimizer"), blobs))
    is_apart = any(group.get("is_expert_parallel") for group in groups)
    found = []
    for view in views:
        if not any(part.source_fqn in states.tensors for part in view.parts):
            continue
        is_expert = ".mlp.experts." in view.fqn
        fitting = [
            group
            for group in groups
            if in_group(view.fqn, view.shape, group, groups, is_expert=is_expert, is_apart=is_apart)
        ]
        if not fitting:
            raise LayoutError(
                "no parameter group fits it, by wd_mult, is_expert_parallel and is_decoupled_lr", where=view.fqn,
                hint="take the weights alone: --include 'model.*'",
            )  # fmt: skip
        for name, value in fitting[0].items():
            if name != "params":
                path = (*_GROUPS, f"{_OPTIMIZER}{view.fqn}", str(name))
                found.append(Blob(".".join(path), "value", None, value, path, is_loaded=True))
    return found


def _fsdp_args(args: Stub) -> Stub:
    """The run's arguments, saying of themselves what a run of Megatron-FSDP says."""
    copy = type(args).__new__(type(args), *args.args, **args.kwargs)
    copy.made, copy.entries, copy.items = args.made, args.entries, args.items
    copy.state = {**args.state, "ckpt_format": "fsdp_dtensor", "use_megatron_fsdp": True}
    return copy


def _width(args: Any) -> Any:
    """The element type of the weights of a run that keeps masters beside them; None where nothing tells."""
    state = args.state if isinstance(args, Stub) and isinstance(args.state, dict) else {}
    name = "bfloat16" if state.get("bf16") else "float16" if state.get("fp16") else None
    return None if name is None else dtype(name)


def _is_wide(manifest: Manifest, view: View) -> bool:
    return all(manifest.tensor(part.source_fqn).dtype.name == "float32" for part in view.parts)


def _why_not(fqn: str) -> str | None:
    """Why something of the source has no place; None for what is there in another form."""
    if fqn.startswith("optimizer.param_to_group_meta."):
        return None
    if fqn.startswith("rng_state"):
        return "a random state of the source's ranks; --rng emit makes those of the start of a run"
    if "_extra_state" in fqn:
        return "state of a module; Megatron starts it afresh"
    return "of Megatron-FSDP alone"
