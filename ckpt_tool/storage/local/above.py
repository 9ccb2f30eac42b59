"""What lies above and behind a local folder that was named: the folders that hold it, and links that lead nowhere.

For messages about a folder that is no checkpoint by itself; remote folders have neither.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from ckpt_tool.storage.local.store import LocalStore
from ckpt_tool.storage.urls import is_local, local_path

__all__ = ["broken_links", "folders_above"]

_MAX_ABOVE = 4
"""Most folders that are parts lie one or two below their checkpoint's."""
_MAX_ENTRIES = 4096
"""A folder with more below it is no checkpoint's, or one that costs more to list than a message is worth."""


def folders_above(url: str) -> Iterator[tuple[LocalStore, str]]:
    """The folders that hold a local one, the nearest first, with the path of that one in them; small ones only."""
    if not is_local(url):
        return
    folder, inner = os.path.realpath(local_path(url) or "."), ""
    shown = url.rstrip("/") or "."
    for _ in range(_MAX_ABOVE):
        above, name = os.path.split(folder)
        if above == folder or not _is_small(above):
            return
        inner, folder = f"{name}/{inner}", above
        shown = os.path.dirname(shown) if os.path.basename(shown) == name else folder
        yield LocalStore(folder, url=shown or "."), inner


def broken_links(url: str) -> dict[str, str]:
    """Links in a local folder whose files are not there, with where they lead; those at the top."""
    if not is_local(url):
        return {}
    try:
        with os.scandir(local_path(url) or ".") as entries:
            return {e.name: os.readlink(e.path) for e in entries if e.is_symlink() and not os.path.exists(e.path)}
    except OSError:  # a message is worth no second failure
        return {}


def _is_small(folder: str) -> bool:
    n, waiting = 0, [folder]
    while waiting and n <= _MAX_ENTRIES:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    n += 1
                    if n > _MAX_ENTRIES:
                        break
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except OSError:
            return False
    return n <= _MAX_ENTRIES
