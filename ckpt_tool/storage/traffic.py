"""Traffic is what a piece of work asked of remote storage: requests and bytes, counted where they are sent.

Whoever wants to know opens a `counting` block; stores and targets that are made inside it count there, from whatever
thread. Through fsspec, what counts is what fsspec is asked, a file that is written as one. Local files are not counted:
their requests cost nothing that a person pays for.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from ckpt_tool.records import dataclass, field

__all__ = ["Traffic", "counting", "current_traffic"]


@dataclass(slots=True)
class Traffic:
    """Running totals; every attempt is a request."""

    n_requests: int = 0
    n_listings: int = 0
    """Pages of listings, among the requests."""
    n_retries: int = 0
    """Requests that repeat a failed one, among the requests."""
    received_nbytes: int = 0
    """Content of files that was asked for and came; no listings, no error texts."""
    sent_nbytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def note(self, *, listings: int = 0, received: int = 0, sent: int = 0, requests: int = 1, retries: int = 0) -> None:
        """Count what was done."""
        with self._lock:
            self.n_requests += requests
            self.n_listings += listings
            self.n_retries += retries
            self.received_nbytes += received
            self.sent_nbytes += sent

    def note_retry(self) -> None:
        """Count that the next request repeats one; the request itself is counted when it is sent."""
        self.note(requests=0, retries=1)

    def add(self, totals: Mapping[str, int]) -> None:
        """Count what another process has counted, as ``to_json`` gives it."""
        self.note(**{name.removeprefix("n_").removesuffix("_nbytes"): n for name, n in totals.items()})

    def to_json(self) -> dict[str, int]:
        """The totals by name."""
        return {
            "n_requests": self.n_requests,
            "n_listings": self.n_listings,
            "n_retries": self.n_retries,
            "received_nbytes": self.received_nbytes,
            "sent_nbytes": self.sent_nbytes,
        }


_current: ContextVar[Traffic | None] = ContextVar("ckpt_traffic", default=None)


def current_traffic() -> Traffic:
    """Where to count: that of the innermost block, or one that nobody looks at."""
    found = _current.get()
    return Traffic() if found is None else found


@contextmanager
def counting() -> Iterator[Traffic]:
    """A block whose stores and targets count together.

    >>> with counting() as traffic:
    ...     current_traffic().note(received=5)
    >>> (traffic.n_requests, traffic.received_nbytes)
    (1, 5)
    """
    traffic = Traffic()
    token = _current.set(traffic)
    try:
        yield traffic
    finally:
        _current.reset(token)
