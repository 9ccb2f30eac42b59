"""Jobs run in threads; what is to be done with their results is done by the thread that looks for them."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["Jobs"]


class Jobs:
    """Threads whose results are taken up by one thread, which waits on ``fileno``."""

    def __init__(self) -> None:
        self._finished: deque[Callable[[], None]] = deque()
        self._read, self._write = os.pipe()

    def fileno(self) -> int:
        """Readable when results are there."""
        return self._read

    def start(
        self, work: Callable[[], Any], on_result: Callable[[Any], None], on_error: Callable[[BaseException], None]
    ) -> None:
        """Run ``work`` in a thread; one of the two others is called by ``run_finished``."""

        def run() -> None:
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001 - handed on
                self._finish(lambda error=error: on_error(error))  # type: ignore[misc]
            else:
                self._finish(lambda: on_result(result))

        threading.Thread(target=run, daemon=True).start()

    def run_finished(self) -> None:
        """Take up the results that are there."""
        os.read(self._read, 4096)
        while self._finished:
            self._finished.popleft()()

    def _finish(self, call: Callable[[], None]) -> None:
        self._finished.append(call)
        os.write(self._write, b"!")
