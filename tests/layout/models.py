"""Names and shapes of tiny models, as Hugging Face and torchtitan save them: 3 layers, hidden size 16, 4 experts."""

from __future__ import annotations

Shapes = dict[str, tuple[int, ...]]

HIDDEN, INTER, VOCAB, LAYERS, EXPERTS, KV = 16, 24, 40, 3, 4, 8


def layered(layer: str, per_layer: Shapes, **others: tuple[int, ...]) -> Shapes:
    """Per-layer tensors of every layer and the others; ``__`` stands for a dot in keywords."""
    shapes = {f"{layer}.{i}.{name}": shape for i in range(LAYERS) for name, shape in per_layer.items()}
    return shapes | {name.replace("__", "."): shape for name, shape in others.items()}


def linear(name: str, out: int, inner: int, *, bias: bool = False) -> Shapes:
    """Weight, and bias, of a Linear."""
    return {f"{name}.weight": (out, inner)} | ({f"{name}.bias": (out,)} if bias else {})


def norms(*names: str, bias: bool = False) -> Shapes:
    """Weights, and biases, of norms."""
    return {f"{name}.{part}": (HIDDEN,) for name in names for part in (("weight", "bias") if bias else ("weight",))}


ATTENTION = (
    linear("self_attn.q_proj", HIDDEN, HIDDEN)
    | linear("self_attn.k_proj", KV, HIDDEN)
    | linear("self_attn.v_proj", KV, HIDDEN)
    | linear("self_attn.o_proj", HIDDEN, HIDDEN)
)
BIASES: Shapes = {"self_attn.q_proj.bias": (HIDDEN,), "self_attn.k_proj.bias": (KV,), "self_attn.v_proj.bias": (KV,)}
QK_NORMS: Shapes = {"self_attn.q_norm.weight": (4,), "self_attn.k_norm.weight": (4,)}
TWO_NORMS = norms("input_layernorm", "post_attention_layernorm")


def gated(prefix: str) -> Shapes:
    """A gated feed-forward of Llama's names."""
    return (
        linear(f"{prefix}.gate_proj", INTER, HIDDEN)
        | linear(f"{prefix}.up_proj", INTER, HIDDEN)
        | linear(f"{prefix}.down_proj", HIDDEN, INTER)
    )


def with_ends(per_layer: Shapes) -> Shapes:
    """The layers between Llama's embedding, norm and head."""
    return layered(
        "model.layers",
        per_layer,
        model__embed_tokens__weight=(VOCAB, HIDDEN),
        model__norm__weight=(HIDDEN,),
        lm_head__weight=(VOCAB, HIDDEN),
    )


def experts(pattern: str, column: tuple[str, ...], row: str) -> Shapes:
    """One tensor per expert and projection."""
    found: Shapes = {}
    for expert in range(EXPERTS):
        for name in column:
            found[f"{pattern}.{expert}.{name}.weight"] = (INTER, HIDDEN)
        found[f"{pattern}.{expert}.{row}.weight"] = (HIDDEN, INTER)
    return found


STACKED: Shapes = {
    "mlp.experts.gate_up_proj": (EXPERTS, 2 * INTER, HIDDEN),
    "mlp.experts.down_proj": (EXPERTS, HIDDEN, INTER),
    "mlp.gate.weight": (EXPERTS, HIDDEN),
}
ROUTED = experts("mlp.experts", ("gate_proj", "up_proj"), "down_proj") | linear("mlp.gate", EXPERTS, HIDDEN)
FOUR_FOLD = linear("mlp.dense_h_to_4h", 4 * HIDDEN, HIDDEN, bias=True) | linear(
    "mlp.dense_4h_to_h", HIDDEN, 4 * HIDDEN, bias=True
)
FUSED_ATTENTION = linear("self_attention.query_key_value", 3 * HIDDEN, HIDDEN, bias=True) | linear(
    "self_attention.dense", HIDDEN, HIDDEN, bias=True
)
LATENT = (
    linear("self_attn.q_a_proj", 6, HIDDEN)
    | {"self_attn.q_a_layernorm.weight": (6,)}
    | linear("self_attn.q_b_proj", HIDDEN, 6)
    | linear("self_attn.kv_a_proj_with_mqa", 5, HIDDEN)
    | {"self_attn.kv_a_layernorm.weight": (4,)}
    | linear("self_attn.kv_b_proj", HIDDEN, 4)
    | linear("self_attn.o_proj", HIDDEN, HIDDEN)
)

