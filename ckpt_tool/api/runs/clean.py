"""Cleaning removes what killed saves and conversions of this tool have left in a run: folders that are no checkpoints.

Only folders that bear this tool's mark are looked at: its marker file, or the name of a save that has not ended.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from ckpt_tool.errors import NotFound, StorageError
from ckpt_tool.records import dataclass
from ckpt_tool.storage.unfinished import MARKER_NAME
from ckpt_tool.storage.urls import is_local, local_path

__all__ = ["SCHEMA", "Cleaning", "Leftover", "clean"]

SCHEMA = "ckpt-tool/clean/1"
_OF_SAVE = re.compile(r".+\.[0-9a-f]{8}\.(?:partial|replaced)")


@dataclass(frozen=True, slots=True)
class Leftover:
    """A folder that a save or a conversion has left."""

    path: str
    """Relative to the run."""
    nbytes: int
    n_files: int
    modified: float
    """When the last of its files was written, seconds since 1970."""
    is_recent: bool
    """Written to so lately that somebody may still be at it; it is not removed."""


@dataclass(frozen=True, slots=True)
class Cleaning:
    """What was found, and whether it was removed."""

    url: str
    leftovers: tuple[Leftover, ...]
    removed: bool
    """Whether the leftovers that are not recent were removed."""

    def to_json(self) -> dict[str, Any]:
        """Schema ``ckpt-tool/clean/1``: ``schema url removed leftovers[] {path nbytes n_files modified is_recent}``."""
        return {"schema": SCHEMA, **asdict(self)}


def clean(run: str | os.PathLike[str], *, dry_run: bool = True, min_age_s: float = 0.0) -> Cleaning:
    """Leftovers in the folder of a run, removed unless ``dry_run``. Checkpoints are not touched, complete or not.

    Args:
        run: a path, or a URL of S3 or HDFS.
        dry_run: only list.
        min_age_s: leave what was written to within so many seconds.

    Raises:
        NotFound: no such folder.
        Unsupported: storage of another kind.
        StorageError: a leftover cannot be removed.
    """
    newest = time.time() - min_age_s
    if not is_local(run):
        from ckpt_tool.api.runs.clean_remote import remote_leftovers

        far = remote_leftovers(os.fspath(run))
        named = [Leftover(e.path, e.nbytes, e.n_files, e.modified, is_recent=e.modified > newest) for e in far]
        for leftover, where in zip(named, far, strict=True) if not dry_run else ():
            if not leftover.is_recent:
                where.remove()
        return Cleaning(os.fspath(run), tuple(named), removed=not dry_run)
    root = local_path(run)
    if os.path.isfile(root):
        hint = f'give the folder: "{os.path.dirname(root) or "."}"'
        raise NotFound("a file, expected the folder of a run", where=root, hint=hint)
    if not os.path.isdir(root):
        raise NotFound("no such folder", where=root, hint='"ckpt ls" lists the steps of a run')
    found = tuple(sorted(_leftovers(root, newest), key=lambda each: each.path))
    for each in found if not dry_run else ():
        if not each.is_recent:
            try:
                shutil.rmtree(os.path.join(root, each.path))
            except OSError as error:
                raise StorageError(f"cannot be removed: {error.strerror or error}", where=each.path) from error
    return Cleaning(os.fspath(run), found, removed=not dry_run)


def _leftovers(root: str, newest: float) -> Iterator[Leftover]:
    folders = [""]
    while folders:
        folder = folders.pop()
        with os.scandir(os.path.join(root, folder)) as entries:
            inner = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
        for name in inner:
            path = os.path.join(folder, name)
            full = os.path.join(root, path)
            if _OF_SAVE.fullmatch(name) or os.path.isfile(os.path.join(full, MARKER_NAME)):
                yield _leftover(full, path, newest)
            elif not name.startswith(".") and path.count(os.sep) < 2:
                folders.append(path)


def _leftover(full: str, path: str, newest: float) -> Leftover:
    nbytes, n_files, modified = 0, 0, os.stat(full).st_mtime
    for folder, _, names in os.walk(full):
        for name in names:
            found = os.lstat(os.path.join(folder, name))
            nbytes, n_files, modified = nbytes + found.st_size, n_files + 1, max(modified, found.st_mtime)
    return Leftover(path, nbytes, n_files, modified, is_recent=modified > newest)
