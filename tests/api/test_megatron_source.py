"""Hugging Face's models under Megatron's names, and vocabularies padded for the target: numpy's own values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file, save_file

from ckpt_tool.api.arguments import parse_arguments
from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.convert.export import export
from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.errors import LayoutError, UsageError
from tests.formats.megatron.places import CHECKPOINTS

Arrays = dict[str, npt.NDArray[np.float32]]
HIDDEN, HEADS, GROUPS, HEAD_DIM, WIDTH, LAYERS, VOCAB, EXPERTS = 16, 8, 2, 6, 20, 3, 21, 4
DIVISOR = {"make_vocab_size_divisible_by": 2}


def config_of(kind: str, **more: Any) -> dict[str, Any]:
    """A config for the sizes above."""
    return {
        "model_type": kind, "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": WIDTH,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS,
        "head_dim": HEAD_DIM, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 64, **more,
    }  # fmt: skip


def model(*, experts: str = "", bias: bool = False, tied: bool = False) -> Arrays:
    """A random model under Hugging Face's names; ``experts`` is Mixtral's or Qwen's spelling."""
    rng = np.random.default_rng(3)
    attention = "self_attn."
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (HIDDEN,), "post_attention_layernorm.weight": (HIDDEN,),
        f"{attention}o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
    }  # fmt: skip
    for name, heads in (("q", HEADS), ("k", GROUPS), ("v", GROUPS)):
        layer[f"{attention}{name}_proj.weight"] = (heads * HEAD_DIM, HIDDEN)
        if bias:
            layer[f"{attention}{name}_proj.bias"] = (heads * HEAD_DIM,)
    gate, up, down = ("w1", "w3", "w2") if experts == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    places = ["mlp."]
    if experts:
        stem = "block_sparse_moe." if experts == "mixtral" else "mlp."
        layer[f"{stem}gate.weight"] = (EXPERTS, HIDDEN)
        places = [f"{stem}experts.{number}." for number in range(EXPERTS)]
    for place in places:
        layer |= {f"{place}{name}.weight": (WIDTH, HIDDEN) for name in (gate, up)}
        layer[f"{place}{down}.weight"] = (HIDDEN, WIDTH)
    shapes = {f"model.layers.{n}.{key}": shape for n in range(LAYERS) for key, shape in layer.items()}
    shapes |= {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def saved(folder: Path, weights: Mapping[str, npt.NDArray[Any]], config: Mapping[str, Any] | None) -> Path:
    """A folder as ``save_pretrained`` writes it."""
    folder.mkdir()
    save_file(dict(weights), folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def read(root: Path) -> dict[str, npt.NDArray[Any]]:
    """All tensors of a checkpoint."""
    with open_checkpoint(root) as checkpoint:
        return {fqn: view.numpy() for fqn, view in checkpoint.items()}


def latent_model() -> Arrays:
    """DeepSeek's: latent attention, a dense layer, then experts with a shared one."""
    rng = np.random.default_rng(5)
    latent, rope = 10, 4
    for_layers: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (HIDDEN,), "post_attention_layernorm.weight": (HIDDEN,),
        "self_attn.q_a_proj.weight": (latent, HIDDEN), "self_attn.q_a_layernorm.weight": (latent,),
        "self_attn.q_b_proj.weight": (HEADS * (HEAD_DIM + rope), latent),
        "self_attn.kv_a_proj_with_mqa.weight": (latent + rope, HIDDEN), "self_attn.kv_a_layernorm.weight": (latent,),
        "self_attn.kv_b_proj.weight": (HEADS * 2 * HEAD_DIM, latent),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN),
    }  # fmt: skip
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}."
        shapes |= {f"{stem}{key}": shape for key, shape in for_layers.items()}
        places = [f"{stem}mlp."]
        if layer:
            shapes[f"{stem}mlp.gate.weight"] = (EXPERTS, HIDDEN)
            shapes[f"{stem}mlp.gate.e_score_correction_bias"] = (EXPERTS,)
            places = [f"{stem}mlp.experts.{e}." for e in range(EXPERTS)] + [f"{stem}mlp.shared_experts."]
        for place in places:
            shapes |= {f"{place}{name}_proj.weight": (WIDTH, HIDDEN) for name in ("gate", "up")}
            shapes[f"{place}down_proj.weight"] = (HIDDEN, WIDTH)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def neox_model() -> Arrays:
    """GPT-NeoX's: biases everywhere, queries, key and value head by head, no gate."""
    rng = np.random.default_rng(6)
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
        "attention.query_key_value": (3 * HIDDEN, HIDDEN), "attention.dense": (HIDDEN, HIDDEN),
        "mlp.dense_h_to_4h": (WIDTH, HIDDEN), "mlp.dense_4h_to_h": (HIDDEN, WIDTH),
    }  # fmt: skip
    shapes = {f"gpt_neox.layers.{n}.{key}.weight": shape for n in range(LAYERS) for key, shape in layer.items()}
    shapes["gpt_neox.final_layer_norm.weight"] = (HIDDEN,)
    shapes |= {name.replace(".weight", ".bias"): shape[:1] for name, shape in shapes.items()}
    shapes |= dict.fromkeys(("gpt_neox.embed_in.weight", "embed_out.weight"), (VOCAB, HIDDEN))
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


