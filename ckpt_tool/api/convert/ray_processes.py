"""Several processes of a Ray cluster for one conversion: tasks of the cluster, and the caller's process is the first.

All of them see source and target under the same paths: a shared file system. Ray only starts them; they share the work
as any others do. Written against Ray 2.60.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ckpt_tool.api.convert.conversion import Conversion
from ckpt_tool.api.convert.processes import run_share
from ckpt_tool.engine.team import Share
from ckpt_tool.errors import CkptError, StorageError, UsageError

__all__ = ["ray_processes"]

_GRACE_S = 10.0


@contextmanager
def ray_processes(prepare: Callable[..., Conversion], options: Mapping[str, Any], count: int) -> Iterator[Share]:
    """As ``processes``; joins the cluster that RAY_ADDRESS names, or starts one on this machine for the while.

    Raises:
        UsageError: Ray is not installed.
        StorageError: Ray does not start, or one of the tasks failed; the message is its own.
    """
    try:
        import ray
    except ImportError as error:
        raise UsageError("--engine ray needs Ray", hint="pip install 'ckpt-tool[ray]'") from error
    is_ours = not ray.is_initialized()
    if is_ours:
        try:
            ray.init(log_to_driver=False, include_dashboard=False, configure_logging=False)
        except Exception as error:  # of no class of its own
            hint = 'see that "ray status" answers for RAY_ADDRESS, or leave out --engine: --processes needs no cluster'
            raise StorageError(f"Ray does not start: {error}", hint=hint) from error
    task = ray.remote(num_cpus=1, max_retries=0, scheduling_strategy="SPREAD")(run_share)
    run = secrets.token_hex(8)
    tasks = [task.remote(prepare, dict(options), Share(index, count, run)) for index in range(1, count)]
    try:
        yield Share(0, count, run)
    except CkptError as error:
        ended, _ = ray.wait(tasks, num_returns=len(tasks), timeout=_GRACE_S)
        told = [text for text in ray.get(ended) if text]
        if told:
            raise StorageError(told[0], hint=error.hint) from error
        raise
    finally:
        if is_ours:
            ray.shutdown()
