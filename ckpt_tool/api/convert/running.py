"""How a conversion runs, whatever it makes: the options that all of them take alike, and their defaults."""

from __future__ import annotations

import os
from typing import TypedDict

from ckpt_tool.api.arguments import check_arguments
from ckpt_tool.api.checkpoint import DEFAULT_MEMORY_BYTES
from ckpt_tool.api.convert.conversion import Execution, manifest_url_for
from ckpt_tool.api.workers import moving_workers
from ckpt_tool.engine.team import Share

__all__ = ["Running", "execution_of"]


class Running(TypedDict, total=False):
    """Keywords of ``prepare_reshard`` and ``prepare_export``."""

    memory_budget_bytes: int
    """Bound for all buffers; 1 GiB."""
    n_workers: int | None
    """Threads; None, the default, for a number that suits the machine."""
    overwrite: bool
    """Replace what is at the target; False."""
    resume: bool
    """Go on with an unfinished target; False."""
    durable: bool
    """Fsync before the target gets its name; True."""
    digest: str | os.PathLike[str] | None
    """Where to record what each tensor holds, on the way: ``beside`` (``TARGET.digests.json``), the default, a path or
    a URL, None for nowhere."""
    share: Share | None
    """Which part of the work is this process's, where several were started with equal arguments; None for all."""


def _check(running: Running, function: str) -> None:
    """Refuse what is none of these, as Python does where a signature names them.

    Raises:
        TypeError: an unknown keyword.
        UsageError: a number that is none.
    """
    unknown = sorted(running.keys() - Running.__annotations__.keys())
    if unknown:
        raise TypeError(f"{function}() got an unexpected keyword argument {unknown[0]!r}")
    check_arguments(**{name: (running.get(name), 1) for name in ("memory_budget_bytes", "n_workers")})


def execution_of(target: str | os.PathLike[str], running: Running, function: str) -> Execution:
    """The options with their defaults, which ``function`` was given.

    Raises:
        TypeError: an unknown keyword.
        UsageError: a number that is none.
    """
    _check(running, function)
    return Execution(
        running.get("memory_budget_bytes", DEFAULT_MEMORY_BYTES),
        moving_workers(running.get("n_workers")),
        running.get("overwrite", False),
        running.get("resume", False),
        running.get("durable", True),
        manifest_url_for(target, running.get("digest", "beside")),
        running.get("share"),
    )
