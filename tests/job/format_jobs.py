"""Processes of a job that save in every format that ranks write together, and load what one process alone saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import ckpt_tool
from tests.job.save_jobs import LAYOUTS as PLACEMENTS
from tests.job.save_jobs import bits, cut, truth
from tests.job.workers import joined

FORMATS = ("dcp", "safetensors", "bytecheckpoint")
LAYOUTS = ("rows", "fsdp x tp", "plain")
"""As FSDP2, FSDP2 with tensor parallelism, and DDP cut."""


def state_of(layout: str, *, is_empty: bool = False) -> dict[str, Any]:
    """A model with its optimizer, numbers, texts, and what a trainer keeps for itself; ``is_empty`` to be filled."""
    tensors = {name: torch.zeros_like(tensor) if is_empty else tensor for name, tensor in truth().items()}
    held = {name: cut(tensor, PLACEMENTS[layout]) for name, tensor in tensors.items()}
    moments = {name: {"exp_avg": cut(tensor, PLACEMENTS[layout])} for name, tensor in tensors.items()}
    step = torch.tensor(0.0 if is_empty else 3.0)
    return {
        "model": held,
        "optim": {
            "state": {name: {**moment, "step": step.clone()} for name, moment in moments.items()},
            "param_groups": [{"lr": 0.0 if is_empty else 0.5, "params": [] if is_empty else list(tensors)}],
        },
        "train_state": {"n_tokens": torch.tensor(0 if is_empty else 99), "seen": {3: 0 if is_empty else 4}},
        "step": 0 if is_empty else 12,
        "note": None if is_empty else "a text",
    }


def differences(layout: str, state: dict[str, Any]) -> list[str]:
    """Names of what is not as it was saved."""
    expected = state_of(layout)
    found, wanted = dict(_leaves("", state)), dict(_leaves("", expected))
    return [name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name)]


def _leaves(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _leaves(f"{name}.{key}", each)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for position, each in enumerate(value):
            yield from _leaves(f"{name}.{position}", each)
    else:
        yield name, bits(value) if isinstance(value, torch.Tensor) else value


def extra_of(rank: int) -> dict[str, Any]:
    """What a rank keeps for itself."""
    return {"rng": torch.full((3,), rank), "name": f"rank {rank}"}


def run(rank: int, size: int, rendezvous: str, out: str) -> None:
    """Load what ``one`` saved into every layout, then save every layout in every format."""
    with joined(rank, size, rendezvous):
        found = {}
        for name in FORMATS:
            for layout in LAYOUTS:
                state = state_of(layout, is_empty=True)
                ckpt_tool.load(state, f"{out}/one/{name}")
                found[f"{name} to {layout}"] = differences(layout, state)
                url = f"{out}/{size}/{name}/{layout}"
                ckpt_tool.save(state_of(layout), url, format=name, extra_state=extra_of(rank), durable=False).wait()
        Path(f"{out}/{rank}.json").write_text(json.dumps(found), encoding="utf-8")
