"""A config asks for weights that are not here: a lost shard whose names the index lost too."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from ckpt_tool.formats.safetensors import single
from ckpt_tool.manifest.finding import Severity
from tests.formats.safetensors.places import file_bytes, model_bytes, source_and_store

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


SHAPES = {
    "model.embed_tokens.weight": [10, 8],
    "model.layers.0.input_layernorm.weight": [8],
    "model.layers.0.self_attn.q_proj.weight": [8, 8],
    "model.layers.0.self_attn.k_proj.weight": [4, 8],
    "model.layers.0.self_attn.o_proj.weight": [8, 8],
    "model.layers.0.mlp.gate_proj.weight": [16, 8],
    "model.layers.0.mlp.down_proj.weight": [8, 16],
    "model.norm.weight": [8],
}
SIZES = {"hidden_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1, "vocab_size": 10}


@pytest.mark.parametrize(
    ("shapes", "config", "expected"),
    [
        ({}, {}, []),
        ({"model.norm.weight": [4]}, {}, ["'model.norm.weight' [8], but it is [4]"]),
        ({"model.layers.0.self_attn.q_proj.weight": [64]}, {}, ["q_proj.weight' [8, 8], but it is [64]"]),
        ({"model.layers.0.self_attn.k_proj.weight": [2, 8]}, {}, ["k_proj.weight' [4, 8], but it is [2, 8]"]),
        ({"model.layers.0.mlp.down_proj.weight": [4, 16]}, {}, ["down_proj.weight' [8, any], but it is [4, 16]"]),
        ({"model.layers.0.mlp.gate_proj.weight": [16, 4]}, {}, ["gate_proj.weight' [any, 8], but it is [16, 4]"]),
        ({"model.layers.0.self_attn.k_proj.weight": [6, 8]}, {"head_dim": 6, "num_attention_heads": None}, []),
        ({"model.layers.0.self_attn.q_proj.weight": [6, 8]}, {"kv_lora_rank": 2}, []),
        ({"model.layers.0.self_attn.q_proj.weight": [256, 8]}, {"model_type": "qwen3"}, []),
        ({"model.layers.0.self_attn.k_proj.weight": [8, 8]}, {"num_key_value_heads": None, "model_type": "qwen2"}, []),
        ({"model.norm.weight": [4]}, {"quantization_config": {}}, []),
        ({"model.norm.weight": [4]}, {"model_type": "of tomorrow"}, []),
        ({"model.norm.weight": [4]}, {"hidden_size": "8"}, []),
    ],
)
def test_shapes_that_the_sizes_make(shapes: dict[str, list[int]], config: dict[str, Any], expected: list[str]) -> None:
    """Flattened parts that FSDP leaves under the names of weights (accelerate's issue 2155) pass for no model."""
    at, listed = 0, {}
    for fqn, shape in {**SHAPES, **shapes}.items():
        end = at + math.prod(shape)
        listed[fqn] = {"dtype": "U8", "shape": shape, "data_offsets": [at, end]}
        at = end
    settings = {"model_type": "llama", "tie_word_embeddings": True, **SIZES, **config}
    files = {"model.safetensors": file_bytes(listed, bytes(at)), "config.json": json.dumps(settings).encode()}
    source, _ = source_and_store(files)
    found = list(single.READER.check(source, single.READER.read(source)))
    assert [(one.kind, one.severity) for one in found] == [("config-shape", Severity.ERROR)] * len(expected)
    assert all(said in one.message for one, said in zip(found, expected, strict=True))


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
