"""transformers runs what was exported from Megatron and torchtitan: strict loading, and the logits of the source.

The reference is a plain forward pass over the source's own tensors, in its own order of rows, after Megatron's and
Meta's descriptions. Needs ``CKPT_PEER_TRANSFORMERS``, the python of an environment with transformers and torch.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file

from ckpt_tool.api.convert.export import export
from tests.formats.megatron.build import DistWriter, common_state
from tests.formats.megatron.places import CHECKPOINTS
from tests.formats.megatron.run import Run

pytestmark = pytest.mark.peer

Arrays = dict[str, npt.NDArray[np.float32]]
HIDDEN, HEADS, GROUPS, HEAD_DIM, WIDTH, LAYERS, VOCAB = 16, 4, 2, 6, 20, 3, 21

FORWARD = """
import json, sys, torch
from safetensors.torch import load_file
from torch.nn.functional import silu, softmax
from transformers import AutoModelForCausalLM

folder, source, kind, heads, groups, head_dim = sys.argv[1:4] + [int(word) for word in sys.argv[4:]]
model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
w = {k: v.float() for k, v in load_file(source).items()}
ids = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
n, r = len(ids), heads // groups
frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2).float() / head_dim)
angles = torch.outer(torch.arange(n).float(), frequencies)[:, None]

def norm(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight

def turned_halves(x):  # Megatron without rotary_interleaved
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)

def turned_pairs(x):  # Meta, torchtitan: a complex number is two neighbours
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)

def attended(q, k, v):
    k, v = k.repeat_interleave(r, 1), v.repeat_interleave(r, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / head_dim**0.5
    scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf"))
    return torch.einsum("hqk,khd->qhd", softmax(scores, -1), v).reshape(n, -1)

def gated(x, fused, down):
    gate, up = (x @ fused.T).chunk(2, -1)
    return (silu(gate) * up) @ down.T

def megatron():
    x = w["embedding.word_embeddings.weight"][ids]
    layer = {k.removeprefix("decoder.layers."): v for k, v in w.items() if k.startswith("decoder.layers.")}
    for number in range(len(layer["self_attention.linear_qkv.weight"])):
        p = {k: v[number] for k, v in layer.items()}
        mixed = norm(x, p["self_attention.linear_qkv.layer_norm_weight"]) @ p["self_attention.linear_qkv.weight"].T
        mixed = mixed + p.get("self_attention.linear_qkv.bias", 0)
        q, k, v = mixed.view(n, groups, (r + 2) * head_dim).split([r * head_dim, head_dim, head_dim], -1)
        q = q.reshape(n, heads, head_dim)
        if "self_attention.q_layernorm.weight" in p:
            q, k = norm(q, p["self_attention.q_layernorm.weight"]), norm(k, p["self_attention.k_layernorm.weight"])
        x = x + attended(turned_halves(q), turned_halves(k), v) @ p["self_attention.linear_proj.weight"].T
        if "mlp.router.weight" not in p:
            h = norm(x, p["mlp.linear_fc1.layer_norm_weight"])
            x = x + gated(h, p["mlp.linear_fc1.weight"], p["mlp.linear_fc2.weight"])
            continue
        h = norm(x, p.get("pre_mlp_layernorm.weight", p.get("mlp.linear_fc1.layer_norm_weight")))
        chances, chosen = softmax(h @ p["mlp.router.weight"].T, -1).topk(2, -1)
        chances = chances / chances.sum(-1, keepdim=True)
        fused, down = (p[f"mlp.experts.experts.linear_fc{i}.weight"] for i in (1, 2))
        for at in range(n):
            for chance, expert in zip(chances[at], chosen[at]):
                x[at] += chance * gated(h[at], fused[expert], down[expert])
        if "mlp.shared_experts.linear_fc1.weight" in p:
            shared = gated(h, p["mlp.shared_experts.linear_fc1.weight"], p["mlp.shared_experts.linear_fc2.weight"])
            x = x + torch.sigmoid(h @ p["mlp.shared_experts.gate_weight"].T) * shared
    x = norm(x, w["decoder.final_layernorm.weight"])
    return x @ w.get("output_layer.weight", w["embedding.word_embeddings.weight"]).T

def titan():
    x = w["tok_embeddings.weight"][ids]
    for number in range(sum(k.endswith("attention.wq.weight") for k in w)):
        p = {k.removeprefix(f"layers.{number}."): v for k, v in w.items()}
        h = norm(x, p["attention_norm.weight"])
        q, k, v = ((h @ p[f"attention.w{s}.weight"].T).view(n, -1, head_dim) for s in "qkv")
        x = x + attended(turned_pairs(q), turned_pairs(k), v) @ p["attention.wo.weight"].T
        fused = torch.cat([p["feed_forward.w1.weight"], p["feed_forward.w3.weight"]])
        x = x + gated(norm(x, p["ffn_norm.weight"]), fused, p["feed_forward.w2.weight"])
    return norm(x, w["norm.weight"]) @ w["output.weight"].T

with torch.no_grad():
    expected = (megatron if kind == "megatron" else titan)()[:, : model.config.vocab_size]
    found = model(ids[None]).logits[0]
print(json.dumps([{k: sorted(map(str, v)) for k, v in info.items()}, (found - expected).abs().max().item(),
                  expected.std().item()]))
"""


def assert_runs(folder: Path, source: Path, kind: str, config: dict[str, Any]) -> None:
    """No key is missing, unexpected or of another shape, and the logits are those of the source's own tensors."""
    (folder / "config.json").write_text(json.dumps(config))
    shape = [config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]]
    command = [os.environ["CKPT_PEER_TRANSFORMERS"], "-c", FORWARD, folder, source, kind, *shape]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    info, difference, spread = json.loads(done.stdout.splitlines()[-1])
    assert all(not found for found in info.values()), info
    assert difference < 1e-4 * spread


