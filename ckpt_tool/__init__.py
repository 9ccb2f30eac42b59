"""Look at, check, reshard and export training checkpoints of any framework, without the framework.

The names below are loaded on first use, so that importing the package costs nothing. What is raised on purpose is a
``CkptError``, with ``where`` and a ``hint``; ``ckpt_tool.errors`` has the kinds.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what _EXPORTS loads, for type checkers and editors
    from ckpt_tool.api.cat import cat as cat
    from ckpt_tool.api.checkpoint import Checkpoint as Checkpoint
    from ckpt_tool.api.checkpoint import TensorView as TensorView
    from ckpt_tool.api.checkpoint import open_checkpoint as open  # noqa: A004 - called ckpt_tool.open
    from ckpt_tool.api.convert.edit import edit as edit
    from ckpt_tool.api.convert.edit_names import NameChanges as NameChanges
    from ckpt_tool.api.convert.export import export as export
    from ckpt_tool.api.convert.export import prepare_export as plan_export
    from ckpt_tool.api.convert.reshard import prepare_reshard as plan_reshard
    from ckpt_tool.api.convert.reshard import reshard as reshard
    from ckpt_tool.api.digest import digests as digests
    from ckpt_tool.api.inspect import inspect as inspect
    from ckpt_tool.api.job.extra_state import load_extra_state as load_extra_state
    from ckpt_tool.api.job.load import load as load
    from ckpt_tool.api.job.save import save as save
    from ckpt_tool.api.runs.clean import clean as clean
    from ckpt_tool.api.runs.ls import ls as ls
    from ckpt_tool.api.shard_map import shard_map as shard_map
    from ckpt_tool.api.stream import stream as stream
    from ckpt_tool.api.trust.diff import diff as diff
    from ckpt_tool.api.trust.salvage import salvage as salvage
    from ckpt_tool.api.trust.verify import verify as verify
    from ckpt_tool.dtypes import DType as DType
    from ckpt_tool.errors import CkptError as CkptError
    from ckpt_tool.geometry.box import Box as Box

__version__ = "0.1.0"

_EXPORTS: dict[str, tuple[str, str]] = {
    "Box": ("ckpt_tool.geometry.box", "Box"),
    "cat": ("ckpt_tool.api.cat", "cat"),
    "Checkpoint": ("ckpt_tool.api.checkpoint", "Checkpoint"),
    "CkptError": ("ckpt_tool.errors", "CkptError"),
    "clean": ("ckpt_tool.api.runs.clean", "clean"),
    "diff": ("ckpt_tool.api.trust.diff", "diff"),
    "digests": ("ckpt_tool.api.digest", "digests"),
    "DType": ("ckpt_tool.dtypes", "DType"),
    "edit": ("ckpt_tool.api.convert.edit", "edit"),
    "export": ("ckpt_tool.api.convert.export", "export"),
    "inspect": ("ckpt_tool.api.inspect", "inspect"),
    "load": ("ckpt_tool.api.job.load", "load"),
    "load_extra_state": ("ckpt_tool.api.job.extra_state", "load_extra_state"),
    "ls": ("ckpt_tool.api.runs.ls", "ls"),
    "NameChanges": ("ckpt_tool.api.convert.edit_names", "NameChanges"),
    "open": ("ckpt_tool.api.checkpoint", "open_checkpoint"),
    "plan_export": ("ckpt_tool.api.convert.export", "prepare_export"),
    "plan_reshard": ("ckpt_tool.api.convert.reshard", "prepare_reshard"),
    "reshard": ("ckpt_tool.api.convert.reshard", "reshard"),
    "salvage": ("ckpt_tool.api.trust.salvage", "salvage"),
    "save": ("ckpt_tool.api.job.save", "save"),
    "shard_map": ("ckpt_tool.api.shard_map", "shard_map"),
    "stream": ("ckpt_tool.api.stream", "stream"),
    "TensorView": ("ckpt_tool.api.checkpoint", "TensorView"),
    "verify": ("ckpt_tool.api.trust.verify", "verify"),
}
__all__ = [
    "Box",
    "Checkpoint",
    "CkptError",
    "DType",
    "NameChanges",
    "TensorView",
    "__version__",
    "cat",
    "clean",
    "diff",
    "digests",
    "edit",
    "errors",
    "export",
    "inspect",
    "load",
    "load_extra_state",
    "ls",
    "open",
    "plan_export",
    "plan_reshard",
    "reshard",
    "salvage",
    "save",
    "shard_map",
    "stream",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Load an exported name from the module that defines it."""
    if name == "errors":
        return import_module("ckpt_tool.errors")
    place = _EXPORTS.get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(place[0]), place[1])


def __dir__() -> list[str]:
    """The exported names."""
    return sorted(__all__)
