"""A progress bar: bytes, rate and time left, on a terminal's stderr; elsewhere nothing.

Listens to the engine's events; knows nothing of what is moved.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckpt_tool.cli.output import Output
from ckpt_tool.sizes import format_bytes

if TYPE_CHECKING:
    from ckpt_tool.engine.base import Progress

__all__ = ["progress_bar"]

_BETWEEN_S = 0.1
"""Between two drawings, at least."""


@contextmanager
def progress_bar(sink: Output, what: str) -> Iterator[Callable[[Progress], None] | None]:
    """A callback that moves the bar, None where there is no terminal to draw on or all is to be quiet."""
    if sink.mode == "quiet" or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.text import Text

    class RateColumn(ProgressColumn):
        """Bytes per second in the units of everything else here; rich's own column counts in powers of 1000."""

        def render(self, task: Task) -> Text:
            """The rate, once there is one."""
            speed = task.finished_speed or task.speed
            return Text(f"{format_bytes(round(speed))}/s" if speed else "", style="red")

    console = Console(stderr=True)
    bar_columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        DownloadColumn(binary_units=True),
        RateColumn(),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
    )
    # Drawn by whoever tells of progress: a thread of its own would keep this process from being forked.
    with Bar(*bar_columns, console=console, transient=True, expand=True, auto_refresh=False) as bar:
        task = bar.add_task(what, total=None)
        drawn = 0.0

        def moved(event: Progress) -> None:
            nonlocal drawn
            now = time.monotonic()
            bar.update(task, completed=event.done_nbytes, total=event.total_nbytes)
            if now - drawn >= _BETWEEN_S:
                drawn = now
                bar.refresh()

        yield moved
