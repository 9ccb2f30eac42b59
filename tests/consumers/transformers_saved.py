"""Run by a python with transformers: small models of some types with random weights, saved in two ways each.

``transformers_saved.py FOLDER TYPE ...`` writes ``FOLDER/TYPE`` by ``save_pretrained`` and ``FOLDER/TYPE.pt``, the
state dict by ``torch.save``.
"""

SMALL = {
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "intermediate_size": 64, "ffn_dim": 64, "n_inner": 64, "d_ff": 64,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "shared_intermediate_size": 16,
    "intermediate_size_mlp": 64, "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2,
    "num_decoder_layers": 2, "encoder_layers": 2, "decoder_layers": 2, "num_attention_heads": 4, "n_head": 4,
    "n_heads": 4, "num_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8, "vocab_size": 64,
    "max_position_embeddings": 64, "n_positions": 64, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_num_experts": 4, "kv_lora_rank": 8, "q_lora_rank": 8,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1, "pad_token_id": 0,
    "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "rotary_dim": 4,
}  # fmt: skip

if __name__ == "__main__":
    import sys

    import torch
    import transformers  # type: ignore[import-not-found]
    from transformers.models.auto import modeling_auto  # type: ignore[import-not-found]

    names = {
        **modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        **modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    }
    folder, *types = sys.argv[1:]
    for model_type in types:
        config_class = transformers.CONFIG_MAPPING[model_type]
        usual = config_class()
        config = config_class(**{key: n for key, n in SMALL.items() if getattr(usual, key, None) is not None})
        torch.manual_seed(0)
        model = getattr(transformers, names[model_type])(config).to(torch.bfloat16)
        model.save_pretrained(f"{folder}/{model_type}")
        torch.save(model.state_dict(), f"{folder}/{model_type}.pt")
