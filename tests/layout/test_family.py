"""Families: every model of theirs is recognised, and its rules cover all names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ckpt_tool.errors import LayoutError
from ckpt_tool.layout import family
from ckpt_tool.layout.family import builtin_families, detect_family
from ckpt_tool.layout.rules import load_rules
from tests.layout.models import ATTENTION, MODELS, STACKED, TWO_NORMS, with_ends


@pytest.mark.parametrize("model", MODELS)
def test_a_model_is_of_its_family(model: str) -> None:
    """Names of a model are told to be of its family, all of them are covered, and the evidence says how many."""
    name, shapes = MODELS[model]
    found = detect_family(shapes)
    assert found.family.name == name
    assert all(found.family.match(fqn) for fqn in shapes)
    assert found.evidence[0].startswith(f"{name}: ")
    assert len(found.evidence) == 1


@pytest.mark.parametrize("prefix", ["model.", "module.", "state_dict.", "model._orig_mod.", "base_model.model."])
def test_wrapped_names_are_recognised(prefix: str) -> None:
    """What wrappers put in front does not matter, nor do the names of optimizer state beside them."""
    _, shapes = MODELS["bloom"]
    fqns = [prefix + fqn for fqn in shapes] + [f"optim.state.{fqn}.exp_avg" for fqn in shapes]
    assert detect_family(fqns).family.name == "bloom"


def test_names_of_no_family_are_refused() -> None:
    """Nothing is guessed from names that fit nothing; the nearest family is named with what it misses."""
    with pytest.raises(LayoutError, match=r"fit no known family(\n|$)") as caught:
        detect_family(["decoder.layers.self_attention.linear_qkv.weight"])
    assert "llama" in (caught.value.hint or "")
    with pytest.raises(LayoutError, match=r"nearest is llama, without 'self_attn"):
        detect_family(["layers.0.mlp.gate_proj.weight"])


def test_a_tie_is_said_where_it_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixtral with stacked experts has Qwen's names, and the same rules: nothing is said. With other rules it is."""
    fqns = with_ends(ATTENTION | TWO_NORMS | STACKED)
    found = detect_family(fqns)
    assert found.family.name == "qwen_moe"
    assert len(found.evidence) == 1
    mixtral = builtin_families()["mixtral"]
    for fqn, shape in fqns.items():
        kept, other = found.family.match(fqn), mixtral.match(fqn)
        assert kept is not None
        assert other is not None
        assert kept.rule.layout(shape, kept.layer, None) == other.rule.layout(shape, other.layer, None)
    texts = {**family._texts()}
    texts["mixtral"] += "\n[[rule]]\nmatch = '{layer}\\.mlp\\.gate\\.weight'\nkind = 'column'\n"
    monkeypatch.setattr(family, "_texts", lambda: texts)
    monkeypatch.setattr(family, "_family", lambda name: load_rules(texts[name], source=f"{name}.toml"))
    said = "mixtral covers as much; qwen_moe is kept, it asks for 3 typical names, mixtral for 2"
    assert detect_family(fqns).evidence[1:] == (said,)


def test_every_family_has_a_model() -> None:
    """No family is shipped without a model that shows what it covers, one of those here or of transformers'."""
    table = json.loads(Path(__file__).with_name("plans_of_transformers.json").read_text("utf-8"))
    shown = {name for name, _ in MODELS.values()}
    for kinds in table["models"].values():
        shown.add(detect_family([table["kinds"][at][0].replace("*", "0") for at in kinds]).family.name)
    assert set(builtin_families()) == shown


def test_modules_are_named() -> None:
    """Rules of a user's own take those of the package along; what is no module is refused with those that are."""
    text = "[family]\nmodules = ['attention', 'ends']\n[[rule]]\nmatch = '{layer}\\.twist'\nkind = 'column'\n"
    rules = load_rules(text)
    for fqn, kind in (("h.3.twist", "column"), ("h.3.self_attn.q_proj.weight", "column"), ("lm_head.weight", "vocab")):
        match = rules.match(fqn)
        assert match is not None
        assert match.rule.kind == kind
    for wrong in ("'x'", "1", "'../families/llama'"):
        with pytest.raises(LayoutError, match=r"no module") as caught:
            load_rules(f"[family]\nmodules = [{wrong}]")
        assert "modules are attention, ends, experts" in (caught.value.hint or "")
    with pytest.raises(LayoutError, match="modules is a list of names"):
        load_rules("[family]\nmodules = 'attention'")
