"""Families whose layers are more than Llama's: norms behind attention, experts of a layer in one tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.convert.export import export
from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.errors import LayoutError
from tests.api.test_megatron_source import (
    DIVISOR,
    EXPERTS,
    HEAD_DIM,
    HIDDEN,
    LATENT,
    LAYERS,
    WIDTH,
    Arrays,
    config_of,
    latent_model,
    model,
    read,
    saved,
)

KINDS_OF_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": {"rope_local_base_freq": 10000.0},
}


@pytest.mark.parametrize("kind", GEMMA)
def test_norms_behind_attention_and_mlp(kind: str, tmp_path: Path) -> None:
    """Gemma 2 and 3: four norms a layer are where Megatron-Bridge has them; names alone tell them on the way back."""
    rng = np.random.default_rng(9)
    weights = model(tied=True)
    for layer in range(LAYERS):
        norms = {f"{name}_feedforward_layernorm": HIDDEN for name in ("pre", "post")}
        norms |= {"self_attn.q_norm": HEAD_DIM, "self_attn.k_norm": HEAD_DIM} if kind == "gemma3_text" else {}
        for name, size in norms.items():
            weights[f"model.layers.{layer}.{name}.weight"] = rng.normal(size=size).astype(np.float32)
    config = config_of(
        kind, tie_word_embeddings=True, query_pre_attn_scalar=6, sliding_window=8,
        hidden_activation="gelu_pytorch_tanh", layer_types=KINDS_OF_LAYERS, **GEMMA[kind],
    )  # fmt: skip
    source = saved(tmp_path / "hf", weights, config)
    reshard(source, tmp_path / "mg", to="megatron-dist", tp=2, pp=3, arguments=DIVISOR, durable=False)
    found = read(tmp_path / "mg")
    post = found["model.decoder.layers.self_attention.linear_proj.post_layernorm.weight"]
    for layer in range(LAYERS):
        assert post[layer].tobytes() == weights[f"model.layers.{layer}.post_attention_layernorm.weight"].tobytes()
    export(tmp_path / "mg", tmp_path / "back", durable=False)
    back = load_file(tmp_path / "back/model.safetensors")
    assert {fqn: a.tobytes() for fqn, a in back.items()} == {fqn: a.tobytes() for fqn, a in weights.items()}
    written = json.loads((tmp_path / "back/config.json").read_text())
    assert {key: written.get(key) for key in config} == config


def fused(weights: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """The same as transformers 5 has it while it runs: experts of a layer in one tensor, gates in front of ups."""
    found: dict[str, npt.NDArray[Any]] = {}
    experts: dict[str, dict[int, dict[str, npt.NDArray[Any]]]] = {}
    for name, array in weights.items():
        stem, is_expert, rest = name.replace("block_sparse_moe", "mlp").partition(".experts.")
        if not is_expert:
            found[stem] = array
            continue
        number, part, *_ = rest.split(".")
        experts.setdefault(stem, {}).setdefault(int(number), {})[part.removesuffix("_proj")] = array
    for stem, of_layer in experts.items():
        parts = [of_layer[number] for number in sorted(of_layer)]
        gate, up, down = ("w1", "w3", "w2") if "w1" in parts[0] else ("gate", "up", "down")
        found[f"{stem}.experts.gate_up_proj"] = np.stack([np.concatenate([own[gate], own[up]]) for own in parts])
        found[f"{stem}.experts.down_proj"] = np.stack([own[down] for own in parts])
    return found


@pytest.mark.parametrize(
    ("family", "weights", "config"),
    [
        (
            "mixtral",
            model(experts="mixtral"),
            config_of("mixtral", num_local_experts=EXPERTS, num_experts_per_tok=2),
        ),
        (
            "qwen_moe",
            model(experts="qwen"),
            config_of("qwen3_moe", num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=WIDTH),
        ),
        ("deepseek", latent_model(), config_of("deepseek_v3", **LATENT)),
    ],
    ids=["mixtral", "qwen_moe", "deepseek"],
)
def test_experts_of_a_layer_in_one_tensor(family: str, weights: Arrays, config: dict[str, Any], tmp_path: Path) -> None:
    """Names of transformers 5 in a running job, there and back: Megatron gets what it gets of single experts."""
    apart = saved(tmp_path / "apart", weights, config)
    joined = saved(tmp_path / "joined", fused(weights), config)
    options: dict[str, Any] = {"to": "megatron-dist", "tp": 2, "arguments": DIVISOR, "durable": False}
    reshard(apart, tmp_path / "one", **options)
    reshard(joined, tmp_path / "two", **options)
    expected, found = read(tmp_path / "one"), read(tmp_path / "two")
    assert {fqn: a.tobytes() for fqn, a in found.items()} == {fqn: a.tobytes() for fqn, a in expected.items()}
    export(tmp_path / "two", tmp_path / "back", family=f"{family}_fused", durable=False)
    back = load_file(tmp_path / "back/model.safetensors")
    assert {fqn: (a.shape, a.tobytes()) for fqn, a in back.items()} == {
        fqn: (a.shape, a.tobytes()) for fqn, a in fused(weights).items()
    }
    lacking = {
        name: array[:-1] if name.endswith("_proj") and array.ndim == 3 else array for name, array in back.items()
    }
    with pytest.raises(LayoutError, match=f"has {EXPERTS - 1} experts, .* says {EXPERTS}"):
        reshard(saved(tmp_path / "lacking", lacking, config), tmp_path / "none", **options)
    with pytest.raises(LayoutError, match=f"has {EXPERTS} experts, --fact experts=9 says 9"):
        export(tmp_path / "two", tmp_path / "none", family=f"{family}_fused", facts={"experts": 9}, durable=False)


def test_layers_for_multi_token_prediction(tmp_path: Path) -> None:
    """DeepSeek-V3 numbers them behind the others: they become Megatron's ``mtp.layers``, and the same files again."""
    weights = latent_model()
    rng = np.random.default_rng(7)
    stem = f"model.layers.{LAYERS - 1}."
    weights |= {
        f"{stem}{name}.weight": rng.normal(size=shape).astype(np.float32)
        for name, shape in (
            ("enorm", HIDDEN), ("hnorm", HIDDEN), ("shared_head.norm", HIDDEN), ("eh_proj", (HIDDEN, 2 * HIDDEN)),
        )
    }  # fmt: skip
    copies = {
        f"{stem}embed_tokens.weight": weights["model.embed_tokens.weight"],
        f"{stem}shared_head.head.weight": weights["lm_head.weight"],
    }
    config = config_of("deepseek_v3", **LATENT, num_nextn_predict_layers=1) | {"num_hidden_layers": LAYERS - 1}
    source = saved(tmp_path / "hf", {**weights, **copies}, config)
    result = reshard(source, tmp_path / "mg", to="megatron-dist", tp=2, arguments=DIVISOR, durable=False)
    assert {d.fqn for d in result.dropped} == set(copies)
    found = read(tmp_path / "mg")
    np.testing.assert_array_equal(found["model.mtp.layers.0.eh_proj.weight"], weights[f"{stem}eh_proj.weight"])
    inner = "model.mtp.layers.0.transformer_layer."
    assert found[f"{inner}mlp.experts.experts.linear_fc1.weight"].shape == (EXPERTS, 2 * WIDTH, HIDDEN)
    assert f"{inner}self_attention.linear_kv_up_proj.layer_norm_weight" in found
    with open_checkpoint(tmp_path / "mg") as checkpoint:
        args = next(blob.value.state for blob in checkpoint.load_blobs() if blob.fqn == "args")
    assert (args["num_layers"], args["mtp_num_layers"]) == (LAYERS - 1, 1)
    export(tmp_path / "mg", tmp_path / "back", durable=False)
    back = load_file(tmp_path / "back/model.safetensors")
    assert {fqn: a.tobytes() for fqn, a in back.items()} == {fqn: a.tobytes() for fqn, a in weights.items()}
    assert json.loads((tmp_path / "back/config.json").read_text())["num_nextn_predict_layers"] == 1
