"""What ``config.json`` says that a model has, against its weights: layers, output head, vocabulary, sizes.

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

__all__ = ["KNOWN_TYPES", "model_findings"]

_IN_LAYER = re.compile(r"(?P<stack>(?:.+\.)?(?:layers?|h|blocks?))\.(?P<number>\d{1,6})\.(?P<rest>.+)", re.ASCII)
KNOWN_TYPES = frozenset({
    "apertus", "arcee", "bitnet", "bloom", "codegen", "cohere", "cohere2", "cwm", "deepseek_v2", "deepseek_v3",
    "ernie4_5", "exaone", "exaone4", "falcon", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt2", "gpt_neo",
    "gpt_neox", "gpt_oss", "gptj", "granite", "granitemoe", "helium", "internlm3", "jais2", "llama", "mellum",
    "minimax_m2", "ministral3", "mistral", "mistral4", "mixtral", "mpt", "olmo", "olmo2", "olmo3", "olmoe", "opt",
    "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2",
})  # fmt: skip
"""Types of models whose layers are those of the config, and alike, by their code in transformers 5.24."""
_N_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_MIXED = ("first_k_dense_replace", "mlp_only_layers", "quantization_config")
"""Layers of such models differ from each other by design; those of a ``decoder_sparse_step`` above 1 too."""
_SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_DIVIDED = frozenset({"llama", "mistral", "qwen2", "mixtral", "qwen2_moe"})
"""Types whose heads share the hidden size where the config does not say how large they are; others have a default."""
_OF_HIDDEN = re.compile(
    r"(?:^|\.)(?:(?P<norm>(?:input|post_attention)_layernorm|model\.norm)|(?P<to>(?:o|down)_proj)"
    r"|(?P<of>q|k|v|gate|up)_proj)\.weight$"
)
_MAX_LAYERS = 100_000
_SHOWN = 3


def model_findings(manifest: Manifest) -> Iterator[Finding]:
    """Weights that the config asks for and that are not here: errors for the types of models that are known."""
    config = manifest.info.get("config")
    if not isinstance(config, Mapping) or "adapter" in manifest.info or config.get("is_encoder_decoder"):
        return
    text, _ = text_config(config)
    severity = Severity.ERROR if str(config.get("model_type")) in KNOWN_TYPES else Severity.WARNING
    yield from _layers(manifest, text, severity)
    if severity is Severity.ERROR and "quantization_config" not in config:
        yield from _shapes(manifest, text, str(config.get("model_type")))
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


def _shapes(manifest: Manifest, config: Mapping[str, Any], model_type: str) -> Iterator[Finding]:
    """Weights of other shapes than the config's sizes make them, as a rank's part is, or what was flattened."""
    sizes = {key: config[key] for key in _SIZES if type(config.get(key)) is int and config[key] > 0}
    hidden, heads = sizes.get("hidden_size"), sizes.get("num_attention_heads")
    if hidden is None:
        return
    divided = hidden // heads if heads and model_type in _DIVIDED else 0
    head_dim = sizes.get("head_dim", divided)
    kv_heads = sizes.get("num_key_value_heads", heads if model_type == "llama" else 0)
    is_latent = "kv_lora_rank" in config  # whose heads have two sizes
    rows = {
        "q": None if is_latent else (heads or 0) * head_dim or None,
        "k": None if is_latent else (kv_heads or 0) * head_dim or None,
    }
    for row, fqn in enumerate(manifest.tensors.fqns):
        found = _OF_HIDDEN.search(fqn)
        if found is None:
            continue
        shape = manifest.tensors.shape_of(row)
        if found["norm"]:
            expected: tuple[int | None, ...] = (hidden,)
        elif found["to"]:
            expected = (hidden, None)
        else:
            expected = (rows.get("k" if found["of"] == "v" else found["of"]), hidden)
        if len(shape) != len(expected) or any(
            want not in (None, got) for want, got in zip(expected, shape, strict=True)
        ):
            wanted = ", ".join("any" if want is None else str(want) for want in expected)
            said = f"config.json's sizes make {fqn!r} [{wanted}], but it is {list(shape)}: no program loads it"
            yield Finding("config-shape", Severity.ERROR, said, fqn=fqn)


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:_SHOWN])) + (" ..." if len(numbers) > _SHOWN else "")
