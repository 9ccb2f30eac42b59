"""Real checkpoints that the tool moved to other layouts, and what torch itself reads in the originals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckpt_tool.api.convert.reshard import reshard
from tests.acceptance.checkpoints import Case, cases, truth

__all__ = ["LAYOUTS", "Written", "bits", "case_named", "expected_tensors", "leaves", "restored", "write_all"]

TORCH_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "U8": "uint8", "BOOL": "bool",
}  # fmt: skip

# Each real checkpoint goes into a layout that is not its own.
LAYOUTS: Mapping[str, dict[str, Any]] = {
    "torch/dcp_fsdp2_4r_fp32": {"tp": 2, "pp": 2, "dp": 2},
    "torch/dcp_fsdp2_tp_2x2": {"tp": 4},
    "torch/hf_sharded": {"tp": 2, "dp": 2},
    "torch/verl_4r_bf16": {"dp": 3},
    "deepspeed/accelerate_fsdp2": {"pp": 2, "tp": 2},
    "deepspeed/torchtitan_dp2tp2": {"dp": 3},
}


@dataclass(frozen=True)
class Written:
    """One checkpoint that the tool wrote."""

    case: Case
    root: Path
    tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]] = field(repr=False)
    """torch's dtype, shape and bytes by fqn: the truth that torch gathered when it saved."""


def case_named(name: str) -> Case:
    """A real checkpoint."""
    return next(case for case in cases() if case.name == name)


def expected_tensors(case: Case) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """The truth with torch's names of dtypes; tensors that files number are left out."""
    return {
        fqn: (TORCH_NAMES[dtype], shape, data)
        for fqn, (dtype, shape, data) in truth(case).items()
        if not fqn.startswith("@")
    }


def write_all(folder: Path, to: str) -> dict[str, Written]:
    """Every checkpoint in its new layout, below ``folder``."""
    found = {}
    for name, layout in LAYOUTS.items():
        case = case_named(name)
        root = folder / name.replace("/", "-")
        reshard(case.url, root, to=to, default="replicate", rank_state="drop", durable=False, **layout)
        found[name] = Written(case, root, expected_tensors(case))
    return found


def bits(value: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    """Dtype, shape and bytes of a tensor."""
    raw = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(value.dtype).removeprefix("torch."), tuple(value.shape), raw


def restored(root: Path, scratch: Path) -> Any:
    """What torch's own converter makes of a DCP folder: one nested dict."""
    scratch.mkdir(parents=True, exist_ok=True)
    dcp_to_torch_save(root, scratch / "whole.pt")
    return torch.load(scratch / "whole.pt", weights_only=False)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """Tensors (as bits) and values of a nested state by their keys; empty dicts and lists are leaves."""
    if isinstance(value, torch.Tensor):
        return {path: bits(value)}
    if isinstance(value, Mapping) and value:
        items = list(value.items())
    elif isinstance(value, list) and value:
        items = list(enumerate(value))
    else:
        return {path: _comparable(value)}
    return {key: leaf for part, inner in items for key, leaf in leaves(inner, (*path, part)).items()}


def _comparable(value: Any) -> Any:
    """Arrays as their bytes, also inside of tuples, as numpy's random state has them."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    return tuple(_comparable(part) for part in value) if isinstance(value, tuple) else value
