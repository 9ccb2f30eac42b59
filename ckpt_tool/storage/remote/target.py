"""A stream target writes files front to back to any URL that fsspec knows: no seek, no append, no rename.

Object stores show an object when its upload is complete, so that order does what a rename does elsewhere: the file
that makes the target a checkpoint is uploaded last. Knows nothing of what the files mean.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from functools import partial
from typing import Any

from fsspec.spec import AbstractBufferedFile

from ckpt_tool.errors import CkptError, NotFound, StorageError, TargetExists, UsageError
from ckpt_tool.records import dataclass, field
from ckpt_tool.sizes import counted
from ckpt_tool.storage.remote.file_system import open_remote
from ckpt_tool.storage.remote.retry import attempt, retried
from ckpt_tool.storage.traffic import current_traffic
from ckpt_tool.storage.unfinished import COMMIT_NAMES
from ckpt_tool.storage.urls import check_path, join_url, shown

__all__ = ["HELD_BYTES", "StreamTarget"]

HELD_BYTES = 64 << 20
"""The last file is held back in memory up to this size; a larger one is uploaded and its upload completed last."""
MIN_BLOCK_BYTES = 16 << 20
MAX_PARTS = 10_000
"""Parts of one multipart upload (S3)."""


@dataclass(slots=True, eq=False)
class _Upload:
    """One file under way."""

    key: str
    where: str
    nbytes: int
    is_last: bool
    position: int = 0
    held: bytearray | None = None
    handle: Any = None
    is_complete: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class StreamTarget:
    """A remote folder, or with ``single_file`` one remote file.

    Args:
        url: the final name; kept as it is, never normalised.
        overwrite: delete what is there, from the first ``create`` on.
        single_file: ``url`` names one file; exactly one may be created, and it becomes visible in ``commit``.

    Raises:
        TargetExists: something is there and ``overwrite`` was not given.
        UsageError: unknown scheme, missing client, or a whole bucket to be overwritten.
    """

    is_sequential = True
    is_resumed = False
    journal = None

    def __init__(self, url: str, *, overwrite: bool, single_file: bool) -> None:
        self.url = shown(url)
        self._fs, root = open_remote(url)
        self._root = root.rstrip("/")
        self._single_file = single_file
        self._traffic = current_traffic()
        self._uploads: dict[str, _Upload] = {}
        self._lock = threading.Lock()
        self._old = self._existing()
        if self._old and not overwrite:
            hint = 'choose another name, or replace it with "--overwrite" (the old one is deleted first)'
            raise TargetExists(f"is there already, with {counted(len(self._old), 'file')}", where=self.url, hint=hint)
        is_folder = self._old not in ([], [root])
        if is_folder and single_file:
            raise TargetExists("is a folder, expected to write a file", where=self.url, hint="name the file in it")
        if is_folder and "/" not in self._root:  # only object stores spell paths without a slash in front
            raise UsageError("is a whole bucket, and is not overwritten", where=self.url, hint="name a folder in it")

    def create(self, path: str, nbytes: int, *, is_last: bool = False) -> None:
        """Announce a file of ``nbytes``; its upload begins with the first write. The first call deletes the old target.

        Raises:
            FormatError: the path leaves the target.
            StorageError: announced twice.
        """
        check_path(path, root=self.url)
        key = self._root if self._single_file else f"{self._root}/{path}"
        where = self.url if self._single_file else join_url(self.url, path)
        with self._lock:
            if path in self._uploads:
                raise StorageError("created twice", where=where)
            if self._single_file and self._uploads:
                raise UsageError(
                    f"expected one file, got {path!r} beside {next(iter(self._uploads))!r}", where=self.url
                )
            self._delete_old()
            upload = _Upload(key, where, nbytes, is_last=is_last or self._single_file)
            self._uploads[path] = upload
        if upload.is_last and nbytes <= HELD_BYTES:
            upload.held = bytearray()
        elif nbytes == 0:
            self._open(upload)
            self._complete(upload)

    def start_of(self, path: str) -> int:  # noqa: ARG002 - of every file
        """0: nothing outlives the process."""
        return 0

    def write(self, path: str, offset: int, buffer: bytes | bytearray | memoryview) -> None:
        """Append ``buffer``, which must begin where the file ends now; the last byte completes the upload.

        Raises:
            StorageError: not created, out of order, beyond the announced size, or refused.
        """
        upload = self._uploads.get(path)
        if upload is None:
            raise StorageError("written to before it was created", where=join_url(self.url, path))
        view = memoryview(buffer)
        with upload.lock:
            if offset != upload.position:
                message = f"remote files are written front to back: expected offset {upload.position:,}, got {offset:,}"
                raise StorageError(message, where=upload.where)
            end = offset + view.nbytes
            if end > upload.nbytes:
                message = (
                    f"a write from {offset:,} to {end:,} does not fit the {counted(upload.nbytes, 'byte')} of the file"
                )
                raise StorageError(message, where=upload.where)
            if not view.nbytes:
                return
            if upload.held is not None:
                upload.held += view.cast("B")
            else:
                if upload.handle is None:
                    self._open(upload)
                handle = upload.handle
                attempt(lambda: handle.write(view.cast("B")), where=upload.where)
                self._traffic.note(requests=0, sent=view.nbytes)
            upload.position = end
            if end == upload.nbytes and not upload.is_last:
                self._complete(upload)

    def flush(self) -> None:
        """Do nothing: an upload becomes durable as a whole, when it is complete."""

    def free_bytes(self) -> int | None:
        """None: object stores do not tell."""
        return None

    def commit(self, last_path: str | None) -> None:
        """Check that every file is complete, then make the last one visible.

        Raises:
            StorageError: a file is missing bytes, ``last_path`` was not created with ``is_last``, or refused.
        """
        last = [path for path, upload in self._uploads.items() if upload.is_last]
        if last_path is not None and last_path not in last:
            message = f"the file that makes it a checkpoint, {last_path!r}, was not created as the last one"
            raise StorageError(message, where=self.url)
        for upload in self._uploads.values():
            if upload.position != upload.nbytes:
                message = f"expected {counted(upload.nbytes, 'byte')} before the commit, got {upload.position:,}"
                raise StorageError(message, where=upload.where)
        for path in last:
            upload = self._uploads[path]
            held = upload.held
            if held is not None:
                self._traffic.note(sent=len(held))
                retried(partial(self._fs.pipe_file, upload.key, bytes(held)), where=upload.where)
                upload.held = None
                upload.is_complete = True
            else:
                self._complete(upload)
        self._fs.invalidate_cache()

    def abandon(self, *, discard: bool = False) -> None:  # noqa: ARG002 - nothing here could be resumed
        """Abort uploads under way, and delete completed files as far as the storage still answers."""
        for upload in self._uploads.values():
            handle = upload.handle
            with suppress(CkptError, AttributeError):  # a file class without discard
                if handle is not None and not upload.is_complete:
                    attempt(handle.discard, where=upload.where)
            if isinstance(handle, AbstractBufferedFile):
                handle.closed = True  # or the collector would close it, and thereby complete the upload
            with suppress(CkptError):
                if handle is not None and attempt(partial(self._fs.exists, upload.key), where=upload.where):
                    attempt(partial(self._fs.rm_file, upload.key), where=upload.where)
        self._uploads.clear()
        self._fs.invalidate_cache()

    def _open(self, upload: _Upload) -> None:
        block_bytes = max(MIN_BLOCK_BYTES, -(-upload.nbytes // (MAX_PARTS - 1)))
        # Without autocommit an upload is completed by commit(), so that a large last file stays invisible until then.
        upload.handle = attempt(
            lambda: self._fs.open(upload.key, "wb", block_size=block_bytes, autocommit=not upload.is_last),
            where=upload.where,
        )

    def _complete(self, upload: _Upload) -> None:
        handle = upload.handle
        self._traffic.note()
        attempt(handle.close, where=upload.where)
        if upload.is_last:
            attempt(handle.commit, where=upload.where)
        upload.is_complete = True

    def _existing(self) -> list[str]:
        """Keys of the files under the final name."""
        self._fs.invalidate_cache()
        try:
            found = retried(lambda: self._fs.find(self._root, detail=True), where=self.url)
        except NotFound:
            return []
        # Some stores list a folder that was emptied a moment ago.
        return [str(key) for key, info in found.items() if info.get("type") != "directory"]

    def _delete_old(self) -> None:
        """Delete the old target, first what makes it a checkpoint."""
        first = [key for key in self._old if key.endswith(COMMIT_NAMES)]
        rest = sorted(set(self._old) - set(first))
        self._old = []
        for key in [*first, *rest]:
            with suppress(NotFound):
                retried(partial(self._fs.rm_file, key), where=self.url)
