"""The iteration that a target is written as: Megatron finds a checkpoint by it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_tool.errors import Unsupported

__all__ = ["iteration_of"]


def iteration_of(info: Mapping[str, Any]) -> tuple[int | None, str]:
    """The iteration, None for a release, and the name of its folder.

    Raises:
        Unsupported: it is not known.
    """
    if str(info.get("folder", "")).rpartition("/")[2] == "release":
        return None, "release"
    step = info.get("step")
    if type(step) is not int or step < 0:
        raise Unsupported(
            f"the iteration is not known (found {step!r}), by which Megatron finds a checkpoint",
            hint="Megatron's formats take checkpoints of Megatron, whose common state has it",
        )
    return step, f"iter_{step:07d}"
