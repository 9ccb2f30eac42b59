"""A remote folder that several processes write together by what fsspec offers, each its own files, front to back.

For storage that takes no parts one by one (see ``shared_parts``). Files get their final names at once, and the one that
makes them a checkpoint is uploaded last. A checkpoint that is there already cannot be replaced in one step, so it is
refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from fsspec.spec import AbstractBufferedFile

from ckpt_tool.errors import CkptError, NotFound, StorageError, TargetExists
from ckpt_tool.manifest.digest_table import SUFFIX
from ckpt_tool.sizes import counted
from ckpt_tool.storage.remote.file_system import open_remote
from ckpt_tool.storage.remote.retry import attempt, retried
from ckpt_tool.storage.shared_target import Receipts
from ckpt_tool.storage.urls import check_path, join_url, shown

__all__ = ["SharedRemote"]

_BLOCK_BYTES = 16 << 20
_MAX_PARTS = 10_000


class SharedRemote:
    """A folder below a URL, a checkpoint once it has the file ``commit_path``."""

    def __init__(self, url: str, commit_path: str = ".metadata") -> None:
        self.url = shown(url)
        self._commit_path = commit_path
        self._fs, root = open_remote(url)
        self._root = root.rstrip("/")
        self._written: list[str] = []

    def check(self) -> None:
        """Raise when a checkpoint is there: one request.

        Raises:
            TargetExists: it has its last file.
        """
        key = f"{self._root}/{self._commit_path}"
        if retried(lambda: self._fs.exists(key), where=join_url(self.url, self._commit_path)):
            hint = "choose another name, or delete it: object stores cannot replace a folder in one step"
            raise TargetExists("a checkpoint is there already", where=self.url, hint=hint)

    def create(self, path: str, nbytes: int) -> RemoteFile:
        """A file in the making; it becomes visible when it is finished."""
        key = f"{self._root}/{check_path(path, root=self.url)}"
        where = join_url(self.url, path)
        block_bytes = max(_BLOCK_BYTES, -(-nbytes // (_MAX_PARTS - 1)))
        handle = attempt(lambda: self._fs.open(key, "wb", block_size=block_bytes), where=where)
        self._written.append(key)
        return RemoteFile(handle, where, nbytes)

    def commit(
        self, files: Mapping[str, int], last: Iterable[tuple[str, bytes]], receipts: Receipts,  # noqa: ARG002 - names say it all
        digests: bytes | None = None,
    ) -> None:  # fmt: skip
        """Check that all files are there, then upload the manifest of digests and the last files, in order.

        Raises:
            TargetExists: another checkpoint of this name has been completed in the meantime.
            StorageError: a file is not there or has another size; the storage refused.
        """
        self.check()
        self._fs.invalidate_cache()
        listed = retried(lambda: self._fs.find(self._root, detail=True), where=self.url)
        for path, nbytes in files.items():
            found = listed.get(f"{self._root}/{path}", {}).get("size")
            if found != nbytes:
                got = "nothing" if found is None else f"{found:,}"
                raise StorageError(f"expected {counted(nbytes, 'byte')}, got {got}", where=join_url(self.url, path))
        if digests is not None:
            retried(partial(self._fs.pipe_file, self._root + SUFFIX, digests), where=self.url + SUFFIX)
        for path, data in last:
            key = f"{self._root}/{check_path(path, root=self.url)}"
            retried(partial(self._fs.pipe_file, key, data), where=join_url(self.url, path))
        self._fs.invalidate_cache()

    def discard(self) -> None:
        """Delete what this process has uploaded, as far as the storage still answers."""
        for key in self._written:
            with suppress(NotFound, CkptError):
                attempt(partial(self._fs.rm_file, key), where=self.url)

    def close(self) -> None:
        """Nothing: the client belongs to fsspec, which shares it."""


class RemoteFile:
    """One upload."""

    def __init__(self, handle: Any, where: str, nbytes: int) -> None:
        self._handle = handle
        self._where = where
        self._nbytes = nbytes
        self._position = 0

    def write(self, buffers: Sequence[memoryview]) -> None:
        """Append; the client sends a part whenever it has a block."""
        for buffer in buffers:
            attempt(partial(self._handle.write, buffer), where=self._where)
            self._position += buffer.nbytes

    def finish(self) -> None:
        """Complete the upload."""
        if self._position != self._nbytes:
            raise StorageError(f"expected {counted(self._nbytes, 'byte')}, got {self._position:,}", where=self._where)
        handle, self._handle = self._handle, None
        attempt(handle.close, where=self._where)

    def abandon(self) -> None:
        """Abort the upload, if it is not complete."""
        handle, self._handle = self._handle, None
        if handle is None:
            return
        with suppress(CkptError, AttributeError):  # a file class without discard
            attempt(handle.discard, where=self._where)
        if isinstance(handle, AbstractBufferedFile):
            handle.closed = True  # or the collector would close it, and thereby complete the upload
