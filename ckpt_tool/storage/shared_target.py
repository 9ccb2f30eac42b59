"""What a target is that several processes write together, each its own files, and that one of them commits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from ckpt_tool.errors import UsageError
from ckpt_tool.storage.parts.places import part_place
from ckpt_tool.storage.urls import is_local, scheme_of

__all__ = ["Receipts", "SharedFile", "SharedTarget", "open_shared"]

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

    def close(self) -> None:
        """Release connections; what was written stays as it is."""
        ...


def open_shared(
    url: str, token: str, commit_path: str = ".metadata", *, overwrite: bool, durable: bool
) -> SharedTarget:
    """A target for the save called ``token`` (8 hexadecimal digits), whose last file is ``commit_path``.

    Raises:
        UsageError: the storage is the memory of one process, or nobody knows it.
    """
    if is_local(url):
        from ckpt_tool.storage.local.shared_folder import SharedFolder

        return SharedFolder(url, token, overwrite=overwrite, durable=durable)
    if scheme_of(url) == "memory":
        hint = "save to a path that all ranks see, or to s3:// or hdfs://"
        raise UsageError("is the memory of one process, which no other one sees", where=url, hint=hint)
    place = part_place(url, single_file=False, token=token)
    if place is not None:
        from ckpt_tool.storage.parts.shared_parts import SharedParts

        return SharedParts(place, token, overwrite=overwrite)
    from ckpt_tool.storage.remote.shared_remote import SharedRemote  # fsspec costs 80 ms of start-up

    return SharedRemote(url, commit_path)
