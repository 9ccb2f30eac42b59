"""What ``config.json`` says that a model has, against the names of its weights: layers, output head, vocabulary.

A shard that was lost with its entries in the index leaves files that agree with each other; the config does not. Knows
names and shapes; reads nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.vocabulary import embedding_and_head, stated_tied, text_config
from ckpt_tool.sizes import counted

__all__ = ["model_findings"]

_IN_LAYER = re.compile(r"(?P<stack>(?:.+\.)?(?:layers?|h|blocks?))\.(?P<number>\d{1,6})\.(?P<rest>.+)", re.ASCII)
# Types of models whose layers are those of the config, by their code in transformers 5.24.
_KNOWN = frozenset({
    "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "gpt_neox",
    "gemma", "gemma2", "gemma3_text",
})  # fmt: skip
_N_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_MIXED = ("first_k_dense_replace", "mlp_only_layers", "quantization_config")
"""Layers of such models differ from each other by design; those of a ``decoder_sparse_step`` above 1 too."""
_MAX_LAYERS = 100_000
_SHOWN = 3


def model_findings(manifest: Manifest) -> Iterator[Finding]:
    """Weights that the config asks for and that are not here: errors for the types of models that are known."""
    config = manifest.info.get("config")
    if not isinstance(config, Mapping) or "adapter" in manifest.info or config.get("is_encoder_decoder"):
        return
    text, _ = text_config(config)
    severity = Severity.ERROR if str(config.get("model_type")) in _KNOWN else Severity.WARNING
    yield from _layers(manifest, text, severity)
    embedding, head = embedding_and_head(manifest.tensors.index)
    if embedding is None:
        return
    classes = config.get("architectures")
    with_head = [name for name in classes if str(name).endswith("ForCausalLM")] if isinstance(classes, list) else []
    if with_head and head is None and stated_tied(config)[0] is False:
        said = f"config.json says {with_head[0]} without tie_word_embeddings, but no output head is here"
        yield Finding("missing-tensor", severity, said)
    rows, n_tokens = manifest.tensor(embedding).shape[0], text.get("vocab_size")
    if type(n_tokens) is int and rows < n_tokens:
        said = f"config.json says vocab_size {n_tokens:,}, but {embedding!r} has {rows:,} rows"
        yield Finding("config-shape", Severity.WARNING, said, fqn=embedding)


def _layers(manifest: Manifest, config: Mapping[str, Any], severity: Severity) -> Iterator[Finding]:
    """Layers that lack a number up to the config's, and tensors that some layers lack where all are built alike."""
    count = next((config[key] for key in _N_LAYERS if type(config.get(key)) is int), 0)
    stacks: dict[str, dict[int, set[str]]] = {}
    for fqn in manifest.tensors.fqns:
        found = _IN_LAYER.fullmatch(fqn)
        if found is not None:
            stacks.setdefault(found["stack"], {}).setdefault(int(found["number"]), set()).add(found["rest"])
    if not 0 < count <= _MAX_LAYERS or not stacks:
        return
    wanted = set(range(count))
    whole = [name for name, layers in stacks.items() if wanted <= layers.keys()]
    name = whole[0] if whole else max(stacks, key=lambda each: sum(map(len, stacks[each].values())))
    layers = stacks[name]
    missing = sorted(wanted - layers.keys())
    if missing:
        said = f"config.json says {counted(count, 'layer')}, but {name} lacks {len(missing):,}: {_some(missing)}"
        yield Finding("missing-layer", severity, said)
    is_mixed = any(config.get(key) for key in _MIXED) or config.get("decoder_sparse_step", 1) != 1
    if severity is not Severity.ERROR or is_mixed:
        return
    held = [number for number in sorted(wanted) if number in layers]
    everything: set[str] = set().union(*(layers[number] for number in held))
    for rest in sorted(everything):
        lacking = [number for number in held if rest not in layers[number]]
        if lacking:
            said = f"layers of {name} have {rest!r}, but {len(lacking):,} of {len(held):,} lack it: {_some(lacking)}"
            yield Finding("missing-tensor", severity, said, fqn=f"{name}.{lacking[0]}.{rest}")


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:_SHOWN])) + (" ..." if len(numbers) > _SHOWN else "")
