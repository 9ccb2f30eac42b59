"""A listing that a store makes when it is first asked for and keeps, for any number of threads."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ckpt_tool.storage.store import Listing

__all__ = ["ListedOnce"]


class ListedOnce:
    """What ``Store.listing`` gives of a storage that takes requests for it.

    Args:
        make: asks the storage.
    """

    def __init__(self, make: Callable[[], Listing]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self.kept: Listing | None = None
        """None until it was asked for."""

    def get(self, *, anew: bool) -> Listing:
        """The listing that is kept; ``anew`` asks again, and keeps the first."""
        with self._lock:
            if anew:
                return self._make()
            if self.kept is None:
                self.kept = self._make()
            return self.kept
