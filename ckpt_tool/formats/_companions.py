"""A companion is a small JSON file beside the tensors: a model's ``config.json``, an adapter's ``adapter_config.json``.

Their content goes into a manifest's ``info``. A companion that cannot be read is a note, never a failure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ckpt_tool.formats._config_checks import model_findings
from ckpt_tool.formats.base import Source
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import FileRange, Manifest
from ckpt_tool.manifest.vocabulary import embedding_and_head, says_tied, stated_tied
from ckpt_tool.sizes import counted

__all__ = ["config_findings", "read_companions", "read_config", "tied_note"]

_MAX_NBYTES = 16 << 20
_COMPARED_NBYTES = 64 << 10
_CONFIG_FOLDERS = ("", "huggingface/")
_ADAPTER_KEYS = {
    "base_model": "base_model_name_or_path", "peft_type": "peft_type", "r": "r", "alpha": "lora_alpha",
    "target_modules": "target_modules", "modules_to_save": "modules_to_save",
}  # fmt: skip

# transformers.trainer (5.24) and accelerate: what is saved beside the model.
_TRAINER_STATE = "trainer_state.json"
_SIDE_FILES = tuple(
    (re.compile(pattern), what)
    for pattern, what in (
        (r"optimizer(?:_\d+)?\.(?:pt|bin)", "the optimizer's state, by number of parameter"),
        (r"scheduler(?:_\d+)?\.(?:pt|bin)", "the learning rate's schedule"),
        (r"scaler\.pt", "the loss scale"),
        (r"rng_state(?:_\d+)?\.pth", "random states"),
        (r"random_states_\d+\.pkl", "random states"),
        (r"training_args\.bin", "arguments of the run"),
        (r"pytorch_model_fsdp_\d+/\.metadata", "the model as DCP"),
        (r"optimizer_\d+/\.metadata", "the optimizer as DCP"),
    )
)


def read_companions(source: Source) -> tuple[dict[str, Any], list[str]]:
    """``(info, notes)``: one request for each companion that is there.

    ``info["config"]`` is all of ``config.json``, with ``model_type``, ``tie_word_embeddings`` (that of the part about
    text, where there are others) and ``torch_dtype`` beside it where it has them; ``info["adapter"]`` has
    ``base_model``, ``peft_type``, ``r``, ``alpha``, ``target_modules`` and ``modules_to_save``; ``info["step"]`` is
    that of transformers' Trainer.
    """
    notes: list[str] = []
    info = _config(source, "config.json", notes)
    info.update(_training(source, notes))
    adapter = _read_json(source, "adapter_config.json", notes)
    if adapter is not None:
        info["adapter"] = {ours: adapter.get(theirs) for ours, theirs in _ADAPTER_KEYS.items()}
        base = info["adapter"]["base_model"] or "a base model that it does not name"
        notes.append(f"a PEFT adapter (r={adapter.get('r')}, alpha={adapter.get('lora_alpha')}) on top of {base}")
    return info, notes


def read_config(source: Source) -> tuple[dict[str, Any], list[str]]:
    """``(info, notes)`` of the model's config alone, where a training checkpoint has one: a request for each candidate.

    That of verl lies in a folder beside the ranks' files, which ``info["config_folder"]`` then names. Settings of a run
    that are called ``config.json`` as well say nothing of a model of transformers, and are no config of one.
    """
    notes: list[str] = []
    for folder in _CONFIG_FOLDERS:
        info = _config(source, folder + "config.json", notes)
        if info.keys() & {"model_type", "tie_word_embeddings"} or "architectures" in info.get("config", ()):
            return info | ({"config_folder": folder} if folder else {}), notes
    return {}, notes


def _config(source: Source, path: str, notes: list[str]) -> dict[str, Any]:
    config = _read_json(source, path, notes)
    if config is None:
        return {}
    # transformers 4.56 renamed torch_dtype to dtype.
    stated = {
        "model_type": config.get("model_type"),
        "tie_word_embeddings": stated_tied(config)[0],
        "torch_dtype": config.get("torch_dtype") or config.get("dtype"),
    }
    return {"config": config} | {key: value for key, value in stated.items() if value is not None}


def _training(source: Source, notes: list[str]) -> dict[str, Any]:
    """What else a folder of a training state holds, in a note; the step of transformers' Trainer."""
    state = _read_json(source, _TRAINER_STATE, notes)
    said = [
        f"{path} ({what})"
        for pattern, what in _SIDE_FILES
        if (path := next((p for p in source.listing.sizes if pattern.fullmatch(p)), None)) is not None
    ]
    if said:
        whose = "" if state is None else " of transformers' Trainer"
        notes.append(
            f"a folder with a training state{whose}, of which this is the model; beside it, each to be named by "
            f"itself: {', '.join(said)}"
        )
    step = None if state is None else state.get("global_step")
    return {"step": step} if type(step) is int else {}


