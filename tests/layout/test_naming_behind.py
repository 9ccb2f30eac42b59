"""Layers that a family numbers behind the last of the others: multi-token prediction of DeepSeek-V3, in Megatron."""

from __future__ import annotations

import pytest

from ckpt_tool.errors import LayoutError
from ckpt_tool.layout.naming import rename
from ckpt_tool.layout.naming_back import rename_back
from ckpt_tool.layout.naming_match import match_names
from ckpt_tool.layout.naming_rules import builtin_namings, load_naming
from ckpt_tool.layout.naming_sizes import Fact

NAMING = builtin_namings()["megatron-deepseek"]
FACTS = {name: Fact(value, "test") for name, value in (("layers", 2), ("experts", 2), ("heads", 2), ("kv_heads", 2))}
LAYER = {
    "input_layernorm.weight": (4,), "self_attention.linear_q_proj.weight": (8, 4),
    "self_attention.linear_kv_down_proj.weight": (3, 4), "self_attention.linear_kv_up_proj.weight": (8, 3),
    "self_attention.linear_kv_up_proj.layer_norm_weight": (3,), "self_attention.linear_proj.weight": (4, 4),
    "pre_mlp_layernorm.weight": (4,), "mlp.router.weight": (2, 4), "mlp.experts.experts.linear_fc1.weight": (2, 6, 4),
    "mlp.experts.experts.linear_fc2.weight": (2, 4, 3),
}  # fmt: skip
SHAPES = {
    "embedding.word_embeddings.weight": (10, 4),
    **{f"decoder.layers.{rest}": (2, *shape) for rest, shape in LAYER.items()},
    "decoder.final_layernorm.weight": (4,),
    "output_layer.weight": (10, 4),
    **{f"mtp.layers.0.{name}.weight": (4,) for name in ("enorm", "hnorm", "final_layernorm")},
    "mtp.layers.0.eh_proj.weight": (4, 8),
    **{f"mtp.layers.0.transformer_layer.{rest}": shape for rest, shape in LAYER.items()},
}


def test_layers_ahead_are_numbered_on_and_back() -> None:
    """Layer 0 for multi-token prediction is layer 2 of a model of two; every name and shape comes back."""
    renaming = rename(NAMING, match_names(NAMING, SHAPES), SHAPES, FACTS, is_whole=True)
    shapes = {view.fqn: view.shape for view in renaming.views}
    assert shapes["model.layers.2.eh_proj.weight"] == (4, 8)
    assert shapes["model.layers.2.shared_head.norm.weight"] == (4,)
    assert shapes["model.layers.2.mlp.experts.1.up_proj.weight"] == (3, 4)
    assert shapes["model.layers.1.mlp.experts.1.down_proj.weight"] == (4, 3)
    assert not any(fqn.startswith("model.layers.3.") for fqn in shapes)
    copies = {"model.layers.2.embed_tokens.weight": (10, 4), "model.layers.2.shared_head.head.weight": (10, 4)}
    back = rename_back(NAMING, {**shapes, **copies}, FACTS, n_rows={})
    assert {view.fqn: view.shape for view in back.views} == SHAPES
    assert {fqn for fqn, _ in back.dropped} == set(copies)


def test_number_of_layers_is_needed_to_tell_them() -> None:
    """Without it no layer is one behind the others; with it, what has no rule for such layers is refused."""
    shapes = {"model.layers.0.self_attn.o_proj.weight": (4, 4), "model.layers.1.self_attn.o_proj.weight": (4, 4)}
    both = rename_back(NAMING, shapes, {}, n_rows={})
    assert [view.shape for view in both.views] == [(2, 4, 4)]
    one = rename_back(NAMING, shapes, {"layers": Fact(1, "test")}, n_rows={})
    assert {view.fqn for view in one.views} == {
        "decoder.layers.self_attention.linear_proj.weight",
        "mtp.layers.0.transformer_layer.self_attention.linear_proj.weight",
    }


def test_incomplete_rules_are_refused() -> None:
    """Where such layers stand needs a pattern with their number, a name, and what that is in place of."""
    with pytest.raises(LayoutError, match="with a group behind"):
        load_naming('[naming]\nname = "x"\n[naming.behind]\nmatch = "a"\nback = "b"\ninstead_of = "c"\n', source="x")
