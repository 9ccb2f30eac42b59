"""A vocabulary is one row for each token, in the input embedding and in the output head: their names and true size.

Knows names and what a manifest's ``info`` records; reads nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["embedding_and_head", "padded_size", "recorded_size", "says_tied", "stated_tied", "text_config"]

# (input embedding, output head) as the families of transformers and Megatron call them, compared without what is in
# front.
_NAMES = (
    ("embed_tokens.weight", "lm_head.weight"),
    ("wte.weight", "lm_head.weight"),
    ("word_embeddings.weight", "lm_head.weight"),
    ("word_embeddings.weight", "output_layer.weight"),
    ("embed_in.weight", "embed_out.weight"),
    ("tok_embeddings.weight", "output.weight"),
)

# The part of a configuration that is about text, where a model has others too (images, sound), by its key: that of
# transformers, InternVL, DeepSeek-VL2 and Qwen's Omni models.
_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")


def embedding_and_head(names: Iterable[str]) -> tuple[str | None, str | None]:
    """``(embedding, head)``: the names of both as far as they are stored; both None where several could be either.

    >>> embedding_and_head(["wte.weight", "h.0.mlp.weight"])
    ('wte.weight', None)
    """
    names = list(names)
    found: tuple[str | None, str | None] = (None, None)
    for embedding, head in _NAMES:
        embeddings = [n for n in names if n == embedding or n.endswith("." + embedding)]
        heads = [n for n in names if n == head or n.endswith("." + head)]
        if len(embeddings) != 1 or len(heads) > 1:
            continue
        if heads:
            return embeddings[0], heads[0]
        found = found if found[0] else (embeddings[0], None)
    return found


def recorded_size(info: Mapping[str, Any]) -> tuple[int | None, str]:
    """How many tokens the checkpoint says there are, and where it does; ``(None, "")`` when it does not."""
    for table, where in (("args", "args.vocab_size"), ("config", "config.json's vocab_size")):
        values = info.get(table)
        found = values.get("vocab_size") if isinstance(values, Mapping) else None
        if type(found) is int and found > 0:
            return found, where
    return None, ""


def padded_size(n_tokens: int, divisor: int, tp: int) -> int:
    """Rows of a vocabulary of ``n_tokens`` in a run of ``tp`` tensor-parallel ranks of Megatron.

    >>> padded_size(100, 8, 2)
    112
    """
    step = divisor * tp
    return -(-n_tokens // step) * step


def text_config(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """The part of a ``config.json`` that is about text, and the keys in front of its own; all of it where it has none.

    >>> text_config({"thinker_config": {"text_config": {"vocab_size": 9}}})
    ({'vocab_size': 9}, 'thinker_config.text_config.')
    """
    for key in _TEXT_PARTS:
        part = config.get(key)
        if isinstance(part, Mapping):
            found, where = text_config(part)
            return found, f"{key}.{where}"
    return config, ""


def stated_tied(config: Mapping[str, Any]) -> tuple[bool | None, str]:
    """``tie_word_embeddings`` of a ``config.json`` or of its part about text, and its keys; None where neither has it.

    >>> stated_tied({"text_config": {"tie_word_embeddings": True}})
    (True, 'text_config.tie_word_embeddings')
    """
    text, where = text_config(config)
    for part, prefix in ((config, ""), (text, where)):
        found = part.get("tie_word_embeddings")
        if isinstance(found, bool):
            return found, f"{prefix}tie_word_embeddings"
    return None, ""


def says_tied(info: Mapping[str, Any]) -> str:
    """What says that embedding and head are one parameter; empty where nothing does."""
    config, args = info.get("config"), info.get("args")
    tied, key = stated_tied(config) if isinstance(config, Mapping) else (None, "")
    if tied:
        return f"config.json says {key}"
    if info.get("tie_word_embeddings") is True:
        return "config.json says tie_word_embeddings"
    if isinstance(args, Mapping) and args.get("untie_embeddings_and_output_weights") is False:
        return "args say that embedding and output layer are one (no --untie-embeddings-and-output-weights)"
    return ""
