"""Readings of names."""

from __future__ import annotations

import pytest

from ckpt_tool.layout.names import Spelling, spellings


@pytest.mark.parametrize(
    ("fqn", "expected"),
    [
        ("w.weight", Spelling("w.weight")),
        ("module.module.w.weight", Spelling("w.weight", "module.module.")),
        ("_orig_mod.layers.0._fsdp_wrapped_module.w", Spelling("layers.0.w", "_orig_mod._fsdp_wrapped_module.")),
        ("optim.state.a.w.exp_avg", Spelling("a.w", slot="exp_avg")),
        ("optimizer.state.module.a.w.step", Spelling("a.w", "module.", "step")),
        ("optimizer.state.exp_avg_sq.a.w", Spelling("a.w", slot="exp_avg_sq")),
        ("app.optimizer_0.state.a.w.exp_avg", Spelling("a.w", slot="exp_avg")),
        ("state.7.exp_avg", Spelling("seven.weight", slot="exp_avg")),
        ("optim.a.w.exp_avg", Spelling("a.w", slot="exp_avg")),
        ("base_model.model.q.lora_A.weight", Spelling("q.weight", "base_model.model.", adapter="A")),
        ("q.lora_B.default.weight", Spelling("q.weight", adapter="B")),
        ("q.lora_embedding_A.default", Spelling("q.weight", adapter="other")),
        ("q.lora_magnitude_vector.default.weight", Spelling("q.weight", adapter="other")),
        ("q.base_layer.weight", Spelling("q.weight")),
        ("head.modules_to_save.default.weight", Spelling("head.weight")),
        ("optim.state.q.lora_A.default.weight.exp_avg", Spelling("q.weight", slot="exp_avg", adapter="A")),
    ],
)
def test_a_name_is_read_as(fqn: str, expected: Spelling) -> None:
    """Wrappers, prefixes, optimizer state and adapters are read through to the parameter."""
    assert expected in list(spellings(fqn, {7: "seven.weight"}))


def test_the_plainest_reading_comes_first() -> None:
    """A name that a rule fits as it stands is never read as something else."""
    assert next(spellings("model.state.w.exp_avg", {})) == Spelling("model.state.w.exp_avg")
