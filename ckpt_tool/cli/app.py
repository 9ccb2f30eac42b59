"""``ckpt``, the program: a process is set up for a short life, then the command line is loaded and run."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from io import TextIOWrapper
from typing import NoReturn

__all__ = ["main", "run"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``ckpt`` with these arguments (the process's by default) and return its exit status."""
    from ckpt_tool.cli.commands import app  # typer and what it imports are half of the objects of a short command

    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names and drawings on a terminal that has no such letters
    try:
        app(args=argv, prog_name="ckpt")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    return 0


def _open_streams() -> None:
    """Give the null device to streams that were closed before the start (``>&-``): files would take their numbers."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if stream is None:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - as long as the process
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def run() -> NoReturn:
    """The program ``ckpt``: ``main`` in a process of its own, set up for a short life before anything is imported."""
    _open_streams()
    # Most of what a command makes lives until its end, so young objects are looked at three hundred times less often.
    gc.set_threshold(200_000, 50, 100)
    # Threads that numpy's linear algebra starts on import would never get work here.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    status = main()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # the reader of a pipe has gone, as with `ckpt ls | head -1`
        pass
    # Taking the interpreter apart object by object would cost 20 to 40 ms. All files are closed or flushed by now, and
    # workers have ended: `main` returns behind them.
    os._exit(status)
