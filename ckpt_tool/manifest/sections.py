"""A section says what a tensor is for: the model, its optimizer, or the rest of the training state.

It is told from names alone, by the tables below: what conversions take for the model, and what they may lay out without
a rule, follows from it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from ckpt_tool.manifest.model import KeyPath

__all__ = ["WRAPPERS", "Section", "section_of"]

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
WRAPPERS = frozenset({"app", "state", "checkpoint", "state_dicts"})

# Last key: what optimizers call their state. Decides where the first key is a module's own name (flat files); `step` is
# not here because models have buffers of that name.
_STATE_KEYS = frozenset(
    {
        "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg",
        "acc_delta", "exp_avg_res", "exp_avg_sq_row", "exp_avg_sq_col", "fp32_param", "master_param",
    }
)  # fmt: skip


# Words in the first key of nested state, or in a name without dots, where the table has no such key: people name theirs
# freely. Seen in: fairseq (`last_optimizer_state`), timm and DINO (`amp_scaler`, `fp16_scaler`), mmengine
# (`param_schedulers`), GANs (`g_optimizer`, `lr_scheduler_d`), and what loops of one's own add (`cuda_rng_state`,
# `train_dataloader`). Dotted names tell nothing here: they begin with a module's own name, whatever it is.
_WORDS: dict[str, Section] = {
    **dict.fromkeys(("optim", "optims", "optimizer", "optimizers"), "optimizer"),
    **dict.fromkeys(
        (
            "rng", "rngs", "scheduler", "schedulers", "scaler", "scalers", "dataloader", "dataloaders", "loader",
            "loaders", "sampler", "samplers",
        ),
        "other",
    ),
}  # fmt: skip
_ANY_WORD = re.compile("optim|rng|random|schedul|scaler|loader|sampler")
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_RANDOM_STATE = re.compile(r"random_?states?(?![a-z])")

# One rank's share of everything: the key below it decides.
_OF_RANK = re.compile(r"(?:[a-z]+_)?rank_?\d+")

_N_STATE_KEYS = 3  # `state`, the number of a parameter, what is kept of it: torch.optim.Optimizer.state_dict()


def section_of(path: KeyPath, fqn: str) -> Section:
    """What the tensor or object at ``path`` is for.

    Args:
        path: its keys from the root; where it has fewer than two, the dotted parts of ``fqn`` stand in.
        fqn: its name.

    Returns:
        By the first key that is in the table, or by a word in it; else ``optimizer`` for the usual names of optimizer
        state and for numbered state as ``torch.optim`` has it; else ``model``.

    >>> section_of(("optim", "state", "w", "exp_avg"), "optim.state.w.exp_avg")
    'optimizer'
    >>> section_of((), "layers.0.weight"), section_of((), "optimizer.state.exp_avg.layers.0.weight")
    ('model', 'optimizer')
    >>> section_of(("rng", "torch"), "rng.torch"), section_of((), "app.optim.state.0.step")
    ('other', 'optimizer')
    >>> section_of(("cuda_rng_state",), "cuda_rng_state"), section_of(("optG", "state", 0, "step"), "optG.state.0.step")
    ('other', 'optimizer')
    >>> section_of(("rng_embed.weight",), "rng_embed.weight")
    'model'
    """
    is_nested = len(path) > 1
    keys: Sequence[object] = path if is_nested else fqn.replace("/", ".").split(".")
    first = str(keys[0])
    lower = first.lower()
    if len(keys) > 1 and (lower in WRAPPERS or ("rank" in lower and _OF_RANK.fullmatch(lower))):
        keys = keys[1:]
        first = str(keys[0])
        lower = first.lower()
    found = _FIRST_KEYS.get(lower.rstrip("0123456789").rstrip("_"))
    if found is None and (is_nested or len(keys) == 1):
        found = _by_words(first)
    if found is not None and found != "model":
        return found
    if len(keys) > 1 and str(keys[-1]).lower() in _STATE_KEYS:
        return "optimizer"
    return "optimizer" if is_nested and found is None and _is_numbered_state(keys) else "model"


def _by_words(key: str) -> Section | None:
    """What a key is for by the words in it, the last known one first: ``optimizer_scheduler`` is a scheduler."""
    if _ANY_WORD.search(key.lower()) is None:
        return None
    if _RANDOM_STATE.search(key.lower()):
        return "other"
    words = [word.lower() for word in _WORD.findall(key)]
    return next((_WORDS[word] for word in reversed(words) if word in _WORDS), None)


def _is_numbered_state(keys: Sequence[object]) -> bool:
    """Whether keys end as in ``state.0.exp_avg``; DCP makes numbers text."""
    return len(keys) >= _N_STATE_KEYS and keys[-3] == "state" and str(keys[-2]).isdecimal()
