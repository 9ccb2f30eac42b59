"""A section says what a tensor is for: the model, its optimizer, or the rest of the training state.

It is told from names alone, by the table below; nothing depends on it but selection (``--only model``) and totals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from ckpt_tool.manifest.model import KeyPath

__all__ = ["Section", "section_of"]

Section = Literal["model", "optimizer", "other"]

# First key of the path (or of the dotted name), lower case, without a trailing number. Seen in: torch DCP's
# get_state_dict and torchtitan (`model optimizer lr_scheduler train_state dataloader`), accelerate and verl (`model
# optim extra_state`), Lightning (`state_dict optimizer_states loops callbacks`), Megatron (`optimizer rng_state
# opt_param_scheduler`), DeepSpeed (`module optimizer_state_dict`), the FSDP examples (`app`, which holds all).
_FIRST_KEYS: dict[str, Section] = {
    **dict.fromkeys(
        ("model", "models", "module", "modules", "state_dict", "model_state_dict", "ema", "ema_model"), "model"
    ),
    **dict.fromkeys(
        (
            "optim", "optims", "optimizer", "optimizers", "optim_state", "optimizer_state", "optimizer_states",
            "optimizer_state_dict", "opt", "opt_state",
        ),
        "optimizer",
    ),
    **dict.fromkeys(
        (
            "lr_scheduler", "lr_schedulers", "scheduler", "schedulers", "opt_param_scheduler", "train_state", "trainer",
            "dataloader", "dataloaders", "rng", "rng_state", "rng_states", "random_states", "extra_state", "loops",
            "callbacks", "scaler", "grad_scaler", "args", "config", "cfg", "iteration", "step", "epoch",
        ),
        "other",
    ),
}  # fmt: skip

# Wrappers that hold all sections: the key below them decides.
_WRAPPERS = frozenset({"app", "state", "checkpoint", "state_dicts"})

# Last key: what optimizers call their state. Decides where the first key is a module's own name (flat files); `step` is
# not here because models have buffers of that name.
_STATE_KEYS = frozenset(
    {
        "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg",
        "acc_delta", "exp_avg_res", "exp_avg_sq_row", "exp_avg_sq_col", "fp32_param", "master_param",
    }
)  # fmt: skip


def section_of(path: KeyPath, fqn: str) -> Section:
    """What the tensor or object at ``path`` is for.

    Args:
        path: its keys from the root; where it has fewer than two, the dotted parts of ``fqn`` stand in.
        fqn: its name.

    Returns:
        By the first key that is in the table; else ``optimizer`` for the usual names of optimizer state; else
        ``model``.

    >>> section_of(("optim", "state", "w", "exp_avg"), "optim.state.w.exp_avg")
    'optimizer'
    >>> section_of((), "layers.0.weight"), section_of((), "optimizer.state.exp_avg.layers.0.weight")
    ('model', 'optimizer')
    >>> section_of(("rng", "torch"), "rng.torch"), section_of((), "app.optim.state.0.step")
    ('other', 'optimizer')
    """
    keys: Sequence[object] = path if len(path) > 1 else fqn.replace("/", ".").split(".")
    first = str(keys[0]).lower()
    if first in _WRAPPERS and len(keys) > 1:
        keys = keys[1:]
        first = str(keys[0]).lower()
    found = _FIRST_KEYS.get(first.rstrip("0123456789").rstrip("_"))
    if found is not None and found != "model":
        return found
    return "optimizer" if len(keys) > 1 and str(keys[-1]).lower() in _STATE_KEYS else "model"
