"""A config asks for weights that are not here: a lost shard whose names the index lost too."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ckpt_tool.formats.safetensors import single
from ckpt_tool.manifest.finding import Severity
from tests.formats.safetensors.places import model_bytes, source_and_store

LAYER = ("self_attn.q_proj.weight", "mlp.up_proj.weight")
IN_LAYERS = [f"model.layers.{number}.{name}" for number in (0, 1, 2) for name in LAYER]
NAMES = ["model.embed_tokens.weight", *IN_LAYERS, "lm_head.weight"]
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 3, "tie_word_embeddings": False,
}  # fmt: skip


def found(names: list[str], config: dict[str, Any] | bytes) -> list[tuple[str, str, str | None]]:
    """Kind, severity and tensor of what is found."""
    raw = config if isinstance(config, bytes) else json.dumps(config).encode()
    source, _ = source_and_store({"model.safetensors": model_bytes(dict.fromkeys(names, b"1234")), "config.json": raw})
    findings = single.READER.check(source, single.READER.read(source))
    return [(one.kind, one.severity.name, one.fqn) for one in findings]


def without(*parts: str) -> list[str]:
    """The names that hold none of ``parts``."""
    return [name for name in NAMES if not any(part in name for part in parts)]


@pytest.mark.parametrize(
    ("names", "config", "expected"),
    [
        (NAMES, {}, []),
        (without("layers.2"), {}, [("missing-layer", "ERROR", None)]),
        (without("layers.2"), {"model_type": "of tomorrow"}, [("missing-layer", "WARNING", None)]),
        (without("layers.1.mlp"), {}, [("missing-tensor", "ERROR", "model.layers.1.mlp.up_proj.weight")]),
        (without("layers.1.mlp"), {"first_k_dense_replace": 1}, []),
        (without("lm_head"), {}, [("missing-tensor", "ERROR", None)]),
        (without("lm_head"), {"tie_word_embeddings": True}, []),
        (without("lm_head"), {"architectures": ["LlamaModel"]}, []),
        (NAMES, {"vocab_size": 9}, [("config-shape", "WARNING", "model.embed_tokens.weight")]),
        (NAMES, {"num_hidden_layers": 2}, []),
        (NAMES, {"num_hidden_layers": "3", "vocab_size": None, "architectures": "x"}, []),
    ],
)
def test_what_the_config_asks_for(names: list[str], config: dict[str, Any], expected: list[object]) -> None:
    """Layers, their tensors, the head and rows: errors where the type of model is known, silence where it may be so."""
    assert found(names, {**LLAMA, **config}) == expected


def test_a_config_that_does_not_read_is_a_warning() -> None:
    """No program loads the model then."""
    assert found(NAMES, b'{"a":') == [("unreadable-companion", Severity.WARNING.name, None)]


def test_an_adapter_beside_a_model_is_no_part_of_it() -> None:
    """Neither its tensors nor its config; alone, or when it is named, it is what is read."""
    files = {"model.safetensors": model_bytes({"w": b"1"}), "adapter_model.safetensors": model_bytes({"lora": b"2"})}
    source, _ = source_and_store(files)
    assert single.READER.read(source).tensors.fqns == ("w",)
    del files["model.safetensors"]
    source, _ = source_and_store(files)
    assert single.READER.read(source).tensors.fqns == ("lora",)
