"""A local target writes into ``<final>.partial`` beside the final name, and renames when all bytes are on the device.

Until then the folder carries a marker file that says in a line what it is. A run that is killed leaves that folder
and nothing under the final name. Knows no journal format: it only says where the journal belongs.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import threading
from collections.abc import Iterable
from contextlib import suppress

from ckpt_tool.errors import CkptError, StorageError, TargetExists, UsageError
from ckpt_tool.storage.fetch import fetch_all
from ckpt_tool.storage.local.file_log import FileLog
from ckpt_tool.storage.local.handles import Handles
from ckpt_tool.storage.local.kernel import fallocate, start_writeback
from ckpt_tool.storage.local.locked_file import hold
from ckpt_tool.storage.local.renaming import N_SYNCS, keep_modes, remove, swap_in, sync_folder, sync_tree
from ckpt_tool.storage.local.take_over import clone_range, copy_range, take_file
from ckpt_tool.storage.unfinished import JOURNAL_NAME, MARKER_NAME, OWN_NAMES
from ckpt_tool.storage.urls import check_path, local_path

__all__ = ["LocalTarget"]

MARKER_TEXT = (
    "Unfinished output of ckpt: not a checkpoint. Run the same command with --resume, or delete this folder.\n"
)
MAX_OPEN_FILES = 128
_SENT_AT_ONCE_NBYTES = 128 << 10
"""So much in one write is sent to the device at once where it must be durable: less is left to wait for at the end."""
_IS_WINDOWS = os.name == "nt"
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class LocalTarget:
    """A folder, or with ``single_file`` one file, that appears under its name only when it is complete.

    Args:
        url: the final name.
        overwrite: replace what is there; the old one stays until the new one is in its place.
        resume: continue in a ``.partial`` folder that is there.
        durable: fsync before the rename, and in ``flush``. False for measurements only.
        single_file: ``url`` names one file; exactly one may be created.
        joins: another process claims the folder, makes the files and commits; this one only writes into them.

    Raises:
        TargetExists: the final name or the ``.partial`` folder is there, or another process is writing.
        UsageError: the final name must not be replaced.
    """

    is_sequential = False

    def __init__(
        self, url: str, *, overwrite: bool, resume: bool, durable: bool, single_file: bool, joins: bool = False
    ) -> None:
        self.url = url
        self.is_resumed = False
        self._final = os.path.abspath(local_path(url))
        self.root = self._final + ".partial"
        self.journal_path = os.path.join(self.root, JOURNAL_NAME)
        self.journal = FileLog(self.journal_path)
        self._replaced = self._final + ".replaced"
        self._overwrite = overwrite
        self._durable = durable
        self._single_file = single_file
        self._joins = joins
        self._sizes: dict[str, int] = {}
        self._lock = threading.Lock()
        self._dirty: set[str] = set()
        self._unreserved: frozenset[str] = frozenset()
        self._handles = Handles(self._open, limit=MAX_OPEN_FILES)
        self._marker_fd = -1
        if joins:
            return
        try:
            self._check_final()
            self._claim(resume=resume)
        except OSError as error:
            raise self._failure(error, "cannot be written to") from error

    def create(self, path: str, nbytes: int, *, is_last: bool = False) -> None:  # noqa: ARG002 - the rename comes last
        """Make a file of ``nbytes`` with its blocks reserved; a file from a resumed run keeps its content.

        Raises:
            FormatError: the path leaves the target.
            StorageError: not enough room; says how much is needed and free.
        """
        full = self._full(path)
        if self._single_file and self._sizes and path not in self._sizes:
            raise UsageError(f"expected one file, got {path!r} beside {next(iter(self._sizes))!r}", where=self.url)
        if self._joins:
            with self._lock:
                self._sizes[path] = nbytes
            return
        try:
            os.makedirs(os.path.dirname(full), exist_ok=True)
            fd = os.open(
                full, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0), 0o666
            )
            try:
                if path not in self._unreserved:
                    fallocate(fd, nbytes)
                if os.fstat(fd).st_size != nbytes:
                    os.ftruncate(fd, nbytes)
            finally:
                os.close(fd)
        except OSError as error:
            raise self._failure(error, f"{path!r} cannot be created", needed=nbytes) from error
        with self._lock:
            self._sizes[path] = nbytes
            self._dirty.add(path)

    def start_of(self, path: str) -> int:  # noqa: ARG002 - any part of any file may be missing
        """0: what was written is what the journal says."""
        return 0

    def take_over(self, path: str, source: str, *, link: str) -> str:
        """Make a file the same as ``source``, another file of this machine; how: ``clone``, ``hard`` or ``copy``.

        Raises:
            FormatError: the path leaves the target.
            StorageError: the system refused.
        """
        full = self._full(path)
        try:
            os.makedirs(os.path.dirname(full), exist_ok=True)
            how = take_file(source, full, link=link)
        except OSError as error:
            raise self._failure(error, f"{path!r} cannot be taken over") from error
        with self._lock:
            self._sizes[path] = os.path.getsize(full)
        return how

    def copy_in(self, path: str, offset: int, source: str, source_offset: int, nbytes: int) -> None:
        """Copy bytes of another file of this machine to ``offset`` of a created file.

        Raises:
            StorageError: the other file is too short, or the system refused.
        """
        try:
            with open(source, "rb") as old, self._handles.borrow(path) as handle:
                copy_range(old.fileno(), handle.file.fileno(), source_offset, offset, nbytes)
        except EOFError as error:
            raise StorageError("became shorter while it was read", where=source) from error
        except OSError as error:
            raise self._failure(error, f"{path!r} cannot be written", needed=nbytes) from error

    def can_share(self, source_fd: int, source_offset: int, nbytes: int) -> bool:
        """Whether blocks of another file can be shared with files of this target: a trial that leaves nothing."""
        import tempfile  # for those that ask to share

        try:
            with tempfile.TemporaryFile(dir=self.root) as file:
                return clone_range(source_fd, file.fileno(), source_offset, 0, nbytes)
        except OSError as error:
            raise self._failure(error, "cannot be written to", needed=nbytes) from error

    def reserve_nothing_for(self, paths: Iterable[str]) -> None:
        """Files, not created yet, that will mostly share blocks: Btrfs keeps a reserved block until all are given."""
        self._unreserved = frozenset(paths)

    def share(self, path: str, offset: int, source_fd: int, source_offset: int, nbytes: int) -> bool:
        """Let a created file have whole blocks in common with another one; False where the file system cannot.

        Raises:
            StorageError: the system refused.
        """
        try:
            with self._handles.borrow(path) as handle:
                is_shared = clone_range(source_fd, handle.file.fileno(), source_offset, offset, nbytes)
        except OSError as error:
            raise self._failure(error, f"{path!r} cannot be written", needed=nbytes) from error
        self.note_written(path)
        return is_shared

    def write(self, path: str, offset: int, buffer: bytes | bytearray | memoryview) -> None:
        """Write all of ``buffer`` at ``offset``.

        Raises:
            StorageError: not created, beyond the created size, or the system refused.
        """
        view = memoryview(buffer)
        view = view.cast("B") if view.nbytes else memoryview(b"")
        self._check_extent(path, offset, len(view))
        try:
            with self._handles.borrow(path) as handle:
                handle.write_at(offset, view)
                if self._durable and len(view) >= _SENT_AT_ONCE_NBYTES:
                    start_writeback(handle.file.fileno(), offset, len(view))
        except OSError as error:
            raise self._failure(error, f"{path!r} cannot be written", needed=len(view)) from error
        self.note_written(path)

    def note_written(self, *paths: str) -> None:
        """Take into the next flush what was written, by another process too."""
        with self._lock:
            self._dirty.update(paths)

    def flush(self) -> None:
        """Wait until all bytes written by calls that have returned are on the device."""
        with self._lock:
            dirty, self._dirty = self._dirty, set()
        if not self._durable:
            return
        try:
            fetch_all(self._sync, sorted(dirty), concurrency=N_SYNCS, may_be_cached=True)
        except CkptError:
            with self._lock:
                self._dirty |= dirty
            raise

    def free_bytes(self) -> int | None:
        """Bytes that the file system still has for this user."""
        return shutil.disk_usage(self.root).free

    def commit(self, last_path: str | None) -> None:
        """Make all files durable, then give them their final name; the old target is removed after that.

        Raises:
            TargetExists: something took the final name in the meantime.
            StorageError: ``last_path`` was never created, or the system refused; the partial folder stays.
        """
        if last_path is not None and last_path not in self._sizes:
            raise StorageError(f"the file that makes it a checkpoint, {last_path!r}, was never written", where=self.url)
        if self._single_file and len(self._sizes) != 1:
            raise StorageError(f"expected one file, got {len(self._sizes):,}", where=self.url)
        try:
            self._check_final()
            self._handles.close()
            if self._overwrite:
                keep_modes(self._final, self._full(next(iter(self._sizes))) if self._single_file else self.root)
            if self._durable:
                sync_tree(self.root)
            if self._single_file:
                os.replace(self._full(next(iter(self._sizes))), self._final)
            else:
                self._swap_in()
            if self._durable:
                sync_folder(os.path.dirname(self._final))
            self._unlock()
            for leftover in (self._replaced if self._overwrite else None, self.root):
                if leftover is not None and os.path.lexists(leftover):
                    remove(leftover)
        except OSError as error:
            raise self._failure(error, "cannot be completed") from error

    def abandon(self, *, discard: bool = False) -> None:
        """Close all files; the partial folder stays for ``resume`` unless ``discard``."""
        with suppress(OSError):  # what a file system tells of lost writes only now was not to be kept anyway
            self._handles.close()
        if discard and os.path.isdir(self.root):
            self._remove_partial()
        self._unlock()

    def _check_extent(self, path: str, offset: int, nbytes: int) -> None:
        size = self._sizes.get(path)
        if size is None:
            raise StorageError("written to before it was created", where=self._full(path))
        if offset < 0 or offset + nbytes > size:
            end = offset + nbytes
            message = f"a write from {offset:,} to {end:,} does not fit the {size:,} bytes of the file"
            raise StorageError(message, where=self._full(path))

    def _sync(self, path: str) -> None:
        sync = getattr(os, "fdatasync", os.fsync)
        try:
            with self._handles.borrow(path) as handle:
                sync(handle.file.fileno())
        except OSError as error:
            raise self._failure(error, f"{path!r} cannot be made durable") from error

    def _full(self, path: str) -> str:
        return os.path.join(self.root, check_path(path, root=self.url))

    def _open(self, path: str) -> io.FileIO:
        return io.FileIO(self._full(path), "r+b")

    def _check_final(self) -> None:
        """Raise when the final name is taken and may not be replaced."""
        if not os.path.lexists(self._final):
            if os.path.lexists(self._replaced):
                hint = f'look at it, then rename it to "{self._final}" or delete it'
                raise TargetExists(
                    "an interrupted run has moved the former target there", where=self._replaced, hint=hint
                )
            return
        is_folder = os.path.isdir(self._final)
        is_empty_folder = is_folder and not os.path.islink(self._final) and not os.listdir(self._final)
        if is_empty_folder and not self._single_file:
            return
        if is_folder == self._single_file:
            kind, other = ("folder", "file") if is_folder else ("file", "folder")
            raise TargetExists(f"is a {kind}, expected to write a {other}", where=self.url, hint="choose another name")
        if not self._overwrite:
            hint = 'choose another name, or replace it with "--overwrite" (it stays until the new one is complete)'
            raise TargetExists("is there already", where=self.url, hint=hint)
        if is_folder and (os.path.ismount(self._final) or _holds_own_folders(self._final)):
            hint = "choose a folder of its own for the checkpoint"
            raise UsageError(
                "is a mount point, or holds the home or working folder, and is not replaced", where=self.url, hint=hint
            )
        if os.path.lexists(self._replaced):
            raise TargetExists("is left over from an earlier run", where=self._replaced, hint="delete it")

    def _claim(self, *, resume: bool) -> None:
        """Own the partial folder: a new one, or with ``resume`` the one that is there."""
        os.makedirs(os.path.dirname(self._final), exist_ok=True)
        if os.path.lexists(self.root):
            self._check_partial(resume=resume)
            self._lock_marker()
            if resume:
                self.is_resumed = True
                return
            self._remove_partial()
        try:
            os.mkdir(self.root)
        except FileExistsError as error:
            raise TargetExists("another process has just started to write", where=self.root) from error
        self._lock_marker()
        os.write(self._marker_fd, MARKER_TEXT.encode())
        if self._durable:
            sync_folder(os.path.dirname(self._final))

    def _check_partial(self, *, resume: bool) -> None:
        """Raise unless the partial folder is ours and we are told what to do with it."""
        is_ours = os.path.isfile(os.path.join(self.root, MARKER_NAME))
        if not is_ours and (not os.path.isdir(self.root) or os.path.islink(self.root) or os.listdir(self.root)):
            message = f"has no {MARKER_NAME} file in it, and is neither resumed nor replaced"
            hint = "look at it: a run killed at its very end leaves a complete checkpoint here; rename or delete it"
            raise TargetExists(message, where=self.root, hint=hint)
        if not (resume or self._overwrite):
            hint = 'continue it with "--resume", or start anew with "--overwrite"'
            raise TargetExists("an earlier run was interrupted here", where=self.root, hint=hint)

    def _lock_marker(self) -> None:
        """Hold the marker file locked; the system lets go of it when this process ends in whatever way."""
        self._marker_fd = os.open(os.path.join(self.root, MARKER_NAME), os.O_RDWR | os.O_CREAT, 0o666)
        if not hold(self._marker_fd):
            self._unlock()
            hint = "wait until it has ended, or choose another name"
            raise TargetExists("another process is writing here now", where=self.root, hint=hint)

    def _unlock(self) -> None:
        if self._marker_fd >= 0:
            with suppress(OSError):  # the marker has said what it had to
                os.close(self._marker_fd)
            self._marker_fd = -1

    def _remove_partial(self) -> None:
        """Remove the partial folder, locked until it is gone where the system removes what is open."""
        if _IS_WINDOWS:
            self._unlock()
        remove(self.root)
        self._unlock()

    def _swap_in(self) -> None:
        """Rename the partial folder; what has the final name is swapped out in the same step where the system can."""
        if _IS_WINDOWS:
            self._unlock()  # it neither deletes nor renames what is open
        for name in os.listdir(self.root):
            if name.startswith(OWN_NAMES):
                os.unlink(os.path.join(self.root, name))
        swap_in(self.root, self._final, self._replaced)

    def _failure(self, error: OSError, what: str, *, needed: int | None = None) -> CkptError:
        """``error`` as one of ours."""
        if isinstance(error, CkptError):
            return error
        if error.errno in _NO_SPACE:
            free = shutil.disk_usage(os.path.dirname(self._final)).free
            need = f"{needed:,} bytes more are needed" if needed is not None else "more is needed"
            hint = f'make room, then go on with "--resume", or delete "{self.root}"'
            return StorageError(f"{what}: no room, {need}, {free:,} are free", where=self.root, hint=hint)
        above = os.path.dirname(self._final)
        while above != os.path.dirname(above) and not os.path.lexists(above):
            above = os.path.dirname(above)
        if not os.path.isdir(above):
            return StorageError(f"{what}: {above} is no folder", where=self.root, hint="choose another name")
        return StorageError(f"{what}: {error.strerror or error}", where=self.root)


def _holds_own_folders(folder: str) -> bool:
    real, here, home = map(os.path.realpath, (folder, os.getcwd(), os.path.expanduser("~")))
    return any(place == real or place.startswith(real.rstrip(os.sep) + os.sep) for place in (here, home))