def _read_json(source: Source, path: str, notes: list[str]) -> dict[str, Any] | None:
    if path not in source.listing:
        return None
    if source.listing.nbytes(path) > _MAX_NBYTES:
        notes.append(f"{path} was left out: {counted(source.listing.nbytes(path), 'byte', 'are')} no settings file")
        return None
    try:
        found = json.loads(source.read_whole(path))
    except (ValueError, RecursionError) as error:
        notes.append(f"{path} was left out: it is not JSON ({error})")
        return None
    if not isinstance(found, dict):
        notes.append(f"{path} was left out: expected a JSON object, got {type(found).__name__}")
        return None
    return found


def tied_note(info: Mapping[str, Any], names: Mapping[str, int]) -> list[str]:
    """Says that the output head is the input embedding where ``config.json`` says so and only one is stored."""
    says = says_tied(info)
    embedding, head = embedding_and_head(names) if says else (None, None)
    if embedding is None or head is not None:
        return []
    return [f"the output head is tied to {embedding!r} ({says}) and is stored once"]


def config_findings(source: Source, manifest: Manifest) -> Iterator[Finding]:
    """Companions that do not read, and what ``config.json`` says of the weights and is not so.

    Which there are, their type, tied weights. Two requests at most, and one for each companion that does not read.
    """
    for path, key in (("config.json", "config"), ("adapter_config.json", "adapter"), (_TRAINER_STATE, "step")):
        if path in source.listing and key not in manifest.info:
            notes: list[str] = []
            _read_json(source, path, notes)
            where = FileRange(path, 0, source.listing.nbytes(path))
            yield from (Finding("unreadable-companion", Severity.WARNING, note, where=where) for note in notes)
    adapters = [path for path in manifest.files.paths if path.startswith("adapter_model.")]
    if adapters and "adapter_config.json" not in source.listing and not source.listing.entry:
        said = f"adapter_config.json is not here, without which no program knows what {adapters[0]} adapts"
        yield Finding("missing-file", Severity.WARNING, said, where=FileRange("adapter_config.json", 0, 0))
    yield from model_findings(manifest)
    yield from _dtype_findings(manifest)
    yield from _tied_findings(source, manifest)


def _dtype_findings(manifest: Manifest) -> Iterator[Finding]:
    """Another floating type than most of the weights have; nothing for quantized models, whose types are mixed."""
    stated = manifest.info.get("torch_dtype")
    config = manifest.info.get("config") or {}
    if not isinstance(stated, str) or "quantization_config" in config or "adapter" in manifest.info:
        return
    nbytes: dict[str, int] = {}
    count: dict[str, int] = {}
    for dtype, elements in zip(manifest.tensors.dtypes, manifest.tensors.numel.tolist(), strict=True):
        if dtype.kind == "float":
            nbytes[dtype.name] = nbytes.get(dtype.name, 0) + elements * dtype.bits // 8
            count[dtype.name] = count.get(dtype.name, 0) + 1
    stated = stated.removeprefix("torch.")
    most = max(nbytes, key=lambda name: nbytes[name], default=stated)
    if most == stated or not nbytes[most]:
        return
    share = nbytes[most] / sum(nbytes.values())
    said = (
        f"config.json says {stated}, but {share:.0%} of the weights' bytes are {most} "
        f"({counted(count[most], 'tensor')}): what trusts it casts them when it loads"
    )
    yield Finding("config-dtype", Severity.WARNING, said)


def _tied_findings(source: Source, manifest: Manifest) -> Iterator[Finding]:
    """Both ends of a tied pair stored: wrong when they differ. Two requests, of at most 64 KiB of payload each."""
    stated = says_tied(manifest.info)
    if not stated:
        return
    embedding, head = embedding_and_head(manifest.tensors.index)
    if embedding is None or head is None:
        return
    metas = [manifest.tensor(name) for name in (embedding, head)]
    says = f"{stated}, but {embedding!r} and {head!r} are both stored"
    rows = [manifest.chunks.rows_of(manifest.tensor_id(name)) for name in (embedding, head)]
    places = [manifest.chunks.record(int(own[0]), manifest.tensors, manifest.files).where for own in rows if len(own)]
    if len({(where.path, where.offset) for where in places}) == 1:
        return  # torch.save stores what is tied once
    starts = [
        source.store.read(where.path, where.offset, min(where.length, _COMPARED_NBYTES))
        for own, where in zip(rows, places, strict=False)
        if len(own) == 1 and where.path in source.listing
    ]
    if len({(m.dtype, m.shape) for m in metas}) > 1 or len(set(starts)) > 1:
        yield Finding("tied-but-different", Severity.WARNING, f"{says} and differ; loaders keep one of them", fqn=head)
    else:
        yield Finding(
            "tied-stored-twice",
            Severity.INFO,
            f"{says}; their first {counted(len(starts[0]) if starts else 0, 'byte', 'are')} equal",
            fqn=head,
        )
