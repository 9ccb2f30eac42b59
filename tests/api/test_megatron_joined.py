"""Models of transformers whose projections lie in one tensor, in another order than Megatron's: GPT-2 and Phi-3."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from ckpt_tool.api.convert.export import export
from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.errors import LayoutError
from tests.api.test_megatron_source import (
    DIVISOR,
    HEADS,
    HIDDEN,
    LAYERS,
    VOCAB,
    Arrays,
    config_of,
    model,
    read,
    saved,
)


def gpt2_model() -> Arrays:
    """GPT-2's: weights of linear layers are [in, out], all queries before all keys, learned positions, a tied head."""
    rng = np.random.default_rng(8)
    layer: dict[str, tuple[int, ...]] = {
        "ln_1": (HIDDEN,), "ln_2": (HIDDEN,), "attn.c_attn": (HIDDEN, 3 * HIDDEN), "attn.c_proj": (HIDDEN, HIDDEN),
        "mlp.c_fc": (HIDDEN, 4 * HIDDEN), "mlp.c_proj": (4 * HIDDEN, HIDDEN),
    }  # fmt: skip
    shapes = {f"transformer.h.{n}.{key}.weight": shape for n in range(LAYERS) for key, shape in layer.items()}
    shapes["transformer.ln_f.weight"] = (HIDDEN,)
    shapes |= {name.replace(".weight", ".bias"): shape[-1:] for name, shape in shapes.items()}
    shapes |= {"transformer.wte.weight": (VOCAB, HIDDEN), "transformer.wpe.weight": (64, HIDDEN)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


GPT2 = {
    "model_type": "gpt2", "vocab_size": VOCAB, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64,
    "n_inner": None, "layer_norm_epsilon": 1e-6, "activation_function": "gelu_new",
}  # fmt: skip


@pytest.mark.parametrize("prefix", ["transformer.", ""])
def test_gpt2_is_transposed_and_its_heads_are_put_together(prefix: str, tmp_path: Path) -> None:
    """Heads side by side in Megatron, and all as it was back; older files lack the prefix and have masks."""
    weights = gpt2_model()
    stored = {prefix + name.removeprefix("transformer."): array for name, array in weights.items()}
    if not prefix:
        stored |= {f"h.{n}.attn.bias": np.tril(np.ones((1, 1, 64, 64), np.float32)) for n in range(LAYERS)}
    source = saved(tmp_path / "hf", stored, GPT2)
    reshard(source, tmp_path / "mg", to="megatron-dist", tp=2, pp=3, arguments=DIVISOR, durable=False)
    found = read(tmp_path / "mg")
    fused = weights["transformer.h.1.attn.c_attn.weight"].T.reshape(3, HEADS, HIDDEN // HEADS, HIDDEN)
    qkv = found["model.decoder.layers.self_attention.linear_qkv.weight"][1]
    np.testing.assert_array_equal(qkv, fused.swapaxes(0, 1).reshape(3 * HIDDEN, HIDDEN))
    biases = weights["transformer.h.1.attn.c_attn.bias"].reshape(3, HEADS, HIDDEN // HEADS)
    bias = found["model.decoder.layers.self_attention.linear_qkv.bias"][1]
    np.testing.assert_array_equal(bias, biases.swapaxes(0, 1).reshape(3 * HIDDEN))
    fc2 = found["model.decoder.layers.mlp.linear_fc2.weight"][2]
    np.testing.assert_array_equal(fc2, weights["transformer.h.2.mlp.c_proj.weight"].T)
    export(tmp_path / "mg", tmp_path / "back", durable=False)
    back = load_file(tmp_path / "back/model.safetensors")
    assert {fqn: (a.shape, a.tobytes()) for fqn, a in back.items()} == {
        fqn: (a.shape, a.tobytes()) for fqn, a in weights.items()
    }
    written = json.loads((tmp_path / "back/config.json").read_text())
    assert {key: written.get(key) for key in GPT2} == {**GPT2, "n_inner": 4 * HIDDEN}


def test_gpt2_of_other_sizes_is_refused(tmp_path: Path) -> None:
    """Columns that are no heads, and an activation that Megatron's arguments have no word for."""
    weights = gpt2_model()
    source = saved(tmp_path / "heads", weights, {**GPT2, "n_head": 5})
    with pytest.raises(LayoutError, match=r"c_attn\.(weight|bias): 48 rows are not 5 groups of sizes \[1, 1, 1\]"):
        reshard(source, tmp_path / "mg", to="megatron-dist", arguments=DIVISOR, durable=False)
    source = saved(tmp_path / "relu", weights, {**GPT2, "activation_function": "relu"})
    with pytest.raises(LayoutError, match="activation_function is 'relu', expected 'gelu_new'"):
        reshard(source, tmp_path / "mg", to="megatron-dist", arguments=DIVISOR, durable=False)


def test_phi3_is_llama_with_projections_in_one_tensor(tmp_path: Path) -> None:
    """Megatron has the same of either, shared keys and all; who asks for Phi-3 gets its names and config."""
    apart = model()
    weights = {name: array for name, array in apart.items() if not name.endswith(("q_proj.weight", "k_proj.weight"))}
    for n in range(LAYERS):
        attention, mlp = f"model.layers.{n}.self_attn.", f"model.layers.{n}.mlp."
        joined = [apart[f"{attention}{name}_proj.weight"] for name in "qkv"]
        weights[f"{attention}qkv_proj.weight"] = np.concatenate(joined)
        joined = [apart[f"{mlp}{name}_proj.weight"] for name in ("gate", "up")]
        weights[f"{mlp}gate_up_proj.weight"] = np.concatenate(joined)
        for name in (f"{attention}v_proj", f"{mlp}gate_proj", f"{mlp}up_proj"):
            del weights[f"{name}.weight"]
    config = config_of("phi3", partial_rotary_factor=0.5)
    reshard(saved(tmp_path / "phi", weights, config), tmp_path / "mg", to="megatron-dist", tp=2, durable=False)
    reshard(saved(tmp_path / "llama", apart, config_of("llama")), tmp_path / "same", to="megatron-dist", durable=False)
    found, expected = read(tmp_path / "mg"), read(tmp_path / "same")
    for name in ("self_attention.linear_qkv.weight", "mlp.linear_fc1.weight"):
        full = f"model.decoder.layers.{name}"
        np.testing.assert_array_equal(found[full], expected[full])
    export(tmp_path / "mg", tmp_path / "back", family="phi3", durable=False)
    back = load_file(tmp_path / "back/model.safetensors")
    assert {fqn: a.tobytes() for fqn, a in back.items()} == {fqn: a.tobytes() for fqn, a in weights.items()}
    written = json.loads((tmp_path / "back/config.json").read_text())
    assert {key: written.get(key) for key in config} == config
