"""A source as Megatron's writers take it: Megatron's names and shapes, arguments of a run, a vocabulary padded for it.

What comes from Megatron keeps its names; a Hugging Face model gets Megatron's, by the same namings that lead the other
way, and arguments made of its ``config.json``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ckpt_tool.api.arguments import read_option_file
from ckpt_tool.api.checkpoint import Checkpoint
from ckpt_tool.api.convert.conversion import Dropped
from ckpt_tool.api.convert.megatron_optimizer import megatron_optimizer
from ckpt_tool.api.convert.taken import Taken
from ckpt_tool.api.convert.vocabulary import repadded
from ckpt_tool.api.convert.weight_states import (
    MASTER,
    MOMENTS,
    WeightStates,
    state_views,
    states_of,
    step_of,
    with_all_masters,
)
from ckpt_tool.dtypes import dtype
from ckpt_tool.errors import LayoutError, UsageError
from ckpt_tool.formats.megatron.fresh import fresh_objects
from ckpt_tool.formats.megatron.parallel import built_in_rules
from ckpt_tool.formats.megatron.registration import layer_key
from ckpt_tool.geometry.box import Box
from ckpt_tool.layout.model_config import arguments_of
from ckpt_tool.layout.naming import rename
from ckpt_tool.layout.naming_back import rename_back
from ckpt_tool.layout.naming_match import choose_naming, match_names
from ckpt_tool.layout.naming_rules import Naming, builtin_namings
from ckpt_tool.layout.naming_sizes import Fact
from ckpt_tool.layout.views import Part, View, apply_views
from ckpt_tool.manifest.model import Blob, Manifest
from ckpt_tool.manifest.tables import SECTIONS
from ckpt_tool.manifest.vocabulary import padded_size
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted, counted_of

__all__ = ["MegatronOptions", "as_megatron"]

_DIVISOR = 128
"""``make_vocab_size_divisible_by`` where nobody says otherwise, as in Megatron."""
_FLOAT32 = dtype("float32")
_LIKE_EMBEDDING = ("lm_head.weight", "embed_out.weight")


@dataclass(frozen=True, slots=True)
class MegatronOptions:
    """What the user says of the Megatron run that is to load the target."""

    arguments: Mapping[str, Any]
    """Arguments by name, over all that is known."""
    config: str | None = None
    """A ``config.json`` for a source that has none."""


def as_megatron(
    checkpoint: Checkpoint,
    manifest: Manifest,
    blobs: tuple[Blob, ...],
    options: MegatronOptions,
    *,
    tp: int,
    is_live: bool,
) -> Taken:
    """The source under Megatron's names, its vocabulary padded for ``tp`` tensor-parallel ranks.

    Args:
        checkpoint: the source.
        manifest: the tensors that are taken, resolved.
        blobs: its objects, loaded.
        options: what the user says.
        tp: the target's tensor-parallel size.
        is_live: the target has tensors as modules have them, so a gate and an up projection are one.

    Raises:
        LayoutError: no naming leads to the source's names, or a fact is missing.
    """
    of_fsdp: Taken | None = None
    if manifest.format == "dcp":
        from ckpt_tool.api.convert.megatron_fsdp import from_fsdp_dtensor, is_fsdp_dtensor  # few sources need it

        if is_fsdp_dtensor(manifest, blobs):
            of_fsdp = from_fsdp_dtensor(checkpoint, manifest, blobs)
            manifest, blobs = of_fsdp.manifest, of_fsdp.blobs
    made: Taken | None = None
    if manifest.format.startswith("megatron") and not any(blob.fqn == "args" for blob in blobs):
        from ckpt_tool.api.convert.megatron_settings import with_made_arguments  # few sources need it

        config = None if options.config is None else _config(checkpoint, options)
        made = with_made_arguments(checkpoint.manifest, Taken(manifest, blobs), options.arguments, config)
        manifest, blobs = made.manifest, made.blobs
    if any(blob.fqn == "args" for blob in blobs):
        manifest = _with_whole_layers(manifest) if is_live else manifest
        known = {**manifest.info.get("args", {}), **options.arguments}
        padded = repadded(manifest.replace(info={**manifest.info, "args": known}), known, tp=tp)
        before = of_fsdp or made or Taken(manifest, blobs)
        return Taken(
            padded.manifest, _with_arguments(blobs, options), (*before.dropped, *padded.dropped),
            (*before.notes, *padded.notes), before.dtypes,
        )  # fmt: skip
    return _from_config(checkpoint, manifest, blobs, options, tp=tp)


def _with_arguments(blobs: tuple[Blob, ...], options: MegatronOptions) -> tuple[Blob, ...]:
    """The source's objects, the arguments overruled by what the user says."""
    if not options.arguments:
        return blobs
    found = []
    for blob in blobs:
        if blob.fqn == "args" and isinstance(getattr(blob.value, "state", None), dict):
            known = blob.value
            value = type(known).__new__(type(known), *known.args, **known.kwargs)
            value.made, value.state = known.made, {**known.state, **options.arguments}
            found.append(replace(blob, value=value))
        else:
            found.append(blob)
    return tuple(found)


