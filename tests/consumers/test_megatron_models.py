"""Tiny models of transformers in real Megatron: it loads what was made of them, and has their logits; and back again.

``CKPT_PEER_MEGATRON`` names the python of an environment with megatron-core 0.19.2 and torch 2.13,
``CKPT_PEER_TRANSFORMERS`` one with transformers (it may be the same); run with ``-m peer``, or ``make test-megatron``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ckpt_tool.api.convert.export import export
from ckpt_tool.api.convert.reshard import reshard
from tests.formats.conformance import FIXTURES

pytestmark = pytest.mark.peer

MAKE = """
import json, sys, torch
from transformers import AutoModelForCausalLM, CONFIG_MAPPING

kind, more, folder = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
sizes = dict(vocab_size=101, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=False,
             attention_dropout=0.0, bos_token_id=1, eos_token_id=2, pad_token_id=0)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**sizes, **more}), dtype=torch.bfloat16)
with torch.no_grad():
    for name, p in model.named_parameters():
        is_scale = "norm" in name and "bias" not in name
        p.normal_(float(is_scale and "gemma" not in kind), 0.2) if p.ndim == 1 else p.normal_(0, p.shape[-1] ** -0.5)
    for name, buffer in model.named_buffers():
        if "e_score" in name:
            buffer.normal_(0, 0.1)
model.save_pretrained(folder)
"""
LOGITS = """
import sys, numpy, torch
from transformers import AutoModelForCausalLM

model, info = AutoModelForCausalLM.from_pretrained(
    sys.argv[1], dtype=torch.float32, output_loading_info=True, attn_implementation="eager")
assert not any(info.values()), info
with torch.no_grad():
    numpy.save(sys.argv[2], model(torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])).logits[0].numpy())
