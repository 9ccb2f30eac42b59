"""A folder gets its final name in one step, whatever had the name before; folders and names are made durable.

Local file systems only.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat

from ckpt_tool.storage.kernel import exchange

__all__ = ["remove", "swap_in", "sync_folder"]

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