LATENT = {
    "num_key_value_heads": HEADS, "q_lora_rank": 10, "kv_lora_rank": 10, "qk_nope_head_dim": HEAD_DIM,
    "qk_rope_head_dim": 4, "v_head_dim": HEAD_DIM, "n_routed_experts": EXPERTS, "num_experts_per_tok": 2,
    "moe_intermediate_size": WIDTH, "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
    "n_group": 2, "topk_group": 1, "norm_topk_prob": True,
}  # fmt: skip


def test_models_whose_layers_differ(tmp_path: Path) -> None:
    """A dense layer first: layers have names of their own, experts are stacked; all comes back, config included."""
    weights, config = latent_model(), config_of("deepseek_v3", **LATENT)
    source = saved(tmp_path / "hf", weights, config)
    reshard(source, tmp_path / "mg", to="megatron-dist", tp=2, pp=3, arguments=DIVISOR, durable=False)
    found = read(tmp_path / "mg")
    assert found["model.decoder.layers.1.mlp.experts.experts.linear_fc1.weight"].shape == (EXPERTS, 2 * WIDTH, HIDDEN)
    assert "model.decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in found
    assert "model.decoder.layers.1.pre_mlp_layernorm.weight" in found
    export(tmp_path / "mg", tmp_path / "back", durable=False)
    back = load_file(tmp_path / "back/model.safetensors")
    assert {fqn: a.tobytes() for fqn, a in back.items()} == {fqn: a.tobytes() for fqn, a in weights.items()}
    written = json.loads((tmp_path / "back/config.json").read_text())
    del config["head_dim"]
    assert {key: written.get(key) for key in config} == config


def test_heads_side_by_side_stay_so(tmp_path: Path) -> None:
    """GPT-NeoX's fused rows are Megatron's; biases go along; the local spec has other names for DeepSeek's norms."""
    weights = neox_model()
    config = {**config_of("gpt_neox", use_parallel_residual=False, rotary_pct=0.5), "layer_norm_eps": 1e-6}
    source = saved(tmp_path / "hf", weights, config)
    reshard(source, tmp_path / "mg", to="megatron-dist", tp=2, arguments=DIVISOR, durable=False)
    qkv = read(tmp_path / "mg")["model.decoder.layers.self_attention.linear_qkv.weight"]
    np.testing.assert_array_equal(qkv[1], weights["gpt_neox.layers.1.attention.query_key_value.weight"])
    export(tmp_path / "mg", tmp_path / "back", durable=False)
    back = load_file(tmp_path / "back/model.safetensors")
    assert {fqn: a.tobytes() for fqn, a in back.items()} == {fqn: a.tobytes() for fqn, a in weights.items()}
    written = json.loads((tmp_path / "back/config.json").read_text())
    assert (written["rotary_pct"], written["layer_norm_eps"], written["model_type"]) == (0.5, 1e-6, "gpt_neox")
    local = {**DIVISOR, "transformer_impl": "local"}
    source = saved(tmp_path / "latent", latent_model(), config_of("deepseek_v3", **LATENT))
    reshard(source, tmp_path / "local", to="megatron-dist", arguments=local, durable=False)
    names = read(tmp_path / "local")
    assert "model.decoder.layers.0.pre_mlp_layernorm.weight" in names
    assert "model.decoder.layers.0.self_attention.kv_layernorm.weight" in names