def _with_whole_layers(manifest: Manifest) -> Manifest:
    """Gates and up projections that have keys of their own (``weight_w``, ``weight_v``) put together, gate first."""
    views, kept = [], []
    for meta in manifest.tensors:
        stem, is_gate, _ = meta.fqn.rpartition("_w")
        if is_gate and f"{stem}_v" in manifest.tensors.index and meta.fqn.endswith("_w"):
            rows, *rest = meta.shape
            zeros, axes = (0,) * len(rest), tuple(range(len(meta.shape)))
            parts = tuple(
                Part(f"{stem}{half}", Box.whole(meta.shape), (number * rows, *zeros), axes)
                for number, half in enumerate(("_w", "_v"))
            )
            path = (*meta.path[:-1], str(meta.path[-1]).removesuffix("_w"))
            views.append(View(stem, (2 * rows, *rest), parts, path=path))
        elif not (meta.fqn.endswith("_v") and f"{meta.fqn[:-2]}_w" in manifest.tensors.index):
            kept.append(meta.fqn)
    return apply_views(manifest, views, keep=kept) if views else manifest


def _from_config(
    checkpoint: Checkpoint, manifest: Manifest, blobs: tuple[Blob, ...], options: MegatronOptions, *, tp: int
) -> Taken:
    config, where = _config(checkpoint, options)
    naming = _naming(config, where)
    translated = arguments_of(config, where)
    arguments = {**translated.values, **options.arguments}
    facts = {name: Fact(value, evidence) for name, value, evidence in _facts(arguments, where)}
    model = SECTIONS.index("model")
    rows = [row for row in range(len(manifest.tensors)) if manifest.tensors.section[row] == model]
    states = states_of(manifest, blobs).of_adam()
    has_state = bool(states.tensors)
    notes = list(states.notes) if has_state else []
    step = step_of(checkpoint, manifest, blobs, states) if has_state else 0
    dropped = list(_left_out(manifest, blobs, states))
    if has_state:
        manifest, states, n_rounded = with_all_masters(manifest, states)
        notes += _of_masters(manifest, states, n_rounded)
    weights = [manifest.tensors.fqns[row] for row in rows]
    manifest, weights, held, found = _with_hf_names(manifest, weights, states, facts)
    notes += found
    shapes = {fqn: manifest.tensor(fqn).shape for fqn in weights}
    if not arguments.get("untie_embeddings_and_output_weights"):
        for fqn in [fqn for fqn in shapes if fqn.endswith(_LIKE_EMBEDDING)]:
            del shapes[fqn]
            dropped.append(Dropped(fqn, "the config says that it is tied to the embedding"))
    divisor = arguments.setdefault("make_vocab_size_divisible_by", _DIVISOR)
    arguments["padded_vocab_size"] = padded_size(arguments["vocab_size"], divisor, tp)
    variant = "local" if arguments.get("transformer_impl") == "local" else ""
    renaming = rename_back(naming, shapes, facts, n_rows={"vocab": arguments["padded_vocab_size"]}, variant=variant)
    views = [_in_model(view) for view in renaming.views]
    n_tokens, n_rows = arguments["vocab_size"], arguments["padded_vocab_size"]
    notes += [
        f"{counted(len(shapes), 'tensor', 'become')} {len(views):,}: {naming.name}, read backwards ({where})",
        *renaming.notes,
        (
            f"the vocabulary of {n_tokens:,} is padded to {counted(n_rows, 'row')}: {divisor} "
            f"(make_vocab_size_divisible_by) x {tp}"
        ),
        *translated.notes,
    ]
    objects: tuple[Blob, ...] = ()
    info: dict[str, Any] = {"folder": "release"}
    if has_state:
        views += _states(renaming.views, held)
        entry = megatron_optimizer(states.groups, arguments, blobs, step=step)
        arguments |= {name: value for name, value in entry.arguments.items() if name not in options.arguments}
        objects, info = entry.blobs, {"step": step}
        notes += entry.notes
    result = apply_views(manifest, views)
    keys = {view.fqn: view.shape for view in renaming.views}
    # The config counts layers that transformers itself leaves out when it saves.
    n_ahead = len({key.split(".")[2] for key in keys if key.startswith("mtp.layers.")})
    arguments |= {"mtp_num_layers": n_ahead} if n_ahead or "mtp_num_layers" in arguments else {}
    known = {name: value for name, value in arguments.items() if isinstance(value, (int, str, float, bool))}
    result = result.replace(info={"args": known, **info}, blobs=())
    dropped += [Dropped(fqn, why) for fqn, why in renaming.dropped]
    dtypes = {meta.fqn: _FLOAT32 for meta in result.tensors if meta.path[0] == "optimizer" and meta.dtype != _FLOAT32}
    made = (*fresh_objects(arguments, keys), *objects)
    return Taken(result, made, tuple(dropped), tuple(notes), dtypes)


def _in_model(view: View) -> View:
    return replace(view, fqn=f"model.{view.fqn}", path=("model", view.fqn))


