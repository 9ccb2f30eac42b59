"""Stretched rotary embeddings in words of transformers and of Megatron-LM, and back."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_tool.errors import LayoutError
from ckpt_tool.layout.model_config import arguments_of, config_of
from ckpt_tool.layout.rope import rope_kinds

CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}  # fmt: skip
LATENT: dict[str, Any] = {
    **CONFIG, "model_type": "deepseek_v3", "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 8, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
}  # fmt: skip
YARN: dict[str, Any] = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0,
    "truncate": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "scaling", "arguments"),
    [
        (CONFIG, {"rope_type": "linear", "factor": 4.0}, {"rotary_seq_len_interpolation_factor": 4}),
        (
            CONFIG,
            {
                "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            {"use_rope_scaling": True, "rope_scaling_factor": 32.0},
        ),
        (
            CONFIG,
            YARN,
            {
                "position_embedding_type": "yarn", "rotary_scaling_factor": 4.0, "mscale": 1, "mscale_all_dim": 0.0,
                "yarn_original_max_position_embeddings": 16, "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0,
                "yarn_correction_range_round_to_int": True,
            },
        ),
        (
            LATENT,
            {**YARN, "mscale": 0.7, "mscale_all_dim": 1.0},
            {
                "rope_type": "yarn", "rotary_scaling_factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0,
            },
        ),
    ],
    ids=["linear", "llama3", "yarn", "yarn of latent attention"],
)  # fmt: skip
def test_there_and_back(config: dict[str, Any], scaling: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Each key is an argument, and each argument the key that it was."""
    said = arguments_of({**config, "rope_scaling": scaling}, "config.json")
    assert {name: said.values.get(name) for name in arguments} == arguments
    assert not any("rope" in note for note in said.notes)
    back = config_of(said.values, [config["model_type"]], n_tokens=None)
    assert back.values["rope_scaling"] == scaling


LONG = {
    "rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 16, "short_factor": [1.0, 1.1],
    "long_factor": [2.0, 3.0],
}  # fmt: skip


@pytest.mark.parametrize(
    ("scaling", "note"),
    [
        (
            {"rope_type": "dynamic", "factor": 2.0},
            "grows with the length (factor 2.0); up to 64 tokens there is no diff",
        ),
        (LONG, "no argument for a factor of each frequency (short_factor, long_factor)"),
        ({"rope_type": "proportional", "partial_rotary_factor": 0.5}, "(partial_rotary_factor 0.5)"),
        ({"rope_type": "proportional"}, "(partial_rotary_factor not said)"),
        ({"rope_type": "new", "factor": 2.0}, "rope scaling 'new' is not known: the run is written with plain rotary"),
        ({"type": "linear", "factor": 2.5}, "factor is 2.5, args.rotary_seq_len_interpolation_factor takes whole"),
        ({"rope_type": "linear"}, "the config does not say factor"),
        ({"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 2.0}, "high_freq_factor is 2.0, Megatron has 4.0"),
    ],
)
def test_what_megatron_has_no_argument_for(scaling: dict[str, Any], note: str) -> None:
    """It is said, with the value; nothing is rounded or left out without a word, and a config made later has it."""
    said = arguments_of({**CONFIG, "rope_scaling": scaling}, "config.json")
    assert any(note in one for one in said.notes), said.notes
    assert any("args.hf_rope_scaling keeps the config's settings" in one for one in said.notes)
    assert config_of(said.values, ["llama"], n_tokens=None).values["rope_scaling"] == scaling


def test_magnitudes_of_yarn() -> None:
    """A factor for cosines that transformers is told is the one that Megatron computes; original lengths are found."""
    scaling = {"type": "yarn", "attention_factor": 1.0, "original_max_position_embeddings": 16}
    said = arguments_of({**CONFIG, "rope_scaling": scaling}, "config.json").values
    assert (said["rotary_scaling_factor"], said["mscale"], said["mscale_all_dim"]) == (4.0, 0, 0.0)
    assert config_of(said, ["llama"], n_tokens=None).values["rope_scaling"]["attention_factor"] == 1.0


def test_arguments_that_do_not_suffice() -> None:
    """A run with latent attention and yarn whose arguments do not say the factor: no config, and which are missing."""
    args = arguments_of({**LATENT, "rope_scaling": YARN}, "config.json").values
    known = {name: value for name, value in args.items() if name != "rotary_scaling_factor"}
    found = config_of(known, ["deepseek_v3"], n_tokens=None)
    assert not found.values
    assert "the checkpoint does not tell args.rotary_scaling_factor" in found.notes[0]


@pytest.mark.parametrize(
    ("argument", "value"),
    [("no_rope_freq", [0, 1]), ("window_size", [63, 0]), ("mrope_section", [1, 1]), ("squared_relu", True),
     ("position_embedding_type", "learned_absolute"), ("softmax_type", "off-by-one")],
)  # fmt: skip
def test_a_run_that_computes_something_else_has_no_config(argument: str, value: object) -> None:
    """What a config of the type has no word for is named, and none is made that would have other logits."""
    args = arguments_of(CONFIG, "config.json").values
    assert config_of({**args, "no_rope_freq": None, "squared_relu": False}, ["llama"], n_tokens=None).values
    found = config_of({**args, argument: value}, ["llama"], n_tokens=None)
    assert not found.values
    assert f"args.{argument} is {value!r}" in found.notes[0]


def test_rules_without_a_type() -> None:
    """They are data, and checked."""
    with pytest.raises(LayoutError, match="needs a type"):
        rope_kinds([{"keys": {}}], "own.toml")
