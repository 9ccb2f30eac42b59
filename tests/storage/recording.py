"""A store that notes every range that is read of another: for tests of how many requests something costs."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_tool.manifest.model import FileRange
from ckpt_tool.storage.store import Listing, Store


@dataclass(frozen=True, slots=True)
class ReadCall:
    """One request for bytes."""

    path: str
    offset: int
    length: int


class RecordingStore:
    """``inner``, with a record of what was read from it. Safe to use from several threads."""

    def __init__(self, inner: Store) -> None:
        self.url = inner.url
        self.cost = inner.cost
        self._inner = inner
        self._lock = threading.Lock()
        self._calls: list[ReadCall] = []

    @property
    def calls(self) -> tuple[ReadCall, ...]:
        """All requests so far, in the order in which they were made; failed ones too."""
        with self._lock:
            return tuple(self._calls)

    @property
    def nbytes(self) -> int:
        """Sum of the lengths of ``calls``."""
        return sum(call.length for call in self.calls)

    def clear(self) -> None:
        """Forget all calls."""
        with self._lock:
            self._calls.clear()

    def listing(self, *, anew: bool = False) -> Listing:
        """Listing of ``inner``; not recorded."""
        return self._inner.listing(anew=anew)

    def read(self, path: str, offset: int, length: int) -> bytes:
        """As ``inner``; one call."""
        self._note([ReadCall(path, offset, length)])
        return self._inner.read(path, offset, length)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """As ``inner``; one call."""
        self._note([ReadCall(path, offset, buffer.nbytes)])
        self._inner.read_into(path, offset, buffer)

    def fetch(self, ranges: Sequence[FileRange]) -> list[bytes]:
        """As ``inner``; one call for each range."""
        self._note([ReadCall(r.path, r.offset, r.length) for r in ranges])
        return self._inner.fetch(ranges)

    def close(self) -> None:
        """Close ``inner``; the record stays."""
        self._inner.close()

    def _note(self, calls: list[ReadCall]) -> None:
        with self._lock:
            self._calls += calls
