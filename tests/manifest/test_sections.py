"""Which section a name belongs to."""

from __future__ import annotations

import pytest

from ckpt_tool.manifest.model import KeyPath
from ckpt_tool.manifest.sections import Section, section_of

CASES: list[tuple[KeyPath, str, Section]] = [
    (("model", "layers.0.weight"), "model.layers.0.weight", "model"),
    (("optim", "state", "layers.0.weight", "exp_avg"), "optim.state.layers.0.weight.exp_avg", "optimizer"),
    (("optim", "param_groups", 0, "lr"), "optim.param_groups.0.lr", "optimizer"),
    (("optimizer_0",), "optimizer_0.state.exp_avg", "optimizer"),
    (("rng", "torch"), "rng.torch", "other"),
    (("train_state", "step"), "train_state.step", "other"),
    (("dataloader", "dp_rank_0"), "dataloader.dp_rank_0", "other"),
    (("app", "model", "w"), "app.model.w", "model"),
    (("app", "optim", "state"), "app.optim.state", "optimizer"),
    ((), "layers.0.attention.wq.weight", "model"),
    ((), "layers.0.attention.wq.weight.exp_avg_sq", "optimizer"),
    ((), "optimizer.state.exp_avg.layers.0.weight", "optimizer"),
    (("lm_head.weight",), "lm_head.weight", "model"),
    (("norm.num_batches_tracked",), "norm.num_batches_tracked", "model"),
    (("last_optimizer_state", "state", 0, "step"), "last_optimizer_state.state.0.step", "optimizer"),
    (("optimizerG", "param_groups"), "optimizerG.param_groups", "optimizer"),
    (("optG", "state", 0, "step"), "optG.state.0.step", "optimizer"),
    (("optG", "state", "0", "step"), "optG.state.0.step", "optimizer"),
    (("fp16_scaler", "scale"), "fp16_scaler.scale", "other"),
    (("optimizer_scheduler", "lr"), "optimizer_scheduler.lr", "other"),
    (("cuda_rng_state",), "cuda_rng_state", "other"),
    (("cuda_rng_states", 0), "cuda_rng_states.0", "other"),
    (("np_random_state", 1), "np_random_state.1", "other"),
    (("train_dataloader", "rank_0"), "train_dataloader.rank_0", "other"),
    (("rank_0", "rng"), "rank_0.rng", "other"),
    (("rank_0", "model", "w"), "rank_0.model.w", "model"),
    (("model", "rng_embed.weight"), "model.rng_embed.weight", "model"),
    (("rng_embed.weight",), "rng_embed.weight", "model"),
    (("noise_scheduler.betas",), "noise_scheduler.betas", "model"),
    (("state", "0", "weight"), "state.0.weight", "model"),
    (("random_projection", "weight"), "random_projection.weight", "model"),
    (("net", "state", "proj", "weight"), "net.state.proj.weight", "model"),
]


@pytest.mark.parametrize(("path", "fqn", "section"), CASES)
def test_names_tell_the_section(path: KeyPath, fqn: str, section: Section) -> None:
    """The first known key decides, then the usual names of optimizer state."""
    assert section_of(path, fqn) == section
