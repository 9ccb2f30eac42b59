"""Bytes of an old file in a new one, as cheaply as the file system allows: a link, a clone, a copy in the kernel.

A clone shares blocks until one of the two is written to; a hard link is the same file under a second name.
"""

from __future__ import annotations

import errno
import os
import shutil
import struct

__all__ = ["BLOCK_BYTES", "LINKS", "clone_range", "copy_range", "take_file", "whole_blocks"]

LINKS = ("auto", "hard", "clone", "copy")
"""``auto`` is a clone where the file system can, else a hard link, else a copy."""

BLOCK_BYTES = 4096
"""Of XFS and Btrfs as they are made by default; with larger ones what does not fit is refused, and copied."""
_FICLONE = 0x40049409  # _IOW(0x94, 9, int), linux/fs.h
_FICLONERANGE = 0x4020940D  # _IOW(0x94, 13, struct file_clone_range), linux/fs.h: int64 and three uint64
_CANNOT = frozenset(
    {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTTY, errno.EBADF}
)
_PIECE_BYTES = 4 << 20


def take_file(source: str, target: str, *, link: str) -> str:
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


def clone_range(source_fd: int, target_fd: int, source_offset: int, target_offset: int, nbytes: int) -> bool:
    """Let two files of one file system have blocks in common; False where it cannot. All three are whole blocks.

    Raises:
        OSError: the system refused.
    """
    try:
        import fcntl
    except ImportError:  # no POSIX
        return False
    request = struct.pack("qQQQ", source_fd, source_offset, nbytes, target_offset)
    try:
        fcntl.ioctl(target_fd, _FICLONERANGE, request)
    except OSError as error:
        if error.errno not in _CANNOT:
            raise
        return False
    return True


def copy_range(source_fd: int, target_fd: int, source_offset: int, target_offset: int, nbytes: int) -> None:
    """Copy bytes from file to file, in the kernel where it can; whole blocks are shared where the file system can.

    Raises:
        OSError: the system refused.
        EOFError: the old file is shorter than it was.
    """
    start, end = whole_blocks(source_offset, target_offset, nbytes)
    if end > start and clone_range(source_fd, target_fd, source_offset + start, target_offset + start, end - start):
        _copy(source_fd, target_fd, source_offset, target_offset, start)
        _copy(source_fd, target_fd, source_offset + end, target_offset + end, nbytes - end)
    else:
        _copy(source_fd, target_fd, source_offset, target_offset, nbytes)


def whole_blocks(source_offset: int, target_offset: int, nbytes: int) -> tuple[int, int]:
    """First and last byte, from the beginning of a run, of what is whole blocks in both files; equal where nothing is.

    >>> whole_blocks(5000, 904, 10_000), whole_blocks(5000, 905, 10_000), whole_blocks(4096, 0, 4095)
    ((3192, 7288), (0, 0), (0, 0))
    """
    start = -target_offset % BLOCK_BYTES
    end = (target_offset + nbytes) // BLOCK_BYTES * BLOCK_BYTES - target_offset
    agree = (target_offset - source_offset) % BLOCK_BYTES == 0
    return (start, end) if agree and end > start else (0, 0)


def _copy(source_fd: int, target_fd: int, source_offset: int, target_offset: int, nbytes: int) -> None:
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
            data = os.pread(source_fd, min(nbytes - done, _PIECE_BYTES), source_offset + done)
            n = os.pwrite(target_fd, data, target_offset + done) if data else 0
        if n == 0:
            raise EOFError
        done += n
