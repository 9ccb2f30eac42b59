"""Arguments for a Megatron checkpoint that has none: of settings beside it, of its tensors, and of what the user says.

NeMo and Megatron-Bridge save no ``args``, by which Megatron-LM knows whether a checkpoint is of its model, and by which
fused weights are cut here. Nothing is assumed: what nobody tells is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_tool.api.convert.conversion import Dropped
from ckpt_tool.api.convert.taken import Taken
from ckpt_tool.errors import LayoutError
from ckpt_tool.formats.megatron.fresh import fresh_objects
from ckpt_tool.formats.megatron.registration import layer_key
from ckpt_tool.formats.megatron.target_boxes import weight_key
from ckpt_tool.layout.model_config import arguments_of
from ckpt_tool.manifest.model import Blob, Manifest
from ckpt_tool.manifest.tables import TensorTable

__all__ = ["missing_arguments", "with_made_arguments"]

_EXPERTS = "mlp.experts.experts."
_NEEDED = {
    "num_layers": "N",
    "hidden_size": "N",
    "num_attention_heads": "N",
    "swiglu": "true/false",
}
"""What Megatron compares on loading (``check_checkpoint_args``), and how ``linear_fc1`` is cut; as they are typed."""
_COMMON = (
    "checkpoint_version", "content_metadata", "iteration", "model", "num_floating_point_operations_so_far", "optimizer",
    "opt_param_scheduler", "rerun_state_machine", "rerun_state_machine_state", "rng_state",
)  # fmt: skip
"""What Megatron's own common state has."""


def missing_arguments(manifest: Manifest, given: Mapping[str, Any]) -> list[str]:
    """Arguments that a target of Megatron needs and that nothing tells, as they are typed.

    Args:
        manifest: the whole source's.
        given: what the user says.
    """
    known = {**_of_tensors(manifest.tensors), **manifest.info.get("args", {}), **given}
    return [f"--arg {name}={kind}" for name, kind in _NEEDED.items() if known.get(name) is None]


def with_made_arguments(
    whole: Manifest,
    taken: Taken,
    arguments: Mapping[str, Any],
    config: tuple[Mapping[str, Any], str] | None,
) -> Taken:
    """What is taken, with arguments of a run among its objects, and without what other programs have beside them.

    Args:
        whole: the source with all of its tensors.
        taken: what is to be written.
        arguments: what the user says, which goes before all else.
        config: the model's ``config.json`` and where it is, None without.

    Raises:
        LayoutError: two of them contradict each other, or an argument that is needed is told by none.
    """
    sources = [("its tensors", _of_tensors(whole.tensors)), (_settings(whole), whole.info.get("args", {}))]
    if config is not None:
        sources.append((config[1], arguments_of(*config).values))
    known: dict[str, Any] = {}
    told: dict[str, str] = {}
    for name_of_source, values in sources:
        for name, value in values.items():
            if name not in arguments and known.get(name, value) != value and name != "padded_vocab_size":
                raise LayoutError(
                    f"{name} is {known[name]!r} by {told[name]} and {value!r} by {name_of_source}",
                    where=whole.where,
                    hint=f"choose with --arg {name}=VALUE",
                )
            known[name], told[name] = value, name_of_source
    known |= arguments
    missing = missing_arguments(whole, known)
    if missing:
        names = ", ".join(text.split("=")[0].removeprefix("--arg ") for text in missing)
        raise LayoutError(
            f"the source has no args of a Megatron run, and neither its tensors nor {_settings(whole)} tell {names}",
            where=whole.where,
            hint=f"give them with {' '.join(missing)}, or give the model's config with --config config.json",
        )
    blobs, dropped = _for_megatron(taken.blobs, known)
    info = {**taken.manifest.info, "args": {n: v for n, v in known.items() if isinstance(v, (int, str, float, bool))}}
    if type(known.get("iteration")) is int:
        info["step"] = known["iteration"]
    has_state = any(path[0] == "optimizer" for path in taken.manifest.tensors.paths or ())
    if type(info.get("step")) is not int and not has_state:
        info["folder"] = "release"
    elif type(info.get("step")) is not int:
        raise LayoutError(
            "the iteration is not known, by which Megatron finds a checkpoint", where=whole.where,
            hint="give it with --arg iteration=N",
        )  # fmt: skip
    said = ", ".join(f"{name} {known[name]}" for name in _NEEDED)
    note = (
        f"the source has no args: they are made of its tensors and {_settings(whole)} ({said}); Megatron's command "
        "line says all else"
    )
    return Taken(
        taken.manifest.replace(info=info), blobs, (*taken.dropped, *dropped), (*taken.notes, note), taken.dtypes
    )


def _settings(manifest: Manifest) -> str:
    """What tells the sizes of the run, in words."""
    if manifest.info.get("args") and manifest.mesh is not None:
        return manifest.mesh.evidence
    return "settings beside them"


def _for_megatron(blobs: Sequence[Blob], arguments: Mapping[str, Any]) -> tuple[tuple[Blob, ...], list[Dropped]]:
    """Objects as Megatron's common state has them, and what has no place in it."""
    kept = [blob for blob in blobs if "/shard_" in blob.fqn or str((blob.path or (blob.fqn,))[0]) in _COMMON]
    names = {blob.fqn for blob in kept}
    made = [blob for blob in fresh_objects(arguments, {}) if blob.fqn not in names]
    why = "Megatron's common state has nothing of this name; the program that saved it does"
    return (*made, *kept), [Dropped(blob.fqn, why) for blob in blobs if blob.fqn not in names]


def _of_tensors(tensors: TensorTable) -> dict[str, Any]:
    """What names and shapes tell."""
    found: dict[str, Any] = {}
    n_layers = n_experts = 0
    for row, path in enumerate(tensors.paths or ()):
        key = weight_key(path) if path[0] == "model" else None
        if key is None or "._extra_state" in key:
            continue
        shape, of_layer = tensors.shape_of(row), layer_key(key)
        if key == "embedding.word_embeddings.weight":
            found |= {"padded_vocab_size": shape[0], "hidden_size": shape[1]}
        elif of_layer is not None:
            number, name = of_layer
            n_layers = max(n_layers, shape[0] if number is None else number + 1)
            if name.startswith(_EXPERTS):
                own = name.removeprefix(_EXPERTS).partition(".")[0]
                n_experts = max(n_experts, int(own) + 1 if own.isdecimal() else shape[number is None])
    found |= {"num_layers": n_layers} if n_layers else {}
    found |= {"num_experts": n_experts} if n_experts else {}
    return found
