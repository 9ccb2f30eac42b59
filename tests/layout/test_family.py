"""Families: every model of theirs is recognised, and its rules cover all names."""

from __future__ import annotations

import pytest

from ckpt_tool.errors import LayoutError
from ckpt_tool.layout.family import builtin_families, detect_family
from tests.layout.models import ATTENTION, MODELS, STACKED, TWO_NORMS, with_ends


@pytest.mark.parametrize("model", MODELS)
def test_a_model_is_of_its_family(model: str) -> None:
    """Names of a model are told to be of its family, all of them are covered, and the evidence says how many."""
    family, shapes = MODELS[model]
    found = detect_family(shapes)
    assert found.family.name == family
    assert all(found.family.match(fqn) for fqn in shapes)
    assert found.evidence[0].startswith(f"{family}: ")
    assert len(found.evidence) == 1


@pytest.mark.parametrize("prefix", ["model.", "module.", "state_dict.", "model._orig_mod.", "base_model.model."])
def test_wrapped_names_are_recognised(prefix: str) -> None:
    """What wrappers put in front does not matter, nor do the names of optimizer state beside them."""
    family, shapes = MODELS["bloom"]
    fqns = [prefix + fqn for fqn in shapes] + [f"optim.state.{fqn}.exp_avg" for fqn in shapes]
    assert detect_family(fqns).family.name == family


def test_names_of_no_family_are_refused() -> None:
    """Nothing is guessed from names that fit nothing; the nearest family is named with what it misses."""
    with pytest.raises(LayoutError, match=r"fit no known family(\n|$)") as caught:
        detect_family(["decoder.layers.self_attention.linear_qkv.weight"])
    assert "llama" in (caught.value.hint or "")
    with pytest.raises(LayoutError, match=r"nearest is llama, without '\\\\.input_layernorm"):
        detect_family(["layers.0.self_attn.q_proj.weight", "layers.0.mlp.gate_proj.weight"])


def test_a_tie_is_said() -> None:
    """Mixtral with stacked experts has Qwen's names: the more specific family is kept, and the evidence says so."""
    fqns = with_ends(ATTENTION | TWO_NORMS | STACKED)
    found = detect_family(fqns)
    assert found.family.name == "qwen_moe"
    assert found.evidence[1] == "mixtral covers as much; qwen_moe is kept, it asks for 3 typical names, mixtral for 2"
    mixtral = builtin_families()["mixtral"]
    for fqn, shape in fqns.items():
        kept, other = found.family.match(fqn), mixtral.match(fqn)
        assert kept is not None
        assert other is not None
        assert kept.rule.layout(shape, kept.layer, None) == other.rule.layout(shape, other.layer, None)


def test_every_family_has_a_model() -> None:
    """No family is shipped without a model that shows what it covers."""
    assert set(builtin_families()) == {family for family, _ in MODELS.values()}
