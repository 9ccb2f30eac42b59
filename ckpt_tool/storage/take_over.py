"""Bytes of an old file in a new one, as cheaply as the file system allows: a link, a clone, a copy in the kernel.

A clone shares blocks until one of the two is written to; a hard link is the same file under a second name.
"""

from __future__ import annotations

import errno
import os
import shutil

__all__ = ["LINKS", "copy_range", "take_file"]

LINKS = ("auto", "hard", "clone", "copy")
"""``auto`` is a clone where the file system can, else a hard link, else a copy."""

_FICLONE = 0x40049409  # _IOW(0x94, 9, int), linux/fs.h
_CANNOT = frozenset(
    {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTTY, errno.EBADF}
)
_BLOCK_BYTES = 4 << 20


def take_file(source: str, target: str, *, link: str = "auto") -> str:
    """Make ``target``, which must not exist, the same as ``source``; how it was done: ``clone``, ``hard`` or ``copy``.

    Raises:
        OSError: it cannot be done so.
    """
    if link in ("auto", "clone") and _clone(source, target):
        return "clone"
    if link == "clone":
        raise OSError(errno.EOPNOTSUPP, "this file system cannot clone files", target)
    if link in ("auto", "hard"):
        try:
            os.link(os.path.realpath(source), target)
        except OSError as error:
            if link == "hard" or error.errno not in _CANNOT:
                raise
        else:
            return "hard"
    shutil.copyfile(source, target)
    return "copy"


def _clone(source: str, target: str) -> bool:
    try:
        import fcntl
    except ImportError:  # no POSIX
        return False
    with open(source, "rb") as old, open(target, "xb") as new:
        try:
            fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
        except OSError as error:
            os.unlink(target)
            if error.errno not in _CANNOT:
                raise
            return False
    return True


def copy_range(source_fd: int, target_fd: int, source_offset: int, target_offset: int, nbytes: int) -> None:
    """Copy bytes from file to file, in the kernel where it can; on some file systems blocks are then shared.

    Raises:
        OSError: the system refused.
        EOFError: the old file is shorter than it was.
    """
    copy = getattr(os, "copy_file_range", None)
    done = 0
    while done < nbytes:
        n = 0
        if copy is not None:
            try:
                n = copy(source_fd, target_fd, nbytes - done, source_offset + done, target_offset + done)
            except OSError as error:
                if error.errno not in _CANNOT:
                    raise
                copy = None
        if copy is None:
            data = os.pread(source_fd, min(nbytes - done, _BLOCK_BYTES), source_offset + done)
            n = os.pwrite(target_fd, data, target_offset + done) if data else 0
        if n == 0:
            raise EOFError
        done += n
