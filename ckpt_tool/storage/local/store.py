"""A local store reads files below one folder of this machine; it knows no format.

Paths come out of checkpoints and are not trusted: whatever leaves the folder, by name or by symbolic link, is refused.
Nothing is mapped into memory here, because a file that shrinks under a mapping kills the process (see `mapped`).
"""

from __future__ import annotations

import errno
import io
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cached_property
from typing import TYPE_CHECKING

from ckpt_tool.errors import CkptError, FormatError, NotFound, StorageError, UsageError
from ckpt_tool.manifest.model import FileRange
from ckpt_tool.sizes import counted, shell_word
from ckpt_tool.storage.fetch import fetch_all
from ckpt_tool.storage.local.handles import Handle, Handles
from ckpt_tool.storage.store import Listing, ReadCost, without_shadows
from ckpt_tool.storage.urls import check_path, join_url

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["LOCAL_COST", "LocalStore"]

# Measured on an NVMe disk: reading over a gap of 64 KiB costs what a request of its own does when the cache is cold,
# one of 16 KiB when it is warm. Four requests at once give 37,000 cold reads of 4 KiB a second, one 11,600, sixteen no
# more than four.
LOCAL_COST = ReadCost(max_gap_bytes=32 << 10, max_read_bytes=8 << 20, concurrency=4)
MAX_OPEN_FILES = 128
MAX_DEPTH = 8
"""Folders below the root that a listing enters; the deepest known format (orbax OCDBT) needs four."""
MAX_FILES = 2_000_000
# A server of a network file system that starts anew, or a file replaced there, fails reads of handles from before.
_PASSING = frozenset({errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.ECONNRESET, errno.EAGAIN})
_TRIES = (0.1, 1.0, None)
"""Seconds to wait when a try has failed; None behind the last one."""
_CHECK_FIRST_BYTES = 1 << 20
"""Longer reads are compared with the file's size before memory is allocated for them."""


