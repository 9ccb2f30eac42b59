"""A folder that several processes write together, each its own files; one of them gives it its final name.

Until then it is ``<final>.<token>.partial`` beside the final name, the same for all of them without a word between
them, and no other save's. The file that makes it a checkpoint is written in the last step, by the one.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from ckpt_tool.errors import StorageError, TargetExists
from ckpt_tool.manifest.digest_table import SUFFIX
from ckpt_tool.sizes import counted
from ckpt_tool.storage.local.kernel import start_writeback
from ckpt_tool.storage.local.renaming import remove, swap_in, sync_folder
from ckpt_tool.storage.shared_target import Receipts, SharedFile
from ckpt_tool.storage.unfinished import MARKER_NAME
from ckpt_tool.storage.urls import check_path, local_path

__all__ = ["SharedFolder", "leftovers"]

_IOV_MAX = 1024
_MARKER_TEXT = "A save that has not ended: not a checkpoint. If no job is writing here, delete it, or run ckpt clean.\n"
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_DIGESTS_NAME = f"ckpt{SUFFIX}"
_LEFTOVER = re.compile(r"\.[0-9a-f]{8}\.partial$")


def leftovers(final: str) -> list[str]:
    """Folders of saves to the local path ``final`` that have not ended, ended or not."""
    folder, name = os.path.split(os.path.abspath(final))
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(
        os.path.join(folder, each)
        for each in names
        if each.startswith(name + ".") and _LEFTOVER.fullmatch(each, len(name)) is not None
    )


class SharedFolder:
    """A folder on a file system that all processes see."""

    def __init__(self, url: str, token: str, *, overwrite: bool, durable: bool) -> None:
        self.url = url
        self._final = os.path.abspath(local_path(url))
        self.root = f"{self._final}.{token}.partial"
        self._replaced = f"{self._final}.{token}.replaced"
        self._overwrite = overwrite
        self._durable = durable

    def check(self) -> None:
        """Raise when the final name must not be written to.

        Raises:
            TargetExists: something is there that is no folder, or that is not to be replaced.
        """
        if not os.path.lexists(self._final):
            return
        if not os.path.isdir(self._final):
            raise TargetExists("is a file, expected to write a folder", where=self.url, hint="choose another name")
        if not self._overwrite and os.listdir(self._final):
            raise TargetExists("is there already", where=self.url, hint="choose another name, or pass overwrite=True")

    def create(self, path: str, nbytes: int) -> SharedFile:
        """A file in the making, with its folders and the marker that tells what they are.

        Raises:
            StorageError: the system refused.
        """
        full = os.path.join(self.root, check_path(path, root=self.url))
        try:
            os.makedirs(os.path.dirname(full), exist_ok=True)
            marker = os.path.join(self.root, MARKER_NAME)
            if not os.path.exists(marker):
                with open(marker, "w", encoding="utf-8") as file:
                    file.write(_MARKER_TEXT)
            fd = os.open(full, os.O_RDWR | os.O_CREAT | os.O_TRUNC | getattr(os, "O_NOFOLLOW", 0), 0o666)
        except OSError as error:
            raise _failure(error, full, nbytes) from error
        return _LocalFile(fd, full, nbytes, durable=self._durable)

    def commit(
        self, files: Mapping[str, int], last: Iterable[tuple[str, bytes]], receipts: Receipts,  # noqa: ARG002 - names say it all
        digests: bytes | None = None,
    ) -> None:  # fmt: skip
        """Check that all files are there, write the last ones, and give the folder its name.

        The manifest of digests of what was there before goes first, for it is not that of what comes; the new one is
        made in the folder, and moved beside it in the end.

        Raises:
            TargetExists: something took the final name in the meantime.
            StorageError: a file is not there or has another size; the system refused.
        """
        self.check()
        for path, nbytes in files.items():
            self._check_file(path, nbytes)
        try:
            self._make([*([] if digests is None else [(_DIGESTS_NAME, digests)]), *last])
            if self._durable:
                for folder, _, _ in os.walk(self.root, topdown=False):
                    sync_folder(folder)
            with suppress(FileNotFoundError):
                os.unlink(self._final + SUFFIX)
            swap_in(self.root, self._final, self._replaced)
            if digests is not None:
                os.replace(os.path.join(self._final, _DIGESTS_NAME), self._final + SUFFIX)
            if self._durable:
                sync_folder(self._final)
                sync_folder(os.path.dirname(self._final))
            old = [self._replaced] if os.path.lexists(self._replaced) else []
            for leftover in (*old, *leftovers(self._final)):
                remove(leftover)
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise _failure(error, self.root, 0) from error

    def discard(self) -> None:
        """Remove the partial folder; what cannot be removed stays a leftover."""
        shutil.rmtree(self.root, ignore_errors=True)

    def close(self) -> None:
        """Nothing: files are closed as they are finished."""

    def _make(self, contents: Sequence[tuple[str, bytes]]) -> None:
        """Small files, and no marker any more: all are written before the first is flushed, which takes the others too.

        Where a journal is, each flush behind a change waits for the disk once more.
        """
        made: list[SharedFile] = []
        try:
            for path, data in contents:
                made.append(self.create(path, len(data)))
                made[-1].write([memoryview(data)])
            with suppress(FileNotFoundError):
                os.unlink(os.path.join(self.root, MARKER_NAME))
            for file in made:
                file.finish()
        finally:
            for file in made:
                file.abandon()

    def _check_file(self, path: str, nbytes: int) -> None:
        full = os.path.join(self.root, path)
        try:
            found = os.stat(full).st_size
        except OSError as error:
            hint = "all ranks must see one file system under this path"
            raise StorageError("was written by its rank, and is not there", where=full, hint=hint) from error
        if found != nbytes:
            raise StorageError(f"expected {counted(nbytes, 'byte')}, got {found:,}", where=full)


class _LocalFile:
    def __init__(self, fd: int, where: str, nbytes: int, *, durable: bool) -> None:
        self._fd = fd
        self._where = where
        self._nbytes = nbytes
        self._durable = durable
        self._position = 0

    def write(self, buffers: Sequence[memoryview]) -> None:
        start = self._position
        try:
            for first in range(0, len(buffers), _IOV_MAX):
                self._write_some(list(buffers[first : first + _IOV_MAX]))
            if self._durable:
                start_writeback(self._fd, start, self._position - start)
        except OSError as error:
            raise _failure(error, self._where, self._nbytes) from error

    def _write_some(self, pending: list[memoryview]) -> None:
        while pending:
            n = os.pwritev(self._fd, pending, self._position)
            if n <= 0:
                raise StorageError("the system wrote nothing and reported no error", where=self._where)
            self._position += n
            while pending and n >= pending[0].nbytes:
                n -= pending[0].nbytes
                del pending[0]
            if n:
                pending[0] = pending[0][n:]

    def finish(self) -> None:
        try:
            if self._position != self._nbytes:
                raise StorageError(
                    f"expected {counted(self._nbytes, 'byte')}, got {self._position:,}", where=self._where
                )
            if self._durable:
                os.fsync(self._fd)
            fd, self._fd = self._fd, -1
            os.close(fd)  # network file systems may tell only now what was lost
        except OSError as error:
            raise _failure(error, self._where, self._nbytes) from error
        finally:
            self.abandon()

    def abandon(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with suppress(OSError):
                os.close(fd)


def _failure(error: OSError, where: str, nbytes: int) -> StorageError:
    if isinstance(error, StorageError):
        return error
    if error.errno in _NO_SPACE:
        with suppress(OSError):
            folder = where
            while not os.path.isdir(folder):
                folder = os.path.dirname(folder)
            free = shutil.disk_usage(folder).free
            text = f"no room: the file needs {counted(nbytes, 'byte')}, {free:,} are free ({error.strerror})"
            return StorageError(text, where=where, hint="make room, and save again")
    return StorageError(f"cannot be written: {error.strerror or error}", where=where)
