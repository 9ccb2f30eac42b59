"""Writes edited files: old ones are linked, clones or copied in the kernel where both sides are on this machine."""

from __future__ import annotations

from collections.abc import Iterable

from ckpt_tool.formats.base import Source
from ckpt_tool.formats.edited import EditedFile
from ckpt_tool.manifest.model import FileRange
from ckpt_tool.records import dataclass
from ckpt_tool.storage.local.store import LocalStore
from ckpt_tool.storage.local.take_over import BLOCK_BYTES
from ckpt_tool.storage.local.target import LocalTarget
from ckpt_tool.storage.store import Store
from ckpt_tool.storage.target import Target
from ckpt_tool.storage.virtual.beside import Beside

__all__ = ["TakenOver", "write_edited"]

_BLOCK_BYTES = 8 << 20


@dataclass(slots=True)
class TakenOver:
    """Bytes by the way they went."""

    linked_nbytes: int = 0
    """In hard links: old and new are one file."""
    cloned_nbytes: int = 0
    copied_nbytes: int = 0
    new_nbytes: int = 0
    """Headers and indexes."""


def write_edited(
    files: Iterable[EditedFile], source: Source, target: Target, *, link: str, commit_path: str | None
) -> TakenOver:
    """Write all files; the one that makes the target a checkpoint last. The caller commits.

    Raises:
        StorageError: the storage failed.
    """
    taken = TakenOver()
    files = list(files)
    _leave_to_share(files, source, target)
    for file in sorted(files, key=lambda file: file.path == commit_path):
        if file.is_link(source.listing.sizes) and _take_over(file, source, target, link, taken):
            continue
        target.create(file.path, file.nbytes, is_last=file.path == commit_path)
        at = 0
        for part in file.parts:
            if isinstance(part, FileRange):
                _copy(part, file.path, at, source, target)
                taken.copied_nbytes += part.length
                at += part.length
            else:
                target.write(file.path, at, part)
                taken.new_nbytes += len(part)
                at += len(part)
    return taken


def _leave_to_share(files: Iterable[EditedFile], source: Source, target: Target) -> None:
    """Reserve no room for files whose blocks will be shared, where the file system can."""
    store = source.store
    old = [part for file in files for part in file.parts if isinstance(part, FileRange)]
    largest = max(old, key=lambda part: part.length, default=None)
    if not (isinstance(store, LocalStore) and isinstance(target, LocalTarget)) or largest is None:
        return
    if source.listing.sizes[largest.path] >= BLOCK_BYTES:
        with store.borrow(largest.path) as handle:
            if target.can_share(handle.file.fileno(), 0, BLOCK_BYTES):
                target.reserve_nothing_for(file.path for file in files)


def _take_over(file: EditedFile, source: Source, target: Target, link: str, taken: TakenOver) -> bool:
    """Make a file an old one, if both are on this machine."""
    only = file.parts[0]
    if not (isinstance(target, LocalTarget) and isinstance(only, FileRange)):
        return False
    path = _local_path(source.store, only.path)
    if path is None:
        return False
    how = target.take_over(file.path, path, link=link)
    if how == "hard":
        taken.linked_nbytes += only.length
    elif how == "clone":
        taken.cloned_nbytes += only.length
    else:
        taken.copied_nbytes += only.length
    return True


def _local_path(store: Store, path: str) -> str | None:
    """Where a file lies on this machine, None where it does not."""
    holder = store.holder(path) if isinstance(store, Beside) else store
    return holder.real_path(path) if isinstance(holder, LocalStore) else None


def _copy(part: FileRange, path: str, at: int, source: Source, target: Target) -> None:
    store = source.store
    local = _local_path(store, part.path)
    if local is not None and isinstance(target, LocalTarget):
        target.copy_in(path, at, local, part.offset, part.length)
        return
    for start in range(0, part.length, _BLOCK_BYTES):
        length = min(_BLOCK_BYTES, part.length - start)
        target.write(path, at + start, store.read(part.path, part.offset + start, length))
