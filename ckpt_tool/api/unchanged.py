"""Whether the files of a checkpoint are still what they were when it was opened.

A run that saves under the same names, or a copy that is still on its way, changes files while they are read. Each byte
that was read is then right, and all of them together are no checkpoint: what was made of them is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cached_property

from ckpt_tool.api.checkpoint import Checkpoint
from ckpt_tool.errors import CkptError, NotFound, StorageError
from ckpt_tool.formats.base import Source
from ckpt_tool.manifest.tables import FileTable
from ckpt_tool.storage.store import Listing
from ckpt_tool.storage.urls import join_url

__all__ = ["ReadFiles", "explaining", "unchanged"]

_HINT = "wait until whatever writes it has ended, then run the command again"
State = tuple[int | None, float | None, str | None]
"""Size, time of the last change and tag of a file, as far as its storage tells them."""


class ReadFiles:
    """The files that hold a checkpoint's tensors, as they were listed when it was opened.

    Args:
        url: where they lie, as errors name it.
        source: the store and its listing of that time.
        files: those that hold tensors.
    """

    def __init__(self, url: str, source: Source, files: FileTable) -> None:
        self._url, self._source, self._files = url, source, files

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> ReadFiles:
        """Those of a checkpoint."""
        return cls(checkpoint.url, checkpoint.source, checkpoint.manifest.files)

    def check(self) -> None:
        """See that they are what they were; one listing, none where the storage tells no times and no tags.

        Raises:
            StorageError: one has changed, or is not there any more.
        """
        change = self.change()
        if change is not None:
            raise change

    def change(self) -> StorageError | None:
        """The error that tells of a file which is not what it was; None where all are."""
        if not self._states:
            return None
        try:
            now = self._source.store.listing(anew=True)
        except NotFound:
            return StorageError("has gone while it was read", where=self._url, hint=_HINT)
        changed = [path for path, state in self._states.items() if _state(now, path) != state]
        if not changed:
            return None
        first = changed[0]
        more = f" (and {len(changed) - 1:,} more)" if len(changed) > 1 else ""
        what = "has changed" if first in now.sizes else "has gone"
        said = f"{what}{more} while it was read: what was read is no one checkpoint"
        return StorageError(said, where=join_url(now.url, first), hint=_HINT)

    def stamp(self) -> str:
        """16 hex digits, others once a file has changed; for another process to compare."""
        import hashlib  # 3 ms of start-up, for runs that write a journal

        return hashlib.blake2b(repr(self._states).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()

    @cached_property
    def _states(self) -> dict[str, State]:
        listing = self._source.listing
        held = sorted({entry.path if entry.part is None else entry.part.path for entry in self._files})
        states = {path: _state(listing, path) for path in held if path in listing}  # without those that count as lost
        return {path: state for path, state in states.items() if state[1:] != (None, None)}


@contextmanager
def explaining(*checkpoints: Checkpoint) -> Iterator[None]:
    """A block that reads checkpoints; where it fails and one of their files has changed, that is what is raised.

    Raises:
        StorageError: so it is; what the block raised is chained.
    """
    try:
        yield
    except CkptError as error:
        is_silent = isinstance(error.__cause__, ConnectionError | TimeoutError)  # whom to ask would take as long again
        for each in () if is_silent else checkpoints:
            change = None
            with suppress(CkptError):
                change = ReadFiles.of(each).change()
            if change is not None:
                raise change from error
        raise


@contextmanager
def unchanged(*checkpoints: Checkpoint) -> Iterator[None]:
    """A block that reads checkpoints, whose files must be the same until its end.

    Raises:
        StorageError: one has changed; also in place of what the block raises, of which that may be the reason.
    """
    with explaining(*checkpoints):
        yield
    for each in checkpoints:
        ReadFiles.of(each).check()


def _state(listing: Listing, path: str) -> State:
    return listing.sizes.get(path), listing.modified.get(path), listing.tags.get(path)
