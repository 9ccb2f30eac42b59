"""Facts of a run of NeMo 1, from the scalars at the left edge of its ``model_config.yaml``; nothing else of it is read.

Names: NeMo 1 ``conf/megatron_gpt_config.yaml``.
"""

from __future__ import annotations

import re
from typing import Any

from ckpt_tool.formats.megatron.facts import Facts

__all__ = ["CONFIG", "facts_of_config"]

CONFIG = "model_config.yaml"
_SCALAR = re.compile(r"^([a-z_]+): *([\w.\-]+) *(?:#.*)?$", re.MULTILINE)
_NUMBERS = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "num_layers", "hidden_size", "ffn_hidden_size",
    "num_attention_heads", "num_query_groups", "kv_channels", "make_vocab_size_divisible_by",
)  # fmt: skip
_GATED = frozenset({"swiglu", "fast-swiglu", "geglu", "fast-geglu", "reglu", "fast-reglu"})


def facts_of_config(text: str) -> Facts:
    r"""What the settings say; absent ones are None.

    >>> facts = facts_of_config("num_layers: 4\nactivation: fast-swiglu\nshare_embeddings_and_output_weights: false\n")
    >>> facts.num_layers, facts.swiglu, facts.untie_embeddings_and_output_weights
    (4, True, True)
    """
    said = dict(_SCALAR.findall(text))
    found: dict[str, Any] = {
        name: int(said[name]) for name in _NUMBERS if re.fullmatch("[0-9]{1,9}", said.get(name, ""))
    }
    if "activation" in said:
        found["swiglu"] = said["activation"] in _GATED
    shared = said.get("share_embeddings_and_output_weights")
    if shared in ("true", "false"):
        found["untie_embeddings_and_output_weights"] = shared == "false"
    return Facts(**found)
