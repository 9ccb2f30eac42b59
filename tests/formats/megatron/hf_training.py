"""A training state of a Hugging Face model with torch's own names, made of the values that Megatron's fixtures have.

Fused tensors are taken apart here with numpy alone: what the package makes of it must be what they were.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed.checkpoint as dcp

from tests.formats.conformance import Truth

__all__ = ["CONFIG", "RUN", "VOCAB", "hf_names", "padding_cut", "save_dcp", "torch_state"]

Arrays = dict[str, npt.NDArray[np.float32]]
VOCAB = 100
HEADS, GROUPS, HEAD_DIM = 4, 2, 8
CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "head_dim": HEAD_DIM, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32, "tie_word_embeddings": False,
}  # fmt: skip
RUN: dict[str, Any] = {
    "make_vocab_size_divisible_by": 8, "transformer_impl": "local", "lr": 1e-3, "min_lr": 1e-5, "global_batch_size": 8,
    "train_samples": 100, "lr_warmup_samples": 10, "lr_decay_style": "cosine", "weight_decay": 0.1,
    "accumulate_allreduce_grads_in_fp32": False,
}  # fmt: skip
"""Arguments of the run that the fixtures' scripts load a checkpoint with."""


def padding_cut(truth: Mapping[str, Truth], slot: str) -> Arrays:
    """Megatron's keys and values of ``param``, ``exp_avg`` or ``exp_avg_sq``, the vocabulary without padding."""
    found: Arrays = {}
    for fqn, one in truth.items():
        head, _, key = fqn.partition(f"state.{slot}.")
        if head == "optimizer." and key:
            array = np.frombuffer(one.data, np.float32).reshape(one.shape)
            is_table = key.endswith(("word_embeddings.weight", "output_layer.weight"))
            found[key] = array[:VOCAB] if is_table else array
    return found


def hf_names(arrays: Mapping[str, npt.NDArray[np.float32]]) -> Arrays:
    """Megatron's tensors under the names of Llama, or of Qwen3-MoE where there are experts."""
    found: Arrays = {}
    for key, array in arrays.items():
        name = {
            "embedding.word_embeddings.weight": "model.embed_tokens.weight",
            "output_layer.weight": "lm_head.weight", "decoder.final_layernorm.weight": "model.norm.weight",
        }.get(key)  # fmt: skip
        if name is not None:
            found[name] = array
            continue
        for number, layer in enumerate(array):
            stem = f"model.layers.{number}."
            found |= {stem + name: part for name, part in _layer(key.removeprefix("decoder.layers."), layer)}
    return found


def _layer(key: str, array: npt.NDArray[np.float32]) -> list[tuple[str, npt.NDArray[np.float32]]]:
    plain = {
        "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
        "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
        "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
        "mlp.linear_fc2.weight": "mlp.down_proj.weight", "mlp.router.weight": "mlp.gate.weight",
    }  # fmt: skip
    if key in plain:
        return [(plain[key], array)]
    if key == "mlp.linear_fc1.weight":
        gate, up = np.split(array, 2)
        return [("mlp.gate_proj.weight", gate), ("mlp.up_proj.weight", up)]
    if key == "self_attention.linear_qkv.weight":
        grouped = array.reshape(GROUPS, HEADS // GROUPS + 2, HEAD_DIM, -1)
        parts = {"q": grouped[:, :-2], "k": grouped[:, -2], "v": grouped[:, -1]}
        return [(f"self_attn.{name}_proj.weight", part.reshape(-1, array.shape[-1])) for name, part in parts.items()]
    if key.startswith("mlp.experts.experts."):
        return [
            (name.replace("mlp.", f"mlp.experts.{number}."), part)
            for number, expert in enumerate(array)
            for name, part in _layer(key.replace("experts.experts.", ""), expert)
        ]
    raise KeyError(key)


def torch_state(truth: Mapping[str, Truth], *, weights: torch.dtype, step: int = 10) -> dict[str, Any]:
    """What ``get_state_dict`` of torch gives: model, and AdamW by parameter in groups with and without decay."""
    param, first, second = (hf_names(padding_cut(truth, slot)) for slot in ("param", "exp_avg", "exp_avg_sq"))
    tensors = {name: torch.from_numpy(array.copy()) for name, array in param.items()}
    common = {
        "lr": 5e-4, "betas": (0.9, 0.95), "eps": 1e-8, "amsgrad": False, "maximize": False, "foreach": None,
        "capturable": False, "differentiable": False, "fused": None, "decoupled_weight_decay": True,
    }  # fmt: skip
    by_decay = {
        decay: [name for name, tensor in tensors.items() if (tensor.ndim > 1) == bool(decay)] for decay in (0.1, 0.0)
    }
    return {
        "model": {name: tensor.to(weights) for name, tensor in tensors.items()},
        "optim": {
            "state": {
                name: {
                    "step": torch.tensor(float(step)),
                    "exp_avg": torch.from_numpy(first[name].copy()),
                    "exp_avg_sq": torch.from_numpy(second[name].copy()),
                }
                for name in tensors
            },
            "param_groups": [{**common, "weight_decay": decay, "params": names} for decay, names in by_decay.items()],
        },
    }


def save_dcp(state: dict[str, Any], folder: Path) -> Path:
    """Saved by torch itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder
