"""Facts of a run whose checkpoints have its settings in a file beside them, and no pickled arguments.

Megatron-Bridge puts ``run_config.yaml`` into each iteration's folder, NeMo 2 ``context/model.yaml`` beside the weights.
Only scalars called as Megatron's arguments are read, and of those that occur with several values none counts. Source:
Megatron-Bridge ``training/utils/checkpoint_utils.py``; NeMo 2 ``lightning/io/mixin.py``.
"""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

from ckpt_tool.formats.base import Source
from ckpt_tool.formats.megatron.facts import Facts

__all__ = ["facts_beside"]

_PLACES = (("run_config.yaml", "Megatron-Bridge"), ("context/model.yaml", "NeMo 2"))
_MAX_NBYTES = 4 << 20
_SCALAR = re.compile(r"^ *([a-z_]+): *([^\s#'\"]+) *(?:#.*)?$", re.MULTILINE)
_OTHER_NAMES = {
    "num_moe_experts": "num_experts",
    "gated_linear_unit": "swiglu",
}
"""Of mcore's TransformerConfig, where its fields are called otherwise than Megatron-LM's arguments."""
_NUMBER = re.compile(r"[0-9]{1,15}")


def facts_beside(source: Source, folder: str) -> tuple[Facts, str] | None:
    """What the settings beside the weights say, and the file with who writes it; None where there is none.

    Costs one request.

    Args:
        source: what the user named.
        folder: where the weights lie in it.
    """
    for name, program in _PLACES:
        for path in dict.fromkeys((f"{folder}/{name}".lstrip("/"), name)):
            if path in source.listing and source.listing.nbytes(path) <= _MAX_NBYTES:
                text = source.head(path, _MAX_NBYTES).decode("utf-8", "replace")
                return _facts(text), f"{path} of {program}"
    return None


def _facts(text: str) -> Facts:
    r"""Facts in the text of a YAML file.

    >>> facts = _facts("model:\n  num_layers: 4\n  tensor_model_parallel_size: 2\n  share_embeddings: null\n")
    >>> facts.num_layers, facts.tp, facts.pp
    (4, 2, None)
    """
    said: dict[str, set[str]] = {}
    for name, value in _SCALAR.findall(text):
        said.setdefault(_OTHER_NAMES.get(name, name), set()).add(value)
    shared = said.get("share_embeddings_and_output_weights", set())
    found: dict[str, Any] = {}
    if shared in ({"true"}, {"false"}):
        found["untie_embeddings_and_output_weights"] = shared == {"false"}
    for field in fields(Facts):
        values = said.get(field.name, set())
        value = next(iter(values)) if len(values) == 1 else ""
        kind = str(field.type).partition(" ")[0]
        if kind == "int" and _NUMBER.fullmatch(value):
            found[field.name] = int(value)
        elif kind == "bool" and value in ("true", "false"):
            found[field.name] = value == "true"
    return Facts(**found)