class LocalStore:
    """Files below ``root``.

    Args:
        root: a folder.
        entry: the one file in it that the user named; the listing then has only it and its siblings.
        url: how messages name the folder; ``root`` by default.
    """

    def __init__(self, root: str, *, entry: str | None = None, url: str | None = None) -> None:
        self.url = root if url is None else url
        self.cost = LOCAL_COST
        self._root = os.path.abspath(root)
        self._entry = entry
        self._links: dict[str, str] = {}
        self._handles = Handles(self._open, limit=MAX_OPEN_FILES)

    def listing(self, *, anew: bool = False) -> Listing:
        """All regular files at most ``MAX_DEPTH`` folders down, links to files included; cached.

        Links to folders are followed only where they lead to a folder below the root that was not listed before, so
        that neither loops nor ``latest -> step_500`` list anything twice.

        Raises:
            NotFound: the root is missing.
            StorageError: a folder cannot be read.
            UsageError: more than ``MAX_FILES`` files, which no checkpoint has.
        """
        return LocalStore(self._root, entry=self._entry, url=self.url).listing() if anew else self._listing

    def read(self, path: str, offset: int, length: int) -> bytes:
        """``length`` bytes of ``path`` from ``offset``: one request."""
        if offset < 0 or length < 0:
            _check_range(offset, length, join_url(self.url, path))
        for pause_s in _TRIES:
            try:
                with self._handles.borrow(path) as handle:
                    if length > _CHECK_FIRST_BYTES:
                        available = max(os.fstat(handle.file.fileno()).st_size - offset, 0)
                        if available < length:
                            raise _too_short(join_url(self.url, path), offset, length, available)
                    data = handle.read_at(offset, length)
                break
            except OSError as error:
                self._recover(error, path, join_url(self.url, path), pause_s)
        if len(data) != length:
            raise _too_short(join_url(self.url, path), offset, length, len(data))
        return data

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``path`` at ``offset``: one request."""
        view = buffer.cast("B") if buffer.nbytes else memoryview(b"")
        if offset < 0:
            _check_range(offset, len(view), join_url(self.url, path))
        for pause_s in _TRIES:
            try:
                with self._handles.borrow(path) as handle:
                    n = handle.read_into_at(offset, view)
                break
            except OSError as error:
                self._recover(error, path, join_url(self.url, path), pause_s)
        if n != len(view):
            raise _too_short(join_url(self.url, path), offset, len(view), n)

    def fetch(self, ranges: Sequence[FileRange]) -> list[bytes]:
        """The bytes of each range, in order; one request each, ``cost.concurrency`` at once."""
        with _SameFile(self, self._handles) as one_by_one:
            return fetch_all(
                lambda r: self.read(r.path, r.offset, r.length),
                ranges,
                concurrency=self.cost.concurrency,
                may_be_cached=True,
                read_alone=one_by_one.read,
            )

    def borrow(self, path: str) -> AbstractContextManager[Handle]:
        """The open file, for calls of the system that take one."""
        return self._handles.borrow(path)

    def close(self) -> None:
        """Close all files; further reads fail."""
        self._handles.close()

    @cached_property
    def _homes(self) -> tuple[str, ...]:
        """Real folders that files may lie in: the root, and what the user pointed at by other means."""
        homes = [os.path.realpath(self._root)]
        revisions = os.path.dirname(homes[0])
        if os.path.basename(revisions) == "snapshots":
            # The cache of huggingface_hub: snapshots/<revision>/<file> are links to ../../blobs/<digest>.
            homes.append(os.path.join(os.path.dirname(revisions), "blobs"))
        if self._entry is not None:
            homes.append(os.path.dirname(os.path.realpath(os.path.join(self._root, self._entry))))
        return tuple(homes)

    def real_path(self, path: str) -> str:
        """Where a file really lies, links followed.

        Raises:
            FormatError: it leaves the folder, or is no file.
        """
        full = os.path.join(self._root, check_path(path, root=self.url))
        where = join_url(self.url, path)
        real = os.path.realpath(full)
        if not self._is_inside(real):
            folder = os.path.dirname(real)
            if os.path.basename(folder) == "blobs" and f"{os.sep}snapshots{os.sep}" in os.path.abspath(full):
                folder = os.path.dirname(full)  # of huggingface_hub's cache, where the links are what has names
            hint = f"if you trust it, open the folder that it points to: {shell_word(folder)}"
            raise FormatError(f"is a link out of the checkpoint's folder, to {real!r}", where=where, hint=hint)
        try:
            mode = os.stat(real).st_mode
        except (FileNotFoundError, NotADirectoryError) as error:  # gone since it was listed, or never here
            raise _failure(error, where) from error
        if not stat.S_ISREG(mode):  # opening a pipe would wait for ever
            kind = "folder" if stat.S_ISDIR(mode) else "pipe, socket or device"
            raise FormatError(f"expected a file, got a {kind}", where=where)
        return real

    def _recover(self, error: OSError, path: str, where: str, pause_s: float | None) -> None:
        """Return when a read may be tried again, with the file opened anew; else raise ``error`` as one of ours."""
        if pause_s is None or error.errno not in _PASSING or isinstance(error, CkptError):
            raise _failure(error, where) from error
        self._handles.forget(path)
        time.sleep(pause_s)

    def _open(self, path: str) -> io.FileIO:
        return io.FileIO(self.real_path(path), "rb")

    def _is_inside(self, real: str) -> bool:
        return any(real == home or real.startswith(home.rstrip(os.sep) + os.sep) for home in self._homes)

    @cached_property
    def _listing(self) -> Listing:
        sizes: dict[str, int] = {}
        modified: dict[str, float] = {}
        empty: list[str] = []
        for path, found in self._walk():
            if found is None:
                empty.append(path)
                continue
            sizes[path], modified[path] = found.st_size, found.st_mtime
            if len(sizes) > MAX_FILES:
                hint = "name a folder further down"
                raise UsageError(f"has more than {counted(MAX_FILES, 'file')} below it", where=self.url, hint=hint)
        listed = without_shadows(dict(sorted(sizes.items())), self._entry)
        return Listing(self.url, listed, self._entry, modified, tuple(sorted(empty)), self._links)

    def _walk(self) -> Iterator[tuple[str, os.stat_result | None]]:
        """Relative path and state of each file, None for an empty folder; real folders before linked ones."""
        seen: set[str] = set()
        folders, linked = [""], list[str]()
        while folders or linked:
            folder = folders.pop() if folders else linked.pop()
            real = os.path.realpath(os.path.join(self._root, folder))
            if real in seen or not self._is_inside(real):
                continue
            seen.add(real)
            entries = self._scan(folder)
            if folder and not entries:
                yield folder, None
            for entry in entries:
                path = f"{folder}/{entry.name}" if folder else entry.name
                try:
                    if entry.is_symlink() and not entry.is_file():
                        self._links[path] = self._leads_to(path)
                    if entry.is_dir():
                        is_deep = self._entry is not None or path.count("/") >= MAX_DEPTH
                        # Every ext4 volume has a lost+found, which only root may read.
                        if not is_deep and entry.name != "lost+found":
                            (linked if entry.is_symlink() else folders).append(path)
                    elif entry.is_file():
                        yield path, entry.stat()
                except OSError as error:
                    if error.errno not in {errno.ENOENT, errno.ELOOP}:  # removed since, a link to nothing or to itself
                        raise _failure(error, join_url(self.url, path)) from error

    def _leads_to(self, path: str) -> str:
        """Where a link leads to: below the root, or as it stands."""
        full = os.path.join(self._root, path)
        real, root = os.path.realpath(full), os.path.realpath(self._root)
        if real.startswith(root.rstrip(os.sep) + os.sep):
            return os.path.relpath(real, root).replace(os.sep, "/")
        return os.readlink(full)

    def _scan(self, folder: str) -> list[os.DirEntry[str]]:
        found: list[os.DirEntry[str]] = []
        for pause_s in _TRIES:
            try:
                with os.scandir(os.path.join(self._root, folder)) as entries:
                    found = list(entries)
                break
            except OSError as error:
                if pause_s is None or error.errno not in _PASSING:
                    raise _failure(error, join_url(self.url, folder)) from error
                time.sleep(pause_s)
        return found


class _SameFile:
    """Short reads of one thread, which keep the file of the read before: to take it anew costs as much as a read."""

    def __init__(self, store: LocalStore, handles: Handles) -> None:
        self._store, self._handles = store, handles
        self._path = ""
        self._handle: Handle | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle is not None:
            self._handles.give_back(self._handle)
            self._handle = None

    def read(self, place: FileRange) -> bytes:
        """One range."""
        if 0 <= place.length <= _CHECK_FIRST_BYTES and place.offset >= 0:
            with suppress(OSError):
                data = self._of(place.path).read_at(place.offset, place.length)
                if len(data) == place.length:
                    return data
        return self._store.read(place.path, place.offset, place.length)  # which tries again, or says what is wrong

    def _of(self, path: str) -> Handle:
        if self._handle is None or path != self._path:
            self.__exit__()
            self._handle = self._handles.take(path)
            self._path = path
        return self._handle


def _check_range(offset: int, length: int, where: str) -> None:
    if offset < 0 or length < 0:
        raise FormatError(f"expected a byte range, got offset {offset:,} and length {length:,}", where=where)


def _too_short(where: str, offset: int, length: int, got: int) -> StorageError:
    missing = length - got
    message = f"expected {counted(length, 'byte')}, got {got:,} before the end of the file ({missing:,} missing)"
    return StorageError(message, where=f"{where}:{offset}")


def _failure(error: OSError, where: str) -> Exception:
    """``error`` as one of ours."""
    if isinstance(error, (StorageError, NotFound)):
        return error
    if error.errno == errno.ENOENT:
        return NotFound("no such file", where=where)
    if error.errno == errno.ENOTDIR:
        return NotFound("no such file, a part of the path is not a folder", where=where)
    return StorageError(f"cannot be read: {error.strerror or error}", where=where)
