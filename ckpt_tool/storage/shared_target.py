"""What a target is that several processes write together, each its own files, and that one of them commits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

__all__ = ["Receipts", "SharedFile", "SharedTarget"]

Receipts = Mapping[str, Any]
"""By path, what ``finish`` of a file has returned."""


class SharedFile(Protocol):
    """One file that is being written by this process alone, from its first byte to its last."""

    def write(self, buffers: Sequence[memoryview]) -> None:
        """Append ``buffers``, which may be reused after the call."""
        ...

    def finish(self) -> Any:
        """Make it durable; what the process that commits must know of it, as JSON. None: the path says it all."""
        ...

    def abandon(self) -> None:
        """Stop; what was written does not matter any more."""
        ...


class SharedTarget(Protocol):
    """Where processes write a checkpoint together."""

    def check(self) -> None:
        """Raise when the final name must not be written to."""
        ...

    def create(self, path: str, nbytes: int) -> SharedFile:
        """A file of ``nbytes`` in the making."""
        ...

    def commit(
        self, files: Mapping[str, int], last: Iterable[tuple[str, bytes]], receipts: Receipts,
        digests: bytes | None = None,
    ) -> None:  # fmt: skip
        """Make the target a checkpoint, given all ``files`` and their sizes; ``last`` are written now, in order.

        ``digests`` is the manifest that goes beside it; that of what was there before goes in any case
        where files can be replaced.
        """
        ...

    def discard(self) -> None:
        """Remove what was written; what cannot be removed stays a leftover."""
        ...