def starcoder2_model() -> Arrays:
    """StarCoder2's: queries, keys and values apart, groups of heads, biases everywhere, no gate."""
    rng = np.random.default_rng(7)
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "self_attn.k_proj": (GROUPS * HEAD_DIM, HIDDEN), "self_attn.v_proj": (GROUPS * HEAD_DIM, HIDDEN),
        "mlp.c_fc": (WIDTH, HIDDEN), "mlp.c_proj": (HIDDEN, WIDTH),
    }  # fmt: skip
    shapes = {f"model.layers.{n}.{key}.weight": shape for n in range(LAYERS) for key, shape in layer.items()}
    shapes["model.norm.weight"] = (HIDDEN,)
    shapes |= {name.replace(".weight", ".bias"): shape[:1] for name, shape in shapes.items()}
    shapes |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (VOCAB, HIDDEN))
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def test_starcoder2_is_not_taken_for_gpt_neox(tmp_path: Path) -> None:
    """Their names in Megatron are the same: shared keys tell, and who asks for it gets all back, config included."""
    weights = starcoder2_model()
    config = config_of("starcoder2", norm_epsilon=1e-6, sliding_window=7, tie_word_embeddings=False)
    del config["rms_norm_eps"]
    source = saved(tmp_path / "hf", weights, config)
    reshard(source, tmp_path / "mg", to="megatron-dist", tp=2, arguments=DIVISOR, durable=False)
    qkv = read(tmp_path / "mg")["model.decoder.layers.self_attention.linear_qkv.bias"][1]
    per_group = HEADS // GROUPS * HEAD_DIM
    np.testing.assert_array_equal(qkv[:per_group], weights["model.layers.1.self_attn.q_proj.bias"][:per_group])
    np.testing.assert_array_equal(
        qkv[per_group : per_group + HEAD_DIM], weights["model.layers.1.self_attn.k_proj.bias"][:HEAD_DIM]
    )
    with pytest.raises(LayoutError, match=r"has 72 rows, but .*linear_proj\.weight .* says 144: .*--family starcoder2"):
        export(tmp_path / "mg", tmp_path / "guess", durable=False)
    assert not (tmp_path / "guess").exists()
    export(tmp_path / "mg", tmp_path / "back", family="starcoder2", durable=False)
    back = load_file(tmp_path / "back/model.safetensors")
    assert {fqn: a.tobytes() for fqn, a in back.items()} == {fqn: a.tobytes() for fqn, a in weights.items()}
    written = json.loads((tmp_path / "back/config.json").read_text())
    assert {key: written.get(key) for key in config} == config


def test_config_is_made_of_the_arguments_where_they_suffice(tmp_path: Path) -> None:
    """From a run of real Megatron; where arguments contradict the family or are missing, a note says which."""
    source = CHECKPOINTS / "td_full_t2p2d2/ckpt"
    result = export(source, tmp_path / "out", true_vocab=100, durable=False)
    written = json.loads((tmp_path / "out/config.json").read_text())
    expected = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 100,
        "rms_norm_eps": 1e-5, "rope_theta": 10000, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    }  # fmt: skip
    assert {key: written.get(key) for key in expected} == expected
    assert any("for model_type llama (mistral would fit as well)" in note for note in result.notes)
    part = export(source, tmp_path / "part", include=["model.*"], durable=False)
    assert not (tmp_path / "part/config.json").exists()
    assert not any("config.json" in note for note in part.notes)
    unknown = export(
        CHECKPOINTS / "old012_fsms_t2p1d2/ckpt", tmp_path / "old", facts={"heads": 4, "kv_heads": 2}, durable=False
    )
    assert any("no config.json is written: the checkpoint does not tell args." in note for note in unknown.notes)


MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "qwen2, tied": ("qwen2", {"bias": True, "tied": True}, {"tie_word_embeddings": True}),
    "mixtral": ("mixtral", {"experts": "mixtral"}, {"num_local_experts": EXPERTS, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "qwen3_moe",
        {"experts": "qwen"},
        {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_to_megatron_and_back(name: str, tmp_path: Path) -> None:
    """More tensor-parallel ranks than KV groups, and stages: every weight comes back bit for bit, no other does."""
    kind, options, more = MODELS[name]
    weights = model(**options)
    source = saved(tmp_path / "hf", weights, config_of(kind, **more))
    reshard(source, tmp_path / "mg", to="megatron-dist", tp=4, pp=3, arguments=DIVISOR, durable=False)
    export(
        tmp_path / "mg",
        tmp_path / "back",
        family={"mixtral": "mixtral", "qwen3_moe": "qwen_moe"}.get(kind, "auto"),
        durable=False,
    )
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert set(found) == set(weights)
    assert all(found[fqn].tobytes() == weight.tobytes() for fqn, weight in weights.items())


def test_fused_weights_are_megatrons(tmp_path: Path) -> None:
    """Queries, key and value by KV group; gate over up; layers and experts stacked; zeros behind the vocabulary."""
    weights = model(experts="mixtral")
    source = saved(tmp_path / "hf", weights, config_of("mixtral", num_local_experts=EXPERTS, num_experts_per_tok=2))
    reshard(source, tmp_path / "mg", to="megatron-dist", tp=2, arguments=DIVISOR, durable=False)
    found = read(tmp_path / "mg")
    qkv, fc1 = [], []
    for layer in range(LAYERS):
        parts = (weights[f"model.layers.{layer}.self_attn.{name}_proj.weight"] for name in "qkv")
        split = [part.reshape(GROUPS, -1, HEAD_DIM, HIDDEN) for part in parts]
        qkv.append(np.concatenate(split, axis=1).reshape(-1, HIDDEN))
        stem = f"model.layers.{layer}.block_sparse_moe.experts"
        pairs = [[weights[f"{stem}.{e}.{name}.weight"] for name in ("w1", "w3")] for e in range(EXPERTS)]
        fc1.append(np.stack([np.concatenate(pair) for pair in pairs]))
    layers = "model.decoder.layers."
    np.testing.assert_array_equal(found[f"{layers}self_attention.linear_qkv.weight"], np.stack(qkv))
    np.testing.assert_array_equal(found[f"{layers}mlp.experts.experts.linear_fc1.weight"], np.stack(fc1))
    assert f"{layers}pre_mlp_layernorm.weight" in found
    embedding = found["model.embedding.word_embeddings.weight"]
    assert embedding.shape == (24, HIDDEN)
    np.testing.assert_array_equal(embedding[:VOCAB], weights["model.embed_tokens.weight"])
    assert not embedding[VOCAB:].any()


def test_arguments_come_from_the_config(tmp_path: Path) -> None:
    """Head counts, norms and padding stand in the arguments; what the user says goes before the config."""
    source = saved(tmp_path / "hf", model(), config_of("llama", rope_theta=5e5))
    said = {**DIVISOR, "rotary_base": 7.0, "transformer_impl": "local"}
    reshard(source, tmp_path / "mg", to="megatron-dist", tp=2, pp=3, arguments=said, durable=False)
    with open_checkpoint(tmp_path / "mg") as checkpoint:
        args = next(blob.value.state for blob in checkpoint.load_blobs() if blob.fqn == "args")
        keys = {blob.fqn for blob in checkpoint.manifest.blobs if "_extra_state" in blob.fqn}
    expected = {
        "num_layers": LAYERS, "num_query_groups": GROUPS, "group_query_attention": True, "kv_channels": HEAD_DIM,
        "swiglu": True, "add_qkv_bias": False, "rotary_base": 7.0, "vocab_size": VOCAB, "padded_vocab_size": 24,
        "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 3, "no_save_optim": True, "no_save_rng": True,
        "untie_embeddings_and_output_weights": True, "normalization": "RMSNorm", "layernorm_epsilon": 1e-5,
    }  # fmt: skip
    assert {name: args.get(name) for name in expected} == expected
    assert (tmp_path / "mg/latest_checkpointed_iteration.txt").read_text() == "release"
    stem = "model.decoder.layers.self_attention.linear_qkv._extra_state/shard_"
    assert {key for key in keys if key.startswith(stem)} == {f"{stem}{layer}_{LAYERS}" for layer in range(LAYERS)}


def test_what_cannot_be_told_is_refused(tmp_path: Path) -> None:
    """No config, an unknown model, a missing part, another head count: each names the fact, and nothing is written."""
    weights = model()
    folders = {
        "neither args": saved(tmp_path / "a", weights, None),
        "model_type 'sphinx'": saved(tmp_path / "b", weights, config_of("sphinx")),
        r"its part 'k' is missing": saved(
            tmp_path / "c",
            {fqn: weight for fqn, weight in weights.items() if fqn != "model.layers.1.self_attn.k_proj.weight"},
            config_of("llama"),
        ),
        "are not 4 groups": saved(tmp_path / "d", weights, config_of("llama", num_key_value_heads=4)),
        "1 layer is missing": saved(tmp_path / "e", weights, config_of("llama", num_hidden_layers=4)),
        "has no place for 1 of": saved(
            tmp_path / "f", {**weights, "model.odd.weight": np.ones(2, np.float32)}, config_of("llama")
        ),
        "attention_bias is True": saved(tmp_path / "g", weights, config_of("llama", attention_bias=True)),
        "more than the 20": saved(tmp_path / "h", weights, config_of("llama", vocab_size=19)),
    }
    for message, folder in folders.items():
        with pytest.raises(LayoutError, match=message):
            reshard(folder, tmp_path / "out", to="megatron-dist", arguments=DIVISOR)
    assert not (tmp_path / "out").exists()


def test_a_config_can_be_given(tmp_path: Path) -> None:
    """``--config`` is for weights without one beside them."""
    source = saved(tmp_path / "hf", model(), None)
    (tmp_path / "other.json").write_text(json.dumps(config_of("llama")))
    reshard(source, tmp_path / "mg", to="megatron-dist", config=tmp_path / "other.json", durable=False)
    assert read(tmp_path / "mg")["model.output_layer.weight"].shape == (128, HIDDEN)
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(UsageError, match="expected a JSON object"):
        reshard(source, tmp_path / "no", to="megatron-dist", config=tmp_path / "bad.json")


def test_a_tied_output_layer_that_is_stored_is_left_out(tmp_path: Path) -> None:
    """Megatron has none where the embedding is tied; the report says so."""
    source = saved(tmp_path / "hf", model(), config_of("llama", tie_word_embeddings=True))
    result = reshard(source, tmp_path / "mg", to="megatron-dist", durable=False)
    assert "model.output_layer.weight" not in read(tmp_path / "mg")
    assert [d.why for d in result.dropped if d.fqn == "lm_head.weight"] == [
        "the config says that it is tied to the embedding"
    ]


def test_a_vocabulary_that_args_do_not_explain_keeps_its_rows(tmp_path: Path) -> None:
    """Rows are dropped only where the arguments prove that they are padding; else a note says what Megatron does."""
    source = CHECKPOINTS / "td_full_t2p2d2/ckpt"
    result = reshard(source, tmp_path / "out", to="megatron-dist", tp=1, arguments={"vocab_size": 55}, durable=False)
    assert read(tmp_path / "out")["model.output_layer.weight"].shape == (112, 32)
    assert any("keeps its 112 rows" in note for note in result.notes)
    wider = reshard(source, tmp_path / "wide", to="megatron-dist", tp=8, arguments={"vocab_size": 55}, durable=False)
    assert read(tmp_path / "wide")["optimizer.state.exp_avg.output_layer.weight"].shape == (128, 32)
    assert any("16 rows of zeros" in note for note in wider.notes)


def test_arguments_are_json_or_text() -> None:
    """As they are typed."""
    assert parse_arguments(["a=1", "b=x", "c=[1]", "d=null"]) == {"a": 1, "b": "x", "c": [1], "d": None}
    with pytest.raises(UsageError, match="NAME=VALUE"):
        parse_arguments(["a"])
