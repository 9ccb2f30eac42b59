"""Families cover the language models of transformers, and cut them as transformers' own plans do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.layout.plans import disagreements

TABLE: dict[str, Any] = json.loads(Path(__file__).with_name("plans_of_transformers.json").read_text("utf-8"))
KINDS: list[list[Any]] = TABLE["kinds"]


@pytest.mark.parametrize("model_type", TABLE["models"])
def test_a_model(model_type: str) -> None:
    """Every tensor of a model has a rule, and the plan's cut where the plan has one."""
    kinds = {name: (ndim, style) for name, ndim, style in (KINDS[at] for at in TABLE["models"][model_type])}
    assert list(disagreements(kinds)) == []


def test_what_is_not_covered_is_seen() -> None:
    """The comparison can fail: a tensor without a rule, one that is cut otherwise, names of no family."""
    llama = {name: (ndim, style) for name, ndim, style in (KINDS[at] for at in TABLE["models"]["llama"])}
    other = {"model.layers.*.self_attn.q_proj.weight": (2, "rowwise"), "model.layers.*.twist.weight": (2, None)}
    assert list(disagreements({**llama, **other})) == [
        "model.layers.*.self_attn.q_proj.weight is cut (0, False) by llama, and rowwise by the plan",
        "model.layers.*.twist.weight is not covered by llama",
    ]
    [said] = disagreements({"twist.weight": (2, None)})
    assert "no known family" in said
