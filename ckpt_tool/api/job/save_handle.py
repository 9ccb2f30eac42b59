"""A handle stands for a save that may be under way; the result of one is what it wrote."""

from __future__ import annotations

import threading
from concurrent.futures import Future, wait
from typing import Any, Protocol

from ckpt_tool.engine.save.log import Operation, OperationLog
from ckpt_tool.engine.save.wire import rebuilt
from ckpt_tool.errors import CkptError, StorageError
from ckpt_tool.records import dataclass

__all__ = ["SaveHandle", "SaveResult", "Verdicts"]

_GRACE_S = 30.0
"""How much longer than the writer process, which tells of timeouts itself, a rank waits."""


class Verdicts(Protocol):
    """Who knows how saves end."""

    rank: int
    log: OperationLog

    def verdict(self, number: int, timeout_s: float, *, hurry: bool) -> dict[str, Any] | None:
        """How a save ended, None when it has not within ``timeout_s``; told once."""
        ...

    def has_ended(self, number: int) -> bool:
        """Whether a save has ended."""
        ...


@dataclass(frozen=True, slots=True)
class SaveResult:
    """A save that is complete."""

    url: str
    payload_nbytes: int
    """Bytes of tensors that this rank wrote."""
    nbytes: int
    """Bytes of the whole checkpoint."""
    operations: tuple[Operation, ...]
    """What this rank did."""


class SaveHandle:
    """A save that may be under way."""

    def __init__(
        self, saver: Verdicts, number: int, url: str, step: int, staged: Future[None], timeout_s: float
    ) -> None:
        self.url = url
        self._saver = saver
        self._number = number
        self._step = step
        self._staged = staged
        self._timeout_s = timeout_s
        self._settling = threading.Lock()
        self._result: SaveResult | None = None
        self._error: CkptError | None = None
        self.operations: list[Operation] = []
        self.is_looked_at = False

    def wait_staged(self) -> None:
        """Return when the state may be changed.

        Raises:
            BaseException: this rank could not stage, by whatever torch raised.
        """
        try:
            self._staged.result()
        except BaseException:
            self.is_looked_at = True
            raise

    def await_staging(self) -> None:
        """Return when nothing is copied any more, well or not."""
        wait([self._staged])

    def done(self) -> bool:
        """Whether the save has ended, well or not; does not wait."""
        return self._is_over() or (self._staged.done() and self._saver.has_ended(self._number))

    def wait(self, timeout_s: float | None = None) -> SaveResult:
        """The result, awaited.

        Args:
            timeout_s: longest wait; None for as long as the save itself may take.

        Raises:
            CkptError: the save failed, on whichever rank; nothing was committed.
            StorageError: it has not ended in time.
        """
        self.is_looked_at = True
        limit = self._timeout_s + _GRACE_S if timeout_s is None else timeout_s
        if self._settling.acquire(timeout=limit):  # the end is told once, to whichever thread asks first
            try:
                if not self._is_over():
                    self._staged.result()
                    self._settle(limit, hurry=True)
            finally:
                self._settling.release()
        if self._error is not None:
            raise self._error
        if self._result is None:
            raise StorageError("the save has not ended yet", where=self.url)
        return self._result

    @property
    def result(self) -> SaveResult:
        """The same as ``wait()``."""
        return self.wait()

    def settle(self) -> CkptError | None:
        """Take up an end that is known; the error that nobody has been told of."""
        if self._settling.acquire(blocking=False):
            try:
                if not self._is_over() and self.done():
                    self._settle(0.0, hurry=False)
            finally:
                self._settling.release()
        return None if self.is_looked_at else self._error

    def _is_over(self) -> bool:
        return self._result is not None or self._error is not None

    def _settle(self, timeout_s: float, *, hurry: bool) -> None:
        verdict = self._saver.verdict(self._number, timeout_s, hurry=hurry)
        if verdict is None:
            return
        rank = self._saver.rank
        self.operations += [Operation(rank, self._step, *each) for each in verdict.get("operations", ())]
        if verdict["error"] is not None:
            self._error = rebuilt(verdict["error"])
        else:
            operations = tuple(self.operations)
            self._result = SaveResult(self.url, verdict["payload_nbytes"], verdict["nbytes"], operations)
        self._saver.log.extend(self.operations)
