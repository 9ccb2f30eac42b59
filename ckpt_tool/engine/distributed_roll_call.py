"""A roll call finds out which ranks are left when a collective has failed, so that an error can say who is gone.

It goes through the key-value store of the process group, which outlives any rank but the one that serves it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

__all__ = ["RollCall", "next_number"]

_SECONDS = 5.0
_LINGER_SECONDS = 2.0
_numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def next_number(process_group: Any) -> int:
    """Counts calls with this process group: the same on all ranks, which do the same things in the same order."""
    _numbers[process_group] = _numbers.get(process_group, 0) + 1
    return _numbers[process_group]


class RollCall:
    """One chance to call the roll, for one operation of a group."""

    def __init__(self, process_group: Any, rank: int, size: int) -> None:
        self._group, self._rank, self._size = process_group, rank, size
        self._prefix = f"ckpt_tool/{next_number(process_group)}"
        self.ended: Callable[[], Sequence[int]] = tuple
        """Ranks of this host whose process is gone."""

    def cause(self, said: str, timeout_s: float) -> str:
        """Why a collective has failed, as far as it can be found out within a few seconds.

        Args:
            said: what this rank saw, told to others that ask.
            timeout_s: how long it had waited.
        """
        store = self._store()
        self._tell(store, said)
        begun = time.monotonic()
        silent: list[int] = []
        while time.monotonic() - begun < min(_SECONDS, timeout_s):
            silent = [rank for rank in range(self._size) if not self._has_told(store, rank)]
            gone = [rank for rank in self.ended() if rank in silent] or self._known_elsewhere(store, silent)
            if gone:
                self._leave(store, gone)
                return f"rank {gone[0]} has ended"
            if not silent:
                break
            time.sleep(0.02)
        if silent and store is not None:
            return f"rank {', '.join(map(str, silent[:8]))} did not answer ({said})"
        first = min(rank for rank in range(self._size) if rank != self._rank)
        return f"rank {first} gave up: {self._told(store, first)}" if store is not None else said

    def _leave(self, store: Any, gone: Sequence[int]) -> None:
        """Say that this rank knows enough. The first rank, which serves the store, waits for the others to say so.

        Otherwise its own end, once it has raised, would look to a slower rank like the one that began it all.
        """
        self._tell(store, " ".join(map(str, gone)), "left")
        others = [rank for rank in range(1, self._size) if rank not in gone]
        begun = time.monotonic()
        while self._rank == 0 and time.monotonic() - begun < _LINGER_SECONDS:
            if all(self._has_told(store, rank, "left") for rank in others):
                return
            time.sleep(0.02)

    def _known_elsewhere(self, store: Any, silent: Sequence[int]) -> list[int]:
        """Ranks of other hosts that have ended, as ranks there have found out; those still waiting are not blamed."""
        for rank in set(range(self._size)) - {self._rank, *silent}:
            if self._has_told(store, rank, "left"):
                return [int(each) for each in self._told(store, rank, "left").split() if each.isdecimal()]
        return []

    def _store(self) -> Any:
        try:
            return self._group.get_group_store()
        except (AttributeError, RuntimeError):
            return None

    def _tell(self, store: Any, said: str, topic: str = "saw") -> None:
        try:
            store.set(f"{self._prefix}/{topic}/{self._rank}", said)
        except (AttributeError, RuntimeError):  # who served the store is gone, or there is none
            return

    def _has_told(self, store: Any, rank: int, topic: str = "saw") -> bool:
        try:
            return bool(store.check([f"{self._prefix}/{topic}/{rank}"]))
        except (AttributeError, RuntimeError):
            return False

    def _told(self, store: Any, rank: int, topic: str = "saw") -> str:
        try:
            told = store.get(f"{self._prefix}/{topic}/{rank}")
        except RuntimeError:
            return "nothing more is known"
        return str(told.decode(errors="replace") if isinstance(told, bytes) else told)
