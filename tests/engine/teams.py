"""What the tests of several processes have in common, wherever these write: the processes are threads here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from ckpt_tool.engine.base import EngineOptions, RunReport
from ckpt_tool.engine.team import Share
from ckpt_tool.engine.worker import Worker
from ckpt_tool.errors import CkptError, StorageError, UsageError

__all__ = ["MISFITS", "OPTIONS", "check_misfit", "check_reports", "lose", "together"]

OPTIONS = EngineOptions(1 << 20, 1, durable=True)
MISFITS = [
    (Share(1, 3), 64, "told of 2 processes, this one of 3"),
    (Share(1, 2), 4096, "another plan than the first"),
]
"""A second process, its bytes of a unit, and what it is told by a first one with two processes and 64 bytes."""


def together(parts: Sequence[Callable[[], RunReport]]) -> list[RunReport | CkptError]:
    """What each part returned or raised, all of them at once."""
    found: list[RunReport | CkptError | None] = [None] * len(parts)

    def one(number: int) -> None:
        try:
            found[number] = parts[number]()
        except CkptError as error:
            found[number] = error

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [result for result in found if result is not None]


def check_reports(results: Sequence[RunReport | CkptError], *, has_resumed: bool = False) -> None:
    """Nobody failed, and the first one found something done."""
    assert all(isinstance(result, RunReport) for result in results), results
    if has_resumed:
        assert isinstance(results[0], RunReport)
        assert results[0].resumed_nbytes > 0


def check_misfit(results: Sequence[RunReport | CkptError], message: str) -> None:
    """Both are told that they do not fit together."""
    first, second = results
    assert isinstance(first, UsageError)
    assert "process 2 of 2 was started in another way" in str(first)
    assert isinstance(second, UsageError)
    assert message in str(second)


def lose(monkeypatch: pytest.MonkeyPatch, lost: int) -> None:
    """Make the process that gets to this unit fail there."""
    run_unit = Worker.run_unit

    def failing(self: Worker, unit: int, progress: Callable[[int], None]) -> object:
        if unit == lost:
            raise StorageError("lost power")
        return run_unit(self, unit, progress)

    monkeypatch.setattr(Worker, "run_unit", failing)
