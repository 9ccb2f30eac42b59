"""A training state as a plain job of torch has it: a Hugging Face model, and AdamW by the names of its parameters.

Keys are those of torch's ``get_state_dict``: ``model.<fqn>``, ``optim.state.<fqn>.exp_avg``, ``optim.param_groups``.
Such a job (FSDP with ``MixedPrecisionPolicy``) keeps its weights in float32: they are the source's masters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ckpt_tool.api.checkpoint import Checkpoint
from ckpt_tool.api.convert.conversion import Dropped
from ckpt_tool.api.convert.hf_names import with_hf_names
from ckpt_tool.api.convert.names_options import NamesOptions
from ckpt_tool.api.convert.taken import Taken
from ckpt_tool.api.convert.weight_states import (
    MASTER,
    MOMENTS,
    WeightStates,
    check_is_decoded,
    state_views,
    states_of,
    step_of,
    torch_state,
)
from ckpt_tool.errors import LayoutError, UsageError
from ckpt_tool.formats._torch_file.nested import nest
from ckpt_tool.formats._torch_file.written import blob_entry
from ckpt_tool.formats.megatron.target_optimizer import groups_of, parts_of
from ckpt_tool.layout.views import View, apply_views
from ckpt_tool.manifest.model import Blob, Manifest
from ckpt_tool.manifest.optimizer import ParameterGroup
from ckpt_tool.manifest.tables import SECTIONS
from ckpt_tool.sizes import counted

__all__ = ["as_torch_training"]

_OF_TORCH: Mapping[str, Any] = {
    "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False, "maximize": False,
    "foreach": None, "capturable": False, "differentiable": False, "fused": None, "decoupled_weight_decay": True,
}  # fmt: skip
"""Hyperparameters that torch's AdamW asks for, with its defaults."""
_NEEDED = ("lr", "betas", "eps", "weight_decay")
_TIED = {"model.model.embed_tokens.weight": "lm_head.weight", "model.gpt_neox.embed_in.weight": "embed_out.weight"}
"""The output layer's name in the module, by that of the embedding in the target."""
_COMMON_STEP = "common_step"
"""Of Megatron without the distributed optimizer: one counter for all weights."""


def as_torch_training(
    checkpoint: Checkpoint, manifest: Manifest, blobs: Sequence[Blob], options: NamesOptions, *, is_whole: bool
) -> Taken:
    """Weights and the state of Adam under the names of a Hugging Face model.

    Args:
        checkpoint: the source.
        manifest: the tensors that are taken, resolved.
        blobs: its objects, loaded.
        options: what the user says of names.
        is_whole: no part of the model was left out on purpose.

    Raises:
        UsageError: no naming fits the source's names.
        LayoutError: a weight has no state where others have, or which hyperparameters are whose is not known.
    """
    named = with_hf_names(checkpoint, manifest, options, is_whole=is_whole, has_config=False)
    if named is None:
        raise UsageError(
            "no family's names are known for these tensors", where=checkpoint.url,
            hint="leave out --names, or give rules with --naming FILE",
        )  # fmt: skip
    model = SECTIONS.index("model")
    is_model = {fqn for row, fqn in enumerate(manifest.tensors.fqns) if manifest.tensors.section[row] == model}
    weights = [view for view in named.views if all(part.source_fqn in is_model for part in view.parts)]
    check_is_decoded(manifest, checkpoint.url)
    states = states_of(manifest, blobs).of_adam()
    steps = {} if not states.tensors else _steps(manifest, states)
    views, of_masters = _of_masters(weights, states)
    moments, without = state_views(weights, states.tensors, MOMENTS, torch_state)
    notes = [*named.notes, *(states.notes if moments else ())]
    objects: list[Blob] = []
    if moments:
        step = step_of(checkpoint, manifest, blobs, replace(states, steps=steps, groups=_groups(states, blobs)))
        objects = list(_objects(checkpoint, weights, set(without), states, blobs, step))
        if without:
            notes.append(
                f"{counted(len(without), 'tensor', 'have')} no state, as buffers have none: {', '.join(without[:4])}"
            )
        n_groups = len({blob.path[2] for blob in objects if blob.path[1] == "param_groups"})
        notes.append(
            f"the optimizer is torch's AdamW at step {step:,} in {counted(n_groups, 'group')} of hyperparameters"
        )
    if of_masters:
        notes.append(
            f"{counted(of_masters, 'weight', 'are')} the optimizer's masters in float32, as a job of torch keeps "
            "them; --dtype bfloat16 rounds them to the weights that the source's model had"
        )
    if is_whole:
        tied = list(_tied(views, manifest))
        views += tied
        notes += [
            f"{view.fqn} is the embedding once more: the two are tied, and a running model names both" for view in tied
        ]
    result = apply_views(manifest, [*views, *moments])
    section = np.array(
        [model] * len(views) + [SECTIONS.index("optimizer")] * len(moments), result.tensors.section.dtype
    )
    result = result.replace(
        tensors=replace(result.tensors, section=section), blobs=(), info={"step": manifest.info.get("step")}
    )
    used = {part.source_fqn for view in (*weights, *views, *moments) for part in view.parts} | set(steps.values())
    left = [fqn for fqn in manifest.tensors.fqns if fqn not in used and fqn not in {d.fqn for d in named.dropped}]
    why = "no weight, and no state of AdamW"
    dropped = [*named.dropped, *(Dropped(fqn, why) for fqn in left)]
    dropped += [Dropped(blob.fqn, "of the program that saved it") for blob in blobs if "param_groups" not in blob.fqn]
    return Taken(result, tuple(objects), tuple(dropped), tuple(notes))


