"""Checkpoints of DeepSpeed made by hand, element by element, as its documentation describes them.

Slow and obvious on purpose: the flat vectors are really concatenated and really cut, so that the reader's arithmetic is
compared with something else than itself.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch

Tensors = Mapping[str, torch.Tensor]
FOLDER = "global_step7/"


def saved(value: Any) -> bytes:
    """The bytes that torch.save writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def numbered(*shape: int, start: int = 0) -> torch.Tensor:
    """fp32 counting up."""
    count = 1
    for size in shape:
        count *= size
    return torch.arange(start, start + count, dtype=torch.float32).reshape(shape)


def states_of(weights: Tensors) -> dict[str, dict[str, torch.Tensor]]:
    """Masters and two moments of each parameter, all elements distinct enough to tell mistakes."""
    return {
        state: {name: (tensor.float() + 0.25) * factor for name, tensor in weights.items()}
        for state, factor in (("fp32", 1.0), ("exp_avg", 3.0), ("exp_avg_sq", 7.0))
    }


def model_state(weights: Tensors, groups: Sequence[Sequence[str]], **more: Any) -> dict[str, Any]:
    """A model state of stages 1 and 2."""
    return {
        "module": dict(weights),
        "buffer_names": [],
        "param_shapes": [{name: weights[name].shape for name in group} for group in groups],
        "shared_params": {},
        "global_steps": 7,
        "dp_world_size": 2,
        "mp_world_size": 1,
        "ds_version": "0.19.8",
        **more,
    }


def stage2_optim(
    states: Mapping[str, Tensors], groups: Sequence[Sequence[str]], world_size: int, rank: int, **more: Any
) -> dict[str, Any]:
    """One rank's optimizer file of stages 1 and 2."""
    parts: dict[str, list[torch.Tensor]] = {}
    tails = []
    for group in groups:
        for state, tensors in states.items():
            flat = torch.cat([torch.zeros(0), *(tensors[name].flatten() for name in group)])
            length = -(-flat.numel() // (2 * world_size)) * 2
            padded = torch.cat([flat, torch.zeros(length * world_size - flat.numel())])
            part = padded[rank * length : (rank + 1) * length].clone()
            tail = min(max((rank + 1) * length - flat.numel(), 0), length)
            parts.setdefault(state, []).append(part[: length - tail] if state == "fp32" else part)
        tails.append(tail)
    moments = [state for state in states if state != "fp32"]
    return {
        "optimizer_state_dict": {
            "single_partition_of_fp32_groups": parts["fp32"],
            "base_optimizer_state": {
                "state": {
                    g: {"step": torch.tensor(7.0), **{state: parts[state][g] for state in moments}}
                    for g in range(len(groups))
                },
                "param_groups": [{"lr": 0.5 + g, "params": [g]} for g in range(len(groups))],
            },
            "zero_stage": 2,
            "group_paddings": tails,
            "partition_count": [world_size] * len(groups),
            **more,
        },
        "ds_version": "0.19.8",
    }


def stage3_optim(
    states: Mapping[str, Tensors], groups: Sequence[Sequence[str]], world_size: int, rank: int, **more: Any
) -> dict[str, Any]:
    """One rank's optimizer file of stage 3."""
    parts: dict[str, list[torch.Tensor]] = {}
    for state, tensors in states.items():
        for group in groups:
            own = []
            for name in group:
                flat = tensors[name].flatten()
                per_rank = -(-flat.numel() // world_size)
                padded = torch.cat([flat, torch.full((per_rank * world_size - flat.numel(),), -1.0)])
                own.append(padded[rank * per_rank : (rank + 1) * per_rank])
            parts.setdefault(state, []).append(torch.cat(own))
    moments = [state for state in states if state != "fp32"]
    return {
        "optimizer_state_dict": {
            "zero_stage": 3,
            "partition_count": world_size,
            "fp32_flat_groups": parts["fp32"],
            "optimizer_state_dict": {
                "state": {
                    g: {"step": torch.tensor(7.0), **{state: parts[state][g] for state in moments}}
                    for g in range(len(groups))
                },
                "param_groups": [{"lr": 0.5 + g, "params": [g]} for g in range(len(groups))],
            },
            **more,
        },
    }


def stage3_model(weights: Tensors, groups: Sequence[Sequence[str]], **more: Any) -> dict[str, Any]:
    """A model state of stage 3: placeholders."""
    found = model_state(weights, groups, **more)
    found["module"] = {name: torch.zeros(0, dtype=torch.bfloat16) for name in weights} | more.get("module", {})
    return found


def stage2(
    weights: Tensors, groups: Sequence[Sequence[str]], world_size: int = 2, mp: int = 0, **more: Any
) -> dict[str, bytes]:
    """The files of one model-parallel rank, stages 1 and 2; ``more`` goes into the model state."""
    states = states_of({name: weights[name] for group in groups for name in group})
    files = {f"mp_rank_{mp:02d}_model_states.pt": model_state(weights, groups, **{"dp_world_size": world_size, **more})}
    for rank in range(world_size):
        name = f"zero_pp_rank_{rank}_mp_rank_{mp:02d}_optim_states.pt"
        files[name] = stage2_optim(states, groups, world_size, rank)
    return {FOLDER + name: saved(value) for name, value in files.items()}


def stage3(weights: Tensors, groups: Sequence[Sequence[str]], world_size: int = 2, **more: Any) -> dict[str, bytes]:
    """The files of stage 3; ``more`` goes into the model states."""
    states = states_of({name: weights[name] for group in groups for name in group})
    files: dict[str, Any] = {}
    for rank in range(world_size):
        model = stage3_model(weights, groups, **{"dp_world_size": world_size, **more})
        files[f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"] = model
        files[f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = stage3_optim(states, groups, world_size, rank)
    return {FOLDER + name: saved(value) for name, value in files.items()}


def with_latest(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """``files`` with the tracker."""
    return {**files, "latest": FOLDER.rstrip("/").encode()}