"""
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
MLA = {
    **EXPERTS, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
THETA = {"rope_theta": 10000.0}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0, "beta_slow": 1.0, **THETA}
LONG = {
    "rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 4, "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0], **THETA,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    # model type, config, what --family calls it, further arguments of Megatron
    "llama": ("llama", {}, "llama", ""),
    "mistral": ("mistral", {}, "llama", ""),
    "qwen2": ("qwen2", {}, "llama", ""),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}, "llama", ""),
    "qwen3": ("qwen3", {"head_dim": 16}, "llama", ""),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, "mixtral", ""),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "head_dim": 16, "num_experts": 4, "norm_topk_prob": True}, "qwen_moe", ""),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.25, "use_parallel_residual": False}, "neox", ""),
    "phi3": ("phi3", {"vocab_size": 32064}, "phi3", ""),
    "phi3, partly rotary": ("phi3", {"vocab_size": 32064, "partial_rotary_factor": 0.5}, "phi3", ""),
    "gpt2": ("gpt2", {"n_inner": 48}, "gpt2", ""),
    "gpt2, tied": ("gpt2", {"tie_word_embeddings": True}, "gpt2", ""),
    "starcoder2": ("starcoder2", {}, "starcoder2", ""),
    "starcoder2, tied": ("starcoder2", {"tie_word_embeddings": True}, "starcoder2", ""),
    "deepseek_v3": (
        "deepseek_v3",
        {**MLA, "n_group": 2, "topk_group": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
        "deepseek",
        "",
    ),
    "deepseek_v2": (
        "deepseek_v2",
        {**MLA, "topk_method": "greedy", "norm_topk_prob": False, "routed_scaling_factor": 1.0},
        "deepseek",
        "",
    ),
    "llama, linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, **THETA}}, "llama", ""),
    "llama, llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
                **THETA,
            },
        },
        "llama",
        "",
    ),
    "llama, dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, **THETA}}, "llama", ""),
    "qwen2, yarn": ("qwen2", {"rope_parameters": {"rope_type": "yarn", **YARN}}, "llama", ""),
    "deepseek_v3, yarn": (
        "deepseek_v3",
        {
            **MLA,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "rope_parameters": {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, **YARN},
        },
        "deepseek",
        "",
    ),
    "qwen2_moe": ("qwen2_moe", {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 40}, "qwen_moe", ""),
}


def run(program: str, *words: object) -> None:
    """A program for transformers' python."""
    command = [os.environ["CKPT_PEER_TRANSFORMERS"], "-c", program, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def forward(scripts: Path, root: Path, tp: int, more: str) -> npt.NDArray[np.float32]:
    """Logits of real Megatron, by token and padded vocabulary."""
    out = root.with_suffix(".npy")
    command = [
        os.environ["CKPT_PEER_MEGATRON"], "launch.py", str(tp), "megatron_forward.py", str(root), str(out),
        "--tensor-model-parallel-size", str(tp), *more.split(),
    ]  # fmt: skip
    plain = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}  # fused functions as they are written: nothing to compile for
    done = subprocess.run(command, cwd=scripts, env=plain, capture_output=True, text=True, check=False)
    assert "FORWARD OK" in done.stdout, done.stdout[-2000:] + done.stderr[-3000:]
    logits: npt.NDArray[np.float32] = np.load(out)
    return logits


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fixtures' launcher, with the forward pass beside it."""
    folder = tmp_path_factory.mktemp("megatron") / "make"
    shutil.copytree(FIXTURES / "megatron/make", folder)
    shutil.copy(Path(__file__).with_name("megatron_forward.py"), folder)
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_megatron_has_the_logits_of_transformers(name: str, scripts: Path, tmp_path: Path) -> None:
    """HF to TP2 PP2: Megatron's own forward pass agrees; and back to HF: all logits are the same.

    The config is the one that the export made of Megatron's arguments.
    """
    kind, config, family, more = MODELS[name]
    run(MAKE, kind, json.dumps(config), tmp_path / "hf")
    run(LOGITS, tmp_path / "hf", tmp_path / "before.npy")
    arguments = {"make_vocab_size_divisible_by": 8, "transformer_impl": "local"}
    reshard(tmp_path / "hf", tmp_path / "mg", to="megatron-dist", tp=2, pp=2, arguments=arguments, durable=False)
    before = np.load(tmp_path / "before.npy")
    found = forward(scripts, tmp_path / "mg", 1, more)
    assert np.abs(found[:, : before.shape[1]] - before).max() < 1e-4 * before.std()
    export(tmp_path / "mg", tmp_path / "back", family=family, durable=False)
    run(LOGITS, tmp_path / "back", tmp_path / "after.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "after.npy"), before)


@pytest.mark.parametrize(
    ("kind", "config", "family"),
    [
        ("gemma", {"head_dim": 8, "tie_word_embeddings": True}, "gemma"),
        ("gemma2", {"head_dim": 8, "tie_word_embeddings": True, "sliding_window": 3}, "gemma2"),
        ("gemma3_text", {"head_dim": 8, "tie_word_embeddings": True, "sliding_window": 3}, "gemma3"),
        ("starcoder2", {"sliding_window": 3}, "starcoder2"),
        ("deepseek_v2", {**MLA, "q_lora_rank": None, "topk_method": "greedy"}, "deepseek"),
        ("llama", {"rope_parameters": LONG}, "llama"),
        ("qwen2", {"rope_parameters": {"rope_type": "linear", "factor": 2.5, **THETA}}, "llama"),
    ],
)
def test_models_that_no_megatron_here_runs_come_back(
    kind: str, config: dict[str, Any], family: str, tmp_path: Path
) -> None:
    """HF to TP2 PP2 and back: the logits are the same, with the config that was made of the arguments.

    The activation of Gemma 1, 2 and 3 is none of Megatron-LM's, nor are some rotary embeddings; without Transformer
    Engine it builds no latent attention of whole queries, and its softmax takes the mask that it is given, no window.
    """
    run(MAKE, kind, json.dumps(config), tmp_path / "hf")
    run(LOGITS, tmp_path / "hf", tmp_path / "before.npy")
    reshard(tmp_path / "hf", tmp_path / "mg", to="megatron-dist", tp=2, pp=2, durable=False)
    export(tmp_path / "mg", tmp_path / "back", family=family, durable=False)
    run(LOGITS, tmp_path / "back", tmp_path / "after.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "after.npy"), np.load(tmp_path / "before.npy"))


RUNNING = """
import json, sys, numpy, torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

model = AutoModelForCausalLM.from_config(
    AutoConfig.from_pretrained(sys.argv[1]), dtype=torch.float32, attn_implementation="eager")
state = load_file(sys.argv[2] + "/model.safetensors")
assert any(name.endswith("experts.gate_up_proj") for name in state), list(state)
model.load_state_dict({name: tensor.float() for name, tensor in state.items()}, strict=True)
model.eval()
with torch.no_grad():
    numpy.save(sys.argv[3], model(torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])).logits[0].numpy())
"""


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "qwen2_moe", "deepseek_v3"])
def test_a_running_model_takes_experts_in_one_tensor(name: str, tmp_path: Path) -> None:
    """Names with ``_fused`` are those of transformers 5 while a model runs: logits are equal."""
    kind, config, family, _ = MODELS[name]
    run(MAKE, kind, json.dumps(config), tmp_path / "hf")
    run(LOGITS, tmp_path / "hf", tmp_path / "before.npy")
    reshard(tmp_path / "hf", tmp_path / "mg", to="megatron-dist", tp=2, pp=2, durable=False)
    export(tmp_path / "mg", tmp_path / "back", family=f"{family}_fused", durable=False)
    run(RUNNING, tmp_path / "hf", tmp_path / "back", tmp_path / "after.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "after.npy"), np.load(tmp_path / "before.npy"))


def test_tensor_parallel_ranks_have_the_same_logits(scripts: Path, tmp_path: Path) -> None:
    """More ranks than KV groups would be cut by rows; here two ranks have one group each."""
    run(MAKE, "llama", "{}", tmp_path / "hf")
    run(LOGITS, tmp_path / "hf", tmp_path / "before.npy")
    arguments = {"make_vocab_size_divisible_by": 8, "transformer_impl": "local"}
    reshard(tmp_path / "hf", tmp_path / "mg", to="megatron-dist", tp=4, arguments=arguments, durable=False)
    before = np.load(tmp_path / "before.npy")
    found = forward(scripts, tmp_path / "mg", 2, "")
    assert np.abs(found[:, : before.shape[1]] - before).max() < 1e-4 * before.std()
