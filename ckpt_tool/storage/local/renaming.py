"""A folder gets its final name in one step, whatever had the name before; folders and names are made durable.

Local file systems only.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat

from ckpt_tool.storage.fetch import fetch_all
from ckpt_tool.storage.local.kernel import exchange

__all__ = ["N_SYNCS", "keep_modes", "remove", "swap_in", "sync_folder", "sync_tree"]

N_SYNCS = 16
"""Waits for the device at once: a file system makes those of many files durable in one commit of its journal."""
_IS_WINDOWS = os.name == "nt"


def swap_in(partial: str, final: str, replaced: str) -> None:
    """Rename the folder ``partial`` to ``final``; a full folder of that name ends up as ``replaced``.

    The two are swapped in one step where the system can.
    """
    if not os.path.lexists(final):
        os.rename(partial, final)
    elif os.path.isdir(final) and not os.path.islink(final) and not os.listdir(final):
        os.rmdir(final)
        os.rename(partial, final)
    elif exchange(partial, final):
        os.rename(partial, replaced)
    else:
        os.rename(final, replaced)
        os.rename(partial, final)


def keep_modes(old: str, new: str) -> None:
    """Give a file or folder, and all that is in it, the permissions of what it will replace, as far as that is there.

    Files that are known under other names as well keep theirs.
    """
    pairs = [(old, new)]
    if os.path.isdir(new):
        below = [os.path.join(folder, name) for folder, folders, names in os.walk(new) for name in (*folders, *names)]
        pairs += [(os.path.join(old, os.path.relpath(path, new)), path) for path in below]
    for before, after in pairs:
        now = os.lstat(after)
        is_shared = not stat.S_ISDIR(now.st_mode) and now.st_nlink > 1
        if os.path.exists(before) and not stat.S_ISLNK(now.st_mode) and not is_shared:
            was = os.stat(before)
            if stat.S_ISDIR(was.st_mode) == stat.S_ISDIR(now.st_mode) and was.st_mode != now.st_mode:
                os.chmod(after, stat.S_IMODE(was.st_mode))


def sync_folder(folder: str) -> None:
    """Make the names in a folder durable, where the file system knows how."""
    if _IS_WINDOWS:  # folders cannot be opened there
        return
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in {errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP}:  # some network file systems do not know it
            raise
    finally:
        os.close(fd)


def remove(path: str) -> None:
    """Remove a file, a link (not what it points to) or a folder with all that is in it."""
    if stat.S_ISDIR(os.lstat(path).st_mode):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def sync_tree(root: str) -> None:
    """Wait until all files and folders below ``root``, and it itself, are on the device."""
    found = [(folder, names) for folder, _, names in os.walk(root, topdown=False)]
    files = [os.path.join(folder, name) for folder, names in found for name in names]
    fetch_all(_sync_file, files, concurrency=N_SYNCS, may_be_cached=True)
    fetch_all(sync_folder, [folder for folder, _ in found], concurrency=N_SYNCS, may_be_cached=True)


def _sync_file(path: str) -> None:
    fd = _open_for_sync(path)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _open_for_sync(path: str) -> int:
    """A descriptor; for reading alone where a file that was linked may not be written to."""
    flags = getattr(os, "O_NOFOLLOW", 0)
    try:
        return os.open(path, os.O_RDWR | flags)
    except PermissionError:
        return os.open(path, os.O_RDONLY | flags)