def config_of(kind: str, architecture: str, **more: Any) -> dict[str, Any]:
    """A config for the sizes above."""
    return {
        "model_type": kind, "architectures": [architecture], "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS, "head_dim": HEAD_DIM, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "max_position_embeddings": 64, "tie_word_embeddings": False, **more,
    }  # fmt: skip


def values(rng: np.random.Generator, *shape: int) -> npt.NDArray[np.float32]:
    """Values about as large as trained ones."""
    scale = shape[-1] ** -0.5 if len(shape) > 1 else 1.0
    return (rng.normal(size=shape) * scale).astype(np.float32)


def megatron_weights(
    *, bias: bool = False, head_norms: bool = False, experts: int = 0, shared: int = 0, head_dim: int = HEAD_DIM
) -> Arrays:
    """A random model under Megatron's keys, its vocabulary padded with zeros."""
    rng = np.random.default_rng(7)
    rows, attention = (HEADS + 2 * GROUPS) * head_dim, "self_attention."
    layer: dict[str, tuple[int, ...]] = {
        f"{attention}linear_qkv.layer_norm_weight": (HIDDEN,), f"{attention}linear_qkv.weight": (rows, HIDDEN),
        f"{attention}linear_proj.weight": (HIDDEN, HEADS * head_dim),
    }  # fmt: skip
    if bias:
        layer[f"{attention}linear_qkv.bias"] = (rows,)
    if head_norms:
        layer |= {f"{attention}{name}_layernorm.weight": (head_dim,) for name in "qk"}
    if not experts:
        layer["mlp.linear_fc1.layer_norm_weight"] = (HIDDEN,)
        layer |= {"mlp.linear_fc1.weight": (2 * WIDTH, HIDDEN), "mlp.linear_fc2.weight": (HIDDEN, WIDTH)}
    else:
        layer |= {"pre_mlp_layernorm.weight": (HIDDEN,), "mlp.router.weight": (experts, HIDDEN)}
        layer["mlp.experts.experts.linear_fc1.weight"] = (experts, 2 * WIDTH, HIDDEN)
        layer["mlp.experts.experts.linear_fc2.weight"] = (experts, HIDDEN, WIDTH)
    if shared:
        layer["mlp.shared_experts.linear_fc1.weight"] = (2 * shared, HIDDEN)
        layer["mlp.shared_experts.linear_fc2.weight"] = (HIDDEN, shared)
        layer["mlp.shared_experts.gate_weight"] = (1, HIDDEN)
    weights = {f"decoder.layers.{key}": values(rng, LAYERS, *shape) for key, shape in layer.items()}
    weights["decoder.final_layernorm.weight"] = values(rng, HIDDEN)
    for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
        weights[key] = np.pad(values(rng, VOCAB, HIDDEN), ((0, 24 - VOCAB), (0, 0)))
    return weights