def _left_out(manifest: Manifest, blobs: Sequence[Blob], states: WeightStates) -> Iterator[Dropped]:
    """What is neither a weight nor state that Megatron's Adam has, and why it has no place."""
    model = SECTIONS.index("model")
    used = {fqn for own in states.tensors.values() for fqn in own.values()} | set(states.steps.values())
    why = "Megatron's Adam has no such state" if states.tensors else "no weight of the model; Megatron starts its own"
    why = f"whose state it is, is not known: {states.unnamed}" if states.unnamed else why
    for row, fqn in enumerate(manifest.tensors.fqns):
        if manifest.tensors.section[row] != model and fqn not in used:
            yield Dropped(fqn, why)
    for blob in blobs:
        if blob.fqn not in used and not (states.tensors and "param_groups" in blob.fqn):
            yield Dropped(blob.fqn, "not a tensor")


def _of_masters(manifest: Manifest, states: WeightStates, n_without: int) -> Iterator[str]:
    n_weights = len(states.tensors)
    if n_without == 0:
        yield f"masters are those of the source, {n_weights:,}"
    else:
        kinds = {manifest.tensor(fqn).dtype.name for fqn in states.tensors}
        yield (
            f"{counted_of(n_without, n_weights, 'weight', 'have')} no master in the source: their masters are the "
            f"weights themselves ({', '.join(sorted(kinds))}), exact in float32"
        )


def _with_hf_names(
    manifest: Manifest, weights: Sequence[str], states: WeightStates, facts: Mapping[str, Fact]
) -> tuple[Manifest, list[str], Mapping[str, Mapping[str, str]], list[str]]:
    """Weights and their state under Hugging Face's names, as far as another program's are known; else as they are."""
    found = choose_naming(weights, family=None)
    if found is None:
        return manifest, list(weights), states.tensors, []
    shapes = {fqn: manifest.tensor(fqn).shape for fqn in weights}
    renaming = rename(found.naming, match_names(found.naming, weights), shapes, facts, is_whole=True)
    slots = (MASTER, *MOMENTS)
    own, _ = state_views(renaming.views, states.tensors, slots, lambda slot, view: (f"@{slot}.{view.fqn}",))
    result = apply_views(manifest, [*renaming.views, *own])
    made = {view.fqn for view in own}
    held = {
        view.fqn: {slot: f"@{slot}.{view.fqn}" for slot in slots}
        for view in renaming.views
        if f"@{MASTER}.{view.fqn}" in made
    }
    return result, [view.fqn for view in renaming.views], held, [found.evidence, *renaming.notes]


def _states(views: Sequence[View], held: Mapping[str, Mapping[str, str]]) -> list[View]:
    """State of Megatron's weights.

    Raises:
        LayoutError: a parameter has none, which Megatron asks for.
    """
    found, without = state_views(
        views, held, (MASTER, *MOMENTS), lambda slot, view: ("optimizer", "state", slot, view.fqn)
    )
    rules = built_in_rules()
    lacking = [key for key in without if rules.cut(_within_layer(key)) != "buffer"]
    if lacking:
        raise LayoutError(
            f"{counted(len(lacking), 'weight', 'have')} no optimizer state, which Megatron asks for: "
            f"{', '.join(lacking[:4])}",
            hint="leave the state out: --include with a pattern of the weights' names",
        )
    return found


def _within_layer(key: str) -> str:
    """The name that rules are about."""
    found = layer_key(key)
    return key if found is None else found[1]


def _config(checkpoint: Checkpoint, options: MegatronOptions) -> tuple[Mapping[str, Any], str]:
    """The model's config, and where it was read."""
    if options.config is not None:
        try:
            found = json.loads(read_option_file(options.config, "config"))
        except json.JSONDecodeError as error:
            raise UsageError(f"is no JSON: {error}", where=options.config) from error
        if not isinstance(found, dict):
            raise UsageError("expected a JSON object", where=options.config)
        return found, options.config
    config = checkpoint.manifest.info.get("config")
    if not isinstance(config, Mapping):
        raise LayoutError(
            "the source has neither args of a Megatron run nor a config.json, so the model's heads are not known",
            where=checkpoint.url,
            hint="give the model's config with --config config.json",
        )
    return config, f"{os.fspath(checkpoint.url).rstrip('/')}/config.json"


def _naming(config: Mapping[str, Any], where: str) -> Naming:
    kind = config.get("model_type")
    found = [naming for naming in builtin_namings().values() if kind in naming.model_types]
    if not found:
        known = sorted({name for naming in builtin_namings().values() for name in naming.model_types})
        raise LayoutError(
            f"Megatron's names for model_type {kind!r} are not known", where=where, hint=f"known are {', '.join(known)}"
        )
    return found[0]


def _facts(arguments: Mapping[str, Any], where: str) -> list[tuple[str, int, str]]:
    """Numbers that namings need, of the arguments."""
    named = {
        "heads": "num_attention_heads", "kv_heads": "num_query_groups", "head_dim": "kv_channels",
        "layers": "num_layers", "experts": "num_experts",
    }  # fmt: skip
    return [(fact, int(arguments[name]), f"{name} by {where}") for fact, name in named.items() if arguments.get(name)]
