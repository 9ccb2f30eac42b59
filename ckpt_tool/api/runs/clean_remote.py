"""What killed saves and conversions have left in a run on S3 or HDFS: marked folders, and parts that no file has.

On HDFS everything of an unfinished target lies in a folder of its own. On S3 the parts are invisible until they are
joined, and what was joined has its final name already: it is removed only where it does not read as a checkpoint. A
checkpoint that was to be replaced, or whose save ended right before its last request, loses the mark alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from ckpt_tool.errors import CkptError, NotFound, StorageError, Unsupported
from ckpt_tool.formats.base import Source
from ckpt_tool.formats.detect import detect
from ckpt_tool.records import dataclass
from ckpt_tool.storage.open import open_store
from ckpt_tool.storage.parts.commit import delete_old, is_control
from ckpt_tool.storage.parts.place import PartPlace
from ckpt_tool.storage.parts.places import part_place
from ckpt_tool.storage.parts.target import is_all_of_target
from ckpt_tool.storage.store import Listing
from ckpt_tool.storage.unfinished import COMMIT_NAMES, MARKER_NAME
from ckpt_tool.storage.urls import join_url

__all__ = ["RemoteLeftover", "remote_leftovers"]

_OWN = re.compile(r"(.+?)(?:\.([0-9a-f]{8}))?\.partial")
_BEFORE_MARKED = re.compile(r"(.+\.partial)/\.parts/.+")
"""What a run on HDFS writes even before its mark, which is a file that gets its name when it is whole."""


@dataclass(frozen=True, slots=True)
class RemoteLeftover:
    """Something that an unfinished target has left."""

    path: str
    """Relative to the run."""
    nbytes: int
    """Of files and of parts."""
    n_files: int
    modified: float
    """When the last of its files or parts was written, seconds since 1970."""
    remove: Callable[[], None]


def remote_leftovers(run: str) -> list[RemoteLeftover]:
    """Leftovers in a run, by path.

    Raises:
        NotFound: nothing is there.
        Unsupported: neither S3 nor HDFS.
    """
    if part_place(join_url(run, "x"), single_file=False) is None:
        hint = 'delete folders that "ckpt ls" shows as incomplete with the storage\'s own tools'
        raise Unsupported("only folders on this machine, on S3 and on HDFS are cleaned", where=run, hint=hint)
    store, listing = open_store(run)
    store.close()
    if listing.entry is not None:
        raise NotFound("no such folder", where=run)
    return list(_found(run, listing))


def _found(run: str, listing: Listing) -> Iterator[RemoteLeftover]:
    marked = {path.rpartition("/")[0] for path in listing.sizes if path.rpartition("/")[2] == MARKER_NAME}
    unmarked = {match[1] for path in listing.sizes if (match := _BEFORE_MARKED.fullmatch(path))} - marked
    for folder in sorted(filter(None, marked | unmarked)):
        own = _OWN.fullmatch(folder)
        below = {path for path in listing.sizes if path.startswith(f"{folder}/")}
        modified = max(listing.modified.get(path, 0.0) for path in below)
        place = _place(join_url(run, own[1] if own else folder), own[2] if own else None, is_file=own is not None)
        try:
            if place.is_named_last:
                if own is not None:
                    nbytes = sum(listing.sizes[path] for path in below)
                    yield RemoteLeftover(folder, nbytes, len(below), modified, place.clear)
            elif folder in unmarked:
                pass  # not of this tool
            elif own is None and _holds_checkpoint(place, below, join_url(run, folder)):
                yield _with_parts(place, folder, listing.modified.get(f"{folder}/{MARKER_NAME}", 0.0), keeps=True)
            else:
                yield _with_parts(place, folder, modified, keeps=False)
        finally:
            place.close()


def _place(url: str, token: str | None, *, is_file: bool) -> PartPlace:
    place = part_place(url, single_file=is_file, token=token)
    if place is None:
        raise StorageError("takes no parts", where=url)
    return place


def _with_parts(place: PartPlace, folder: str, modified: float, *, keeps: bool) -> RemoteLeftover:
    """What is in the place of a target, files and parts of files; only what no checkpoint has if it ``keeps`` that."""
    begun = place.under_way()
    files = {path: nbytes for path, nbytes in place.files().items() if path}
    control = set(filter(is_control, files))
    if keeps:
        files = {path: files[path] for path in control}
    parts = [part.nbytes for _, each in begun for part in each.parts.values()]
    modified = max([modified, *(each.modified or 0.0 for _, each in begun)])

    def remove() -> None:
        for path, each in begun:
            place.drop(path, each.token)
        delete_old(place, sorted(files.keys() - control))
        for path in sorted(control):  # the marker comes last
            place.delete(path)

    return RemoteLeftover(folder, sum(files.values()) + sum(parts), len(files) + len(begun), modified, remove)


def _holds_checkpoint(place: PartPlace, paths: Collection[str], url: str) -> bool:
    """Whether there is more than an unfinished target: the file that it gets last, or what it was to replace."""
    if any(path.endswith(COMMIT_NAMES) for path in paths):
        return True
    return not is_all_of_target(place.get(MARKER_NAME) or b"") and _reads(url)


def _reads(url: str) -> bool:
    """Whether it is a checkpoint, complete or not, were it not for the marker."""
    store, listing = open_store(url)
    sizes = {path: nbytes for path, nbytes in listing.sizes.items() if not is_control(path)}
    source = Source(store, replace(listing, sizes=sizes))
    try:
        detect(source).read(source)
    except StorageError:
        raise
    except CkptError:
        return False
    finally:
        store.close()
    return True