def saved(folder: Path, weights: Arrays, head_dim: int = HEAD_DIM, experts: int = 0) -> Path:
    """A ``torch_dist`` checkpoint of 2 tensor-parallel ranks, that cut fused attention by rows."""
    writer = DistWriter(Run(tp=2))
    for key, array in weights.items():
        halves = np.split(array, 2, 1) if ".linear_qkv." in key and "norm" not in key else [array]
        for rank, half in enumerate(halves):
            offsets = [0] * array.ndim
            offsets[1:2] = [rank * half.shape[1]] if array.ndim > 1 else []
            writer.add(key, array.shape, tuple(offsets), np.ascontiguousarray(half), rank)
    facts = {
        "num_attention_heads": HEADS, "num_query_groups": GROUPS, "group_query_attention": True,
        "kv_channels": head_dim, "num_layers": LAYERS, "vocab_size": VOCAB, "num_experts": experts or None,
    }  # fmt: skip
    writer.add_object("common_state/shard_0_1", common_state(writer.run, **facts))
    folder.mkdir()
    for name, data in writer.files().items():
        (folder / name).write_bytes(data)
    return folder


MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH,
       "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}  # fmt: skip
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", "LlamaForCausalLM", {}, {}),
    "mistral": ("mistral", "MistralForCausalLM", {}, {"sliding_window": None}),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", {"bias": True, "head_dim": 4}, {"head_dim": 4}),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", {"head_norms": True}, {}),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeForCausalLM", {"head_norms": True, "experts": 4}, MOE),
    "mixtral": ("mixtral", "MixtralForCausalLM", {"experts": 4, "head_dim": 4}, {**MOE, "head_dim": 4}),
    "qwen2_moe": ("qwen2_moe", "Qwen2MoeForCausalLM", {"bias": True, "experts": 4, "shared": 8, "head_dim": 4},
                  {**MOE, "head_dim": 4, "shared_expert_intermediate_size": 8}),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_transformers_runs_a_megatron_model(name: str, tmp_path: Path) -> None:
    """Each family's model has the logits of Megatron's own layout; padding of the vocabulary is gone by itself."""
    kind, architecture, options, more = MODELS[name]
    weights = megatron_weights(**options)
    source = saved(tmp_path / "source", weights, options.get("head_dim", HEAD_DIM), options.get("experts", 0))
    export(source, tmp_path / "out", family="mixtral" if name == "mixtral" else "auto")
    save_file(weights, tmp_path / "megatron.safetensors")
    config = config_of(kind, architecture, **more)
    assert_runs(tmp_path / "out", tmp_path / "megatron.safetensors", "megatron", config)


@pytest.mark.parametrize("name", ["td_full_t2p2d2", "legacy_vpp_p2v2", "moe_seq_e2"])
def test_transformers_runs_what_megatron_saved(name: str, tmp_path: Path) -> None:
    """Checkpoints of real Megatron: a Llama, and with experts a Mixtral."""
    source, is_moe = CHECKPOINTS / name / "ckpt", name.startswith("moe")
    export(source, tmp_path / "out", family="mixtral" if is_moe else "llama", true_vocab=100)
    export(source, tmp_path / "megatron.safetensors", family="none")
    sizes: dict[str, Any] = {
        "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 2 if is_moe else 4,
    }  # fmt: skip
    kind, architecture = ("mixtral", "MixtralForCausalLM") if is_moe else ("llama", "LlamaForCausalLM")
    config = config_of(kind, architecture, **{**(MOE if is_moe else {}), **sizes})
    assert_runs(tmp_path / "out", tmp_path / "megatron.safetensors", "megatron", config)


def test_transformers_runs_a_torchtitan_model(tmp_path: Path) -> None:
    """Rotary pairs become halves: the logits are those of Meta's complex rotation."""
    rng, weights = np.random.default_rng(8), dict[str, npt.NDArray[np.float32]]()
    for number in range(LAYERS):
        shapes = {
            "attention_norm": (HIDDEN,), "ffn_norm": (HIDDEN,), "attention.wq": (HEADS * HEAD_DIM, HIDDEN),
            "attention.wk": (GROUPS * HEAD_DIM, HIDDEN), "attention.wv": (GROUPS * HEAD_DIM, HIDDEN),
            "attention.wo": (HIDDEN, HEADS * HEAD_DIM), "feed_forward.w1": (WIDTH, HIDDEN),
            "feed_forward.w2": (HIDDEN, WIDTH), "feed_forward.w3": (WIDTH, HIDDEN),
        }  # fmt: skip
        weights |= {f"layers.{number}.{key}.weight": values(rng, *shape) for key, shape in shapes.items()}
    weights |= {f"{key}.weight": values(rng, VOCAB, HIDDEN) for key in ("tok_embeddings", "output")}
    weights["norm.weight"] = values(rng, HIDDEN)
    save_file(weights, tmp_path / "titan.safetensors")
    export(tmp_path / "titan.safetensors", tmp_path / "out", facts={"heads": HEADS, "kv_heads": GROUPS})
    assert_runs(tmp_path / "out", tmp_path / "titan.safetensors", "titan", config_of("llama", "LlamaForCausalLM"))