MODELS: dict[str, tuple[str, Shapes]] = {
    "llama": ("llama", with_ends(ATTENTION | gated("mlp") | TWO_NORMS)),
    "qwen2": ("llama", with_ends(ATTENTION | BIASES | gated("mlp") | TWO_NORMS)),
    "qwen3": ("llama", with_ends(ATTENTION | QK_NORMS | gated("mlp") | TWO_NORMS)),
    "gemma3": (
        "gemma",
        with_ends(
            ATTENTION
            | QK_NORMS
            | gated("mlp")
            | TWO_NORMS
            | norms("pre_feedforward_layernorm", "post_feedforward_layernorm")
        ),
    ),
    "mixtral": (
        "mixtral",
        with_ends(
            ATTENTION
            | TWO_NORMS
            | linear("block_sparse_moe.gate", EXPERTS, HIDDEN)
            | experts("block_sparse_moe.experts", ("w1", "w3"), "w2")
        ),
    ),
    "qwen2_moe": (
        "qwen_moe",
        with_ends(
            ATTENTION
            | BIASES
            | TWO_NORMS
            | ROUTED
            | gated("mlp.shared_expert")
            | linear("mlp.shared_expert_gate", 1, HIDDEN)
        ),
    ),
    "qwen3_moe": ("qwen_moe", with_ends(ATTENTION | QK_NORMS | TWO_NORMS | ROUTED)),
    "qwen3_moe_stacked": ("qwen_moe", with_ends(ATTENTION | QK_NORMS | TWO_NORMS | STACKED)),
    "deepseek_v3": (
        "deepseek",
        with_ends(
            LATENT | TWO_NORMS | ROUTED | {"mlp.gate.e_score_correction_bias": (EXPERTS,)} | gated("mlp.shared_experts")
        )
        | {"model.layers.0.mlp.gate_proj.weight": (INTER, HIDDEN), "model.layers.2.eh_proj.weight": (HIDDEN, 32)},
    ),
    "gpt2": (
        "gpt2",
        layered(
            "transformer.h",
            norms("ln_1", "ln_2", bias=True)
            | {
                "attn.c_attn.weight": (HIDDEN, 3 * HIDDEN),
                "attn.c_attn.bias": (3 * HIDDEN,),
                "attn.c_proj.weight": (HIDDEN, HIDDEN),
                "attn.c_proj.bias": (HIDDEN,),
                "mlp.c_fc.weight": (HIDDEN, 4 * HIDDEN),
                "mlp.c_fc.bias": (4 * HIDDEN,),
                "mlp.c_proj.weight": (4 * HIDDEN, HIDDEN),
                "mlp.c_proj.bias": (HIDDEN,),
            },
            transformer__wte__weight=(VOCAB, HIDDEN),
            transformer__wpe__weight=(20, HIDDEN),
            transformer__ln_f__weight=(HIDDEN,),
            transformer__ln_f__bias=(HIDDEN,),
        ),
    ),
    "neox": (
        "neox",
        layered(
            "gpt_neox.layers",
            norms("input_layernorm", "post_attention_layernorm", bias=True)
            | linear("attention.query_key_value", 3 * HIDDEN, HIDDEN, bias=True)
            | linear("attention.dense", HIDDEN, HIDDEN, bias=True)
            | FOUR_FOLD,
            gpt_neox__embed_in__weight=(VOCAB, HIDDEN),
            gpt_neox__final_layer_norm__weight=(HIDDEN,),
            gpt_neox__final_layer_norm__bias=(HIDDEN,),
            embed_out__weight=(VOCAB, HIDDEN),
        ),
    ),
    "falcon": (
        "falcon",
        layered(
            "transformer.h",
            norms("ln_attn", "ln_mlp", bias=True) | FUSED_ATTENTION | FOUR_FOLD,
            transformer__word_embeddings__weight=(VOCAB, HIDDEN),
            transformer__ln_f__weight=(HIDDEN,),
            transformer__ln_f__bias=(HIDDEN,),
            lm_head__weight=(VOCAB, HIDDEN),
        ),
    ),
    "bloom": (
        "bloom",
        layered(
            "transformer.h",
            norms("input_layernorm", "post_attention_layernorm", bias=True) | FUSED_ATTENTION | FOUR_FOLD,
            transformer__word_embeddings__weight=(VOCAB, HIDDEN),
            transformer__word_embeddings_layernorm__weight=(HIDDEN,),
            transformer__word_embeddings_layernorm__bias=(HIDDEN,),
            transformer__ln_f__weight=(HIDDEN,),
            transformer__ln_f__bias=(HIDDEN,),
        ),
    ),
    "opt": (
        "opt",
        layered(
            "model.decoder.layers",
            linear("self_attn.q_proj", HIDDEN, HIDDEN, bias=True)
            | linear("self_attn.k_proj", HIDDEN, HIDDEN, bias=True)
            | linear("self_attn.v_proj", HIDDEN, HIDDEN, bias=True)
            | linear("self_attn.out_proj", HIDDEN, HIDDEN, bias=True)
            | linear("fc1", INTER, HIDDEN, bias=True)
            | linear("fc2", HIDDEN, INTER, bias=True)
            | norms("self_attn_layer_norm", "final_layer_norm", bias=True),
            model__decoder__embed_tokens__weight=(VOCAB, HIDDEN),
            model__decoder__embed_positions__weight=(22, HIDDEN),
            model__decoder__final_layer_norm__weight=(HIDDEN,),
            model__decoder__final_layer_norm__bias=(HIDDEN,),
        ),
    ),
    "phi2": (
        "phi",
        layered(
            "model.layers",
            linear("self_attn.q_proj", HIDDEN, HIDDEN, bias=True)
            | linear("self_attn.k_proj", HIDDEN, HIDDEN, bias=True)
            | linear("self_attn.v_proj", HIDDEN, HIDDEN, bias=True)
            | linear("self_attn.dense", HIDDEN, HIDDEN, bias=True)
            | linear("mlp.fc1", INTER, HIDDEN, bias=True)
            | linear("mlp.fc2", HIDDEN, INTER, bias=True)
            | norms("input_layernorm", bias=True),
            model__embed_tokens__weight=(VOCAB, HIDDEN),
            model__final_layernorm__weight=(HIDDEN,),
            model__final_layernorm__bias=(HIDDEN,),
            lm_head__weight=(VOCAB, HIDDEN),
            lm_head__bias=(VOCAB,),
        ),
    ),
    "phi3": (
        "phi3",
        with_ends(
            linear("self_attn.qkv_proj", HIDDEN + 2 * KV, HIDDEN)
            | linear("self_attn.o_proj", HIDDEN, HIDDEN)
            | linear("mlp.gate_up_proj", 2 * INTER, HIDDEN)
            | linear("mlp.down_proj", HIDDEN, INTER)
            | TWO_NORMS
        ),
    ),
    "torchtitan": (
        "torchtitan",
        layered(
            "layers",
            linear("attention.wq", HIDDEN, HIDDEN)
            | linear("attention.wk", KV, HIDDEN)
            | linear("attention.wv", KV, HIDDEN)
            | linear("attention.wo", HIDDEN, HIDDEN)
            | linear("feed_forward.w1", INTER, HIDDEN)
            | linear("feed_forward.w2", HIDDEN, INTER)
            | linear("feed_forward.w3", INTER, HIDDEN)
            | norms("attention_norm", "ffn_norm"),
            tok_embeddings__weight=(VOCAB, HIDDEN),
            norm__weight=(HIDDEN,),
            output__weight=(VOCAB, HIDDEN),
        ),
    ),
    "torchtitan_moe": (
        "torchtitan",
        layered(
            "layers",
            linear("attention.wq", HIDDEN, HIDDEN)
            | linear("attention.wk", KV, HIDDEN)
            | linear("attention.wv", KV, HIDDEN)
            | linear("attention.wo", HIDDEN, HIDDEN)
            | {
                "moe.experts.w1": (EXPERTS, INTER, HIDDEN),
                "moe.experts.w2": (EXPERTS, HIDDEN, INTER),
                "moe.experts.w3": (EXPERTS, INTER, HIDDEN),
                "moe.router.gate.weight": (EXPERTS, HIDDEN),
                "moe.expert_bias": (EXPERTS,),
            }
            | linear("moe.shared_experts.w1", INTER, HIDDEN)
            | linear("moe.shared_experts.w2", HIDDEN, INTER)
            | norms("attention_norm", "ffn_norm"),
            tok_embeddings__weight=(VOCAB, HIDDEN),
            norm__weight=(HIDDEN,),
            output__weight=(VOCAB, HIDDEN),
        ),
    ),
}
"""By model: its family, and its tensors."""
