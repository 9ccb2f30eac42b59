"""Processes that stand for ranks of a job: forks of one that has torch imported, which is most of what a rank costs.

They have the environment of the moment at which the first of them was started: a job that needs another one is spawned.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from typing import Any

import torch.multiprocessing


def ranks_context() -> ForkServerContext:
    """Where such processes come from, one by one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.job.faults"])
    return context


def start_ranks(job: Callable[..., None], args: tuple[Any, ...], size: int) -> None:
    """Run ``job(rank, *args)`` in ``size`` processes until all have ended; an error of one ends all, and is raised."""
    ranks_context()
    torch.multiprocessing.start_processes(job, args, size, start_method="forkserver")
