"""Look at, check, reshard and export training checkpoints of any framework, without the framework.

The names below are loaded on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__: list[str] = ["__version__"]

_EXPORTS: dict[str, tuple[str, str]] = {
    "Checkpoint": ("ckpt_tool.api.checkpoint", "Checkpoint"),
    "NameChanges": ("ckpt_tool.api.convert.edit_names", "NameChanges"),
    "TensorView": ("ckpt_tool.api.checkpoint", "TensorView"),
    "cat": ("ckpt_tool.api.cat", "cat"),
    "clean": ("ckpt_tool.api.runs.clean", "clean"),
    "diff": ("ckpt_tool.api.trust.diff", "diff"),
    "digests": ("ckpt_tool.api.digest", "digests"),
    "edit": ("ckpt_tool.api.convert.edit", "edit"),
    "export": ("ckpt_tool.api.convert.export", "export"),
    "inspect": ("ckpt_tool.api.inspect", "inspect"),
    "ls": ("ckpt_tool.api.runs.ls", "ls"),
    "load": ("ckpt_tool.api.job.load", "load"),
    "load_extra_state": ("ckpt_tool.api.job.extra_state", "load_extra_state"),
    "open": ("ckpt_tool.api.checkpoint", "open_checkpoint"),
    "plan_export": ("ckpt_tool.api.convert.export", "prepare_export"),
    "plan_reshard": ("ckpt_tool.api.convert.reshard", "prepare_reshard"),
    "reshard": ("ckpt_tool.api.convert.reshard", "reshard"),
    "salvage": ("ckpt_tool.api.trust.salvage", "salvage"),
    "save": ("ckpt_tool.api.job.save", "save"),
    "shard_map": ("ckpt_tool.api.shard_map", "shard_map"),
    "stream": ("ckpt_tool.api.stream", "stream"),
    "verify": ("ckpt_tool.api.trust.verify", "verify"),
}


def __getattr__(name: str) -> Any:
    """Load an exported name from the module that defines it."""
    place = _EXPORTS.get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(place[0]), place[1])


def __dir__() -> list[str]:
    """The exported names."""
    return sorted([*__all__, *_EXPORTS])
