"""A conversion by one process or several: started by a launcher, by hand with --split, or here with --processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ckpt_tool.cli.output import Output
from ckpt_tool.cli.text import line
from ckpt_tool.errors import UsageError

if TYPE_CHECKING:
    from ckpt_tool.api.convert.conversion import Conversion

__all__ = ["prepared", "process_count"]


def process_count(processes: int, engine: str, *, dry_run: bool) -> int:
    """How many processes share the work: one where it is only planned.

    Raises:
        UsageError: an engine is to start processes, and there is one.
    """
    if engine == "ray" and processes == 1:
        raise UsageError("--engine ray starts the --processes, and there is one", hint="add --processes N")
    return 1 if dry_run else processes


@contextmanager
def prepared(
    sink: Output,
    prepare: Callable[..., Conversion],
    options: Mapping[str, Any],
    *,
    split: str | None,
    n_processes: int,
    engine: str,
) -> Iterator[Conversion]:
    """The conversion that ``prepare`` makes of ``options``, for this process; the others run until the block ends.

    Raises:
        UsageError: both ways to share the work were asked for.
    """
    from ckpt_tool.api.convert.share import launched_share, local_count, parse_share, shared_options

    if n_processes > 1:
        if split is not None:
            raise UsageError("--processes starts processes, --split names one of several that were started: give one")
        if engine == "ray":
            from ckpt_tool.api.convert.ray_processes import ray_processes

            with ray_processes(prepare, options, n_processes) as first:
                yield prepare(**options, share=first)
            return
        from ckpt_tool.api.convert.processes import processes

        shared = shared_options(options, n_processes)
        with processes(prepare, shared, n_processes) as first:
            yield prepare(**shared, share=first)
        return
    launched = launched_share(os.environ) if split is None else None
    share = parse_share(split) if split is not None else None
    if launched is not None:
        share, why = launched
        sink.talk([line(f"{share}, by {why}; --split 0/1 runs alone")])
    if share is None:
        yield prepare(**options)
        return
    # Memory is each process's own; threads are the machine's.
    shared = {**options, "n_workers": shared_options(options, local_count(os.environ))["n_workers"]}
    yield prepare(**shared, share=share)
