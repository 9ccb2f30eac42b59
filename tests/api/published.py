"""Small models with experts: their tensors as transformers 5 has them in memory, and as it publishes them."""

from __future__ import annotations

import torch

Tensors = dict[str, torch.Tensor]

N_LAYERS, N_EXPERTS, HIDDEN, INTER = 2, 3, 8, 6


def model(kind: str) -> tuple[Tensors, Tensors]:
    """The same weights under the names of both: of ``qwen3_moe``, ``mixtral``, ``deepseek_v3``, ``glm4_moe`` ..."""
    torch.manual_seed(0)
    same = {name: torch.randn(16, HIDDEN) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    memory, published = Tensors(), Tensors()
    for layer in range(N_LAYERS):
        front = f"model.layers.{layer}"
        for name in _attention(kind):
            same[f"{front}.self_attn.{name}"] = torch.randn(HIDDEN, HIDDEN)
        same[f"{front}.input_layernorm.weight"] = torch.randn(HIDDEN)
        gate_up, down = torch.randn(N_EXPERTS, 2 * INTER, HIDDEN), torch.randn(N_EXPERTS, HIDDEN, INTER)
        router = torch.randn(N_EXPERTS, HIDDEN)
        block, gate, up, end = (
            ("block_sparse_moe", "w1", "w3", "w2")
            if kind == "mixtral"
            else ("mlp", "gate_proj", "up_proj", "down_proj")
        )
        memory[f"{front}.mlp.experts.gate_up_proj"], memory[f"{front}.mlp.experts.down_proj"] = gate_up, down
        memory[f"{front}.mlp.gate.weight"] = published[f"{front}.{block}.gate.weight"] = router
        if kind == "gpt_oss":
            same[f"{front}.mlp.experts.gate_up_proj_bias"] = torch.randn(N_EXPERTS, 2 * INTER)
            published |= {name: memory[name] for name in memory if name.startswith(f"{front}.mlp.experts")}
            continue
        for expert in range(N_EXPERTS):
            own = f"{front}.{block}.experts.{expert}"
            published[f"{own}.{gate}.weight"] = gate_up[expert, :INTER].clone()
            published[f"{own}.{up}.weight"] = gate_up[expert, INTER:].clone()
            published[f"{own}.{end}.weight"] = down[expert].clone()
        if kind in ("deepseek_v3", "glm4_moe"):
            same[f"{front}.mlp.gate.e_score_correction_bias"] = torch.randn(N_EXPERTS)
    return {**same, **memory}, {**same, **published}


def _attention(kind: str) -> tuple[str, ...]:
    plain = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")
    own = {"qwen3_moe": ("q_norm.weight",), "deepseek_v3": ("kv_a_proj_with_mqa.weight",)}
    return (*plain, *own.get(kind, ()))
