"""What Megatron's common state says of an optimizer that comes from elsewhere: groups, and where the schedule stands.

Megatron finds its groups by what they are for (mcore 0.19 ``optimizer/optimizer.py``, ``param_group_identifier_keys``):
the highest and the lowest learning rate are among that, so they have to be those of the run that loads them. What
matrices and what biases and norms are told of their decay follows ``get_standard_config_overrides``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_tool.manifest.model import Blob
from ckpt_tool.manifest.optimizer import ParameterGroup
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["MegatronOptimizer", "megatron_optimizer"]

_DEFAULTS: Mapping[str, Any] = {
    "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "maximize": False,
    "foreach": None, "capturable": False, "differentiable": False, "fused": None, "decoupled_weight_decay": True,
}  # fmt: skip
"""Of torch's AdamW."""
_SCHEDULE = {"lr_decay_style": "linear", "wd_incr_style": "constant"}
_SAMPLES = "global_samples"
"""What DeepSpeed calls the number of samples that were trained on."""


@dataclass(frozen=True)
class MegatronOptimizer:
    """Objects of the common state, and arguments that go with them."""

    blobs: tuple[Blob, ...]
    arguments: Mapping[str, Any]
    notes: tuple[str, ...]


def megatron_optimizer(
    groups: Sequence[ParameterGroup], arguments: Mapping[str, Any], blobs: Sequence[Blob], *, step: int
) -> MegatronOptimizer:
    """Two groups, with and without decay, and the schedule's place.

    Args:
        groups: of the source.
        arguments: of the run that is to load it: ``lr``, ``min_lr``, ``global_batch_size`` and those of the schedule.
        blobs: objects of the source, which may count samples.
        step: steps that were done.
    """
    given = [group.hyperparameters for group in groups if group.hyperparameters]
    decays = [group.get("weight_decay", 0.0) for group in given]
    first = given[decays.index(max(decays))] if given else {}
    values = {name: first.get(name, default) for name, default in _DEFAULTS.items()}
    notes = []
    differing = [name for name in ("betas", "eps") if len({repr(_plain(group.get(name))) for group in given}) > 1]
    if differing:
        notes.append(f"groups of the source differ in {' and '.join(differing)}: all get those with the most decay")
    if not given:
        notes.append("no group of the source tells its hyperparameters: they are those of torch's AdamW")
    values["betas"] = tuple(values["betas"])
    max_lr = float(arguments.get("lr", first.get("initial_lr", values["lr"])))
    min_lr = float(arguments.get("min_lr", 0.0))
    decay = float(arguments.get("weight_decay", values["weight_decay"]))
    common = {
        "is_expert_parallel": False, "default_config": True, "lr_mult": 1.0, "is_decoupled_lr": False,
        "max_lr": max_lr, "min_lr": min_lr, **values, "step": step,
    }  # fmt: skip
    entry = {
        "param_groups": [
            {**common, "wd_mult": 1.0, "weight_decay": decay},
            {**common, "wd_mult": 0.0, "weight_decay": 0.0},
        ]
    }
    n_samples, evidence = _samples(arguments, blobs, step)
    notes.append(
        f"Megatron knows its groups by their learning rates: the run needs --lr {max_lr!r} --min-lr {min_lr!r} "
        "(others are written with --arg lr=X --arg min_lr=X)"
    )
    notes.append(
        f"the schedule stands at {counted(n_samples, 'sample')} ({evidence}); --override-opt_param-scheduler takes "
        "all else of it from the run"
    )
    schedule = _schedule(arguments, max_lr, min_lr, decay, n_samples)
    added = (
        Blob("optimizer.optimizer", "value", None, entry, ("optimizer", "optimizer"), is_loaded=True),
        Blob("opt_param_scheduler", "value", None, schedule, ("opt_param_scheduler",), is_loaded=True),
    )
    return MegatronOptimizer(
        added,
        {"use_distributed_optimizer": True, "iteration": step, "consumed_train_samples": n_samples},
        tuple(notes),
    )


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _samples(arguments: Mapping[str, Any], blobs: Sequence[Blob], step: int) -> tuple[int, str]:
    """How many samples the run has seen, and what tells."""
    for name in ("consumed_train_samples", "global_batch_size"):
        given = arguments.get(name)
        if type(given) is int:
            is_total = name == "consumed_train_samples"
            return (given, name) if is_total else (step * given, f"{counted(step, 'step')} of {name} {given:,}")
    seen = next((blob.value for blob in blobs if blob.fqn == _SAMPLES and type(blob.value) is int), None)
    if seen is not None:
        return seen, f"{_SAMPLES} of the source"
    return 0, "nothing says how many were seen: --arg global_batch_size=N does"


def _schedule(
    arguments: Mapping[str, Any], max_lr: float, min_lr: float, decay: float, n_samples: int
) -> dict[str, Any]:
    """What Megatron compares with the run's own schedule (``training.py``, ``get_optimizer_param_scheduler``)."""
    batch = arguments.get("global_batch_size") or 1

    def samples(name: str, default: Any) -> Any:
        """In samples, whether the argument is given in samples or in iterations."""
        if f"{name}_samples" in arguments:
            return arguments[f"{name}_samples"]
        return arguments[f"{name}_iters"] * batch if f"{name}_iters" in arguments else default

    whole = samples("train", 0)
    decayed = samples("lr_decay", whole)
    fraction = arguments.get("lr_warmup_fraction")
    return {
        "max_lr": max_lr,
        "lr_warmup_steps": samples("lr_warmup", 0) if fraction is None else fraction * decayed,
        "num_steps": n_samples,
        "lr_decay_style": arguments.get("lr_decay_style", _SCHEDULE["lr_decay_style"]),
        "lr_decay_steps": decayed,
        "min_lr": min_lr,
        "start_wd": arguments.get("start_weight_decay", decay),
        "end_wd": arguments.get("end_weight_decay", decay),
        "wd_incr_style": arguments.get("weight_decay_incr_style", _SCHEDULE["wd_incr_style"]),
        "wd_incr_steps": whole,
    }