def _of_masters(weights: Sequence[View], states: WeightStates) -> tuple[list[View], int]:
    """The weights under the key of the model, their masters where all of what they are made of has one."""
    found, n_masters = [], 0
    for view in weights:
        masters = [states.tensors.get(part.source_fqn, {}).get(MASTER) for part in view.parts]
        parts = view.parts
        if all(masters):
            n_masters += 1
            parts = tuple(
                replace(part, source_fqn=str(fqn)) for part, fqn in zip(parts, masters, strict=True)
            )  # fmt: skip
        found.append(View(f"model.{view.fqn}", view.shape, parts, view.zeros, ("model", view.fqn)))
    return found, n_masters


def _tied(views: Sequence[View], manifest: Manifest) -> Iterator[View]:
    """The output layer of a run of Megatron that has none of its own."""
    args = manifest.info.get("args")
    if not isinstance(args, Mapping) or args.get("untie_embeddings_and_output_weights") is True:
        return
    by_name = {view.fqn: view for view in views}
    for embedding, output in _TIED.items():
        if embedding in by_name and f"model.{output}" not in by_name:
            yield replace(by_name[embedding], fqn=f"model.{output}", path=("model", output))


def _steps(manifest: Manifest, states: WeightStates) -> Mapping[str, str]:
    """Counters by weight; of a source that has one for all, that one."""
    common = [meta.fqn for meta in manifest.tensors if meta.path[-1] == _COMMON_STEP]
    return dict.fromkeys(states.tensors, common[0]) if len(common) == 1 else states.steps


def _groups(states: WeightStates, blobs: Sequence[Blob]) -> tuple[ParameterGroup, ...]:
    """Groups of the source, or those that Megatron has apart from the state."""
    if states.groups:
        return states.groups
    entries = [blob_entry(blob) for blob in blobs if blob.path[:1] == ("optimizer",)]
    root = nest(entries) if entries else {}
    found = groups_of(parts_of(root.get("optimizer"), blobs))
    return tuple(ParameterGroup((), {key: value for key, value in group.items() if key != "params"}) for group in found)


def _objects(
    checkpoint: Checkpoint,
    weights: Sequence[View],
    without: set[str],
    states: WeightStates,
    blobs: Sequence[Blob],
    step: int,
) -> Iterator[Blob]:
    """Counters, and groups with the hyperparameters of AdamW."""
    held = [view for view in weights if view.fqn not in without]
    for view in held:
        yield _blob(("optim", "state", view.fqn, "step"), float(step))
    for number, (hyperparameters, names) in enumerate(_with_members(checkpoint, held, _groups(states, blobs))):
        for name, value in {**hyperparameters, "params": names}.items():
            yield _blob(("optim", "param_groups", number, name), value)


def _blob(path: tuple[str | int, ...], value: Any) -> Blob:
    return Blob(".".join(map(str, path)), "value", None, value, path, is_loaded=True)


def _with_members(
    checkpoint: Checkpoint, views: Sequence[View], groups: Sequence[ParameterGroup]
) -> list[tuple[dict[str, Any], list[str]]]:
    """Each set of hyperparameters with the parameters that have it."""
    found: dict[str, tuple[dict[str, Any], list[str]]] = {}
    of_weight = {str(name): group for group in groups for name in group.params}
    for view in views:
        own = of_weight.get(_in_module(view, of_weight)) if of_weight else _by_decay(checkpoint, view, groups)
        if own is None:
            raise LayoutError("no group of the optimizer has it", where=view.fqn)
        values = _of_adamw(own.hyperparameters, checkpoint)
        found.setdefault(repr(values), (values, []))[1].append(view.fqn)
    return list(found.values())


def _in_module(view: View, names: Mapping[str, Any]) -> str:
    fqn = view.parts[0].source_fqn
    return fqn if fqn in names else fqn.partition(".")[2]


def _by_decay(checkpoint: Checkpoint, view: View, groups: Sequence[ParameterGroup]) -> ParameterGroup:
    """The group that Megatron puts a weight into: biases and norms do not decay (``get_standard_config_overrides``)."""
    args = checkpoint.manifest.info.get("args", {})
    key = view.parts[0].source_fqn
    is_head_norm = "q_layernorm." in key or "k_layernorm." in key
    decays = len(view.shape) > 1 or (is_head_norm and args.get("apply_wd_to_qk_layernorm") is True)
    fitting = [group for group in groups if bool(group.hyperparameters.get("wd_mult", 1.0)) == decays]
    kinds = {repr(_of_adamw(group.hyperparameters, checkpoint)) for group in fitting}
    if len(kinds) != 1:
        raise LayoutError(
            f"{counted(len(kinds), 'group')} of the optimizer could have it, and groups do not list their weights",
            where=key,
            hint="take the weights alone: --include 'model.*'",
        )  # fmt: skip
    return fitting[0]


def _of_adamw(group: Mapping[str, Any], checkpoint: Checkpoint) -> dict[str, Any]:
    missing = [name for name in _NEEDED if name not in group]
    if missing:
        raise LayoutError(f"groups of the optimizer have no {', '.join(missing)}", where=checkpoint.url)
    values = {name: group.get(name, default) for name, default in _OF_TORCH.items()}
    values["betas"] = tuple(values["betas"])
    peak = group.get("initial_lr", group.get("max_lr"))
    return values if peak is None else {**values, "initial_lr": peak}
