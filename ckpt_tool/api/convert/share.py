"""Which share of the work a process has: as its launcher's environment says, or as was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_tool.api.checkpoint import DEFAULT_MEMORY_BYTES
from ckpt_tool.api.workers import moving_workers
from ckpt_tool.engine.team import Share
from ckpt_tool.errors import UsageError

__all__ = ["launched_share", "local_count", "parse_share", "shared_options"]

# Variables for rank and number, and those that together name the run. torchrun starts processes under any of the
# others too, so it comes first. Of Slurm only what `srun` sets counts: a batch script has a SLURM_PROCID of its own.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE", ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")),
    ("PMI_RANK", "PMI_SIZE", ("PMI_JOBID", "HYDI_CONTROL_FD")),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ("SLURM_JOB_ID", "SLURM_STEP_ID")),
)
_LOCAL_COUNTS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_TASKS_PER_NODE")


def launched_share(environment: Mapping[str, str]) -> tuple[Share, str] | None:
    """The share of a process that torchrun, mpirun or srun has started with others, and the variables that say so.

    >>> launched_share({"RANK": "1", "WORLD_SIZE": "4"})
    (Share(index=1, count=4, run=None), 'RANK and WORLD_SIZE')
    >>> launched_share({"RANK": "0", "WORLD_SIZE": "1"})

    Raises:
        UsageError: the variables contradict each other.
    """
    for rank, size, names in _LAUNCHERS:
        if rank in environment and size in environment:
            where = f"{rank} and {size}"
            share = _share(environment[rank], environment[size], where)
            named = [environment[name] for name in names if name in environment]
            if share.count == 1:
                return None
            return Share(share.index, share.count, " ".join(named) or None), where
    return None


def local_count(environment: Mapping[str, str]) -> int:
    """How many processes of the run are on this machine, as far as the launcher says; 1 where it does not."""
    for name in _LOCAL_COUNTS:
        text = environment.get(name, "").partition("(")[0].partition(",")[0]
        if text.isdigit():
            return max(int(text), 1)
    return 1


def parse_share(text: str) -> Share | None:
    """``0/4`` is the first of four processes; None for the only one.

    >>> parse_share("3/4"), parse_share("0/1")
    (Share(index=3, count=4, run=None), None)

    Raises:
        UsageError: not of this form.
    """
    index, _, count = text.partition("/")
    share = _share(index, count, f"--split {text}")
    return share if share.count > 1 else None


def _share(index: str, count: str, where: str) -> Share:
    if not (index.isdigit() and count.isdigit() and int(index) < int(count)):
        raise UsageError(
            f"expected a process's number from 0 and how many there are, got {index!r} and {count!r}",
            where=where,
            hint="the first of four is --split 0/4, the last 3/4; one alone is 0/1",
        )
    return Share(int(index), int(count))


def shared_options(options: Mapping[str, Any], n_processes: int) -> dict[str, Any]:
    """Arguments of a conversion for each of several processes of one machine, which share its threads and memory."""
    n_workers = options.get("n_workers") or max(1, moving_workers() // n_processes)
    memory = options.get("memory_budget_bytes", DEFAULT_MEMORY_BYTES) // n_processes
    return {**options, "n_workers": n_workers, "memory_budget_bytes": memory}
