"""A folder in a place for parts that several processes write together: each sends its own, one of them joins them all.

States: marked (the marker names the save) -> every process has sent the parts of its files and says which -> the old
checkpoint gone -> joined, each only where nothing of its name is -> measured -> the file that makes it a checkpoint ->
the marker gone. Until the one begins to join, nothing has a final name but the marker; parts of a killed process are
in no file, whoever sends others under the same names.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ckpt_tool.errors import CkptError, StorageError, TargetExists
from ckpt_tool.manifest.digest_table import SUFFIX
from ckpt_tool.sizes import counted
from ckpt_tool.storage.fetch import fetch_all
from ckpt_tool.storage.parts.commit import delete_old, measure
from ckpt_tool.storage.parts.place import PartPlace
from ckpt_tool.storage.parts.uploads import N_UPLOADS, PartFile, PartUploads
from ckpt_tool.storage.shared_target import Receipts
from ckpt_tool.storage.side_file import put_side_file
from ckpt_tool.storage.unfinished import COMMIT_NAMES, MARKER_NAME
from ckpt_tool.storage.urls import check_path, join_url

__all__ = ["SharedParts"]

_MEMORY_BYTES = 128 << 20
"""Parts under way of one process."""
_MARKER = b"A save that has not ended: not a checkpoint. ckpt clean removes it."
_HINT = "choose another name, or pass overwrite=True"


class SharedParts:
    """Files of the save called ``token`` below the name of ``place``."""

    def __init__(self, place: PartPlace, token: str, *, overwrite: bool) -> None:
        self.url = place.url
        self._place = place
        self._marker = _MARKER + f" Save {token}.\n".encode()
        self._overwrite = overwrite
        self._uploads = PartUploads(place, memory_bytes=_MEMORY_BYTES)
        self._lock = threading.Lock()
        self._is_marked = False
        self._files: list[PartFile] = []
        self._joined: list[str] = []
        self._is_committed = False

    def check(self) -> None:
        """Raise when something is there that is not to be replaced.

        Raises:
            TargetExists: so it is.
        """
        if not self._overwrite and self._place.old_files():
            raise TargetExists("is there already", where=self.url, hint=_HINT)

    def create(self, path: str, nbytes: int) -> _SharedPartFile:
        """A file in the making; the first one marks the folder as unfinished.

        Raises:
            StorageError: the storage refused.
        """
        check_path(path, root=self.url)
        file = PartFile(path, join_url(self.url, path), nbytes, is_last=False)
        with self._lock:
            if not self._is_marked:
                self._place.put(MARKER_NAME, self._marker, is_new=True)  # that of a killed save says as much
                self._is_marked = True
            self._files.append(file)
        return _SharedPartFile(self._uploads, file)

    def commit(
        self, files: Mapping[str, int], last: Iterable[tuple[str, bytes]], receipts: Receipts,
        digests: bytes | None = None,
    ) -> None:  # fmt: skip
        """Join what all processes have sent, see that it is whole, and put the last files, in order.

        Raises:
            TargetExists: another save has completed a checkpoint of that name in the meantime, or is about to.
            StorageError: a file has another size; the storage refused.
        """
        self.check()
        self._place.put(MARKER_NAME, self._marker)
        if not self._place.is_named_last:
            delete_old(self._place, self._place.old_files())
        fetch_all(self._join, [self._sent(path, n, receipts) for path, n in files.items()], concurrency=N_UPLOADS)
        measure(self._place, files)
        *others, (commit_path, commit_data) = last
        for path, data in others:
            self._put_new(path, data)
        if self._place.get(MARKER_NAME) != self._marker:
            self._joined = []  # what bears these names now may be the other's
            raise self._taken()
        if digests is not None:
            put_side_file(self.url.rstrip("/") + SUFFIX, digests, mark=None, what="list of digests")
        self._put_new(commit_path, commit_data)
        if self._place.is_named_last:
            self._place.delete(MARKER_NAME)
            self._place.finish(replace=self._overwrite)
            self._is_committed = True
            return
        self._is_committed = True
        with suppress(StorageError):  # ckpt clean does as much; the checkpoint is whole
            for path, begun in self._place.under_way():
                self._place.drop(path, begun.token)
            self._place.delete(MARKER_NAME)

    def discard(self) -> None:
        """Let go of what this process has sent and joined; the last one to do so removes the marker."""
        self._uploads.stop()
        if self._is_committed:
            return
        if self._place.is_named_last:
            self._place.clear()
            return
        for path in reversed(self._joined):
            self._place.delete(path)
        for file in self._files:
            if file.token is not None:
                self._place.drop(file.path, file.token)
        if self._place.under_way() or self._place.get(MARKER_NAME) != self._marker:
            return
        left = self._place.old_files()
        if not left or any(path.endswith(COMMIT_NAMES) for path in left):  # else the old checkpoint is half gone
            self._place.delete(MARKER_NAME)

    def close(self) -> None:
        """Close connections."""
        self._uploads.stop()
        self._place.close()

    def _sent(self, path: str, nbytes: int, receipts: Receipts) -> PartFile:
        """A file that some process has sent."""
        file = PartFile(path, join_url(self.url, path), nbytes, is_last=False)
        if path not in receipts:
            raise StorageError("nobody says which parts were sent", where=file.where)
        file.take_receipt(receipts[path])
        return file

    def _join(self, file: PartFile) -> None:
        self._joined.append(file.path)
        if not self._uploads.join(file, is_new=True):
            self._joined.remove(file.path)
            raise self._taken()

    def _put_new(self, path: str, data: bytes) -> None:
        self._joined.append(check_path(path, root=self.url))
        if not self._place.put(path, data, is_new=True) and self._place.get(path) != data:
            self._joined.remove(path)
            raise self._taken()

    def _taken(self) -> TargetExists:
        return TargetExists("another save is completing a checkpoint of this name", where=self.url, hint=_HINT)


class _SharedPartFile:
    """One file of this process."""

    def __init__(self, uploads: PartUploads, file: PartFile) -> None:
        self._uploads = uploads
        self._file = file

    def write(self, buffers: Sequence[memoryview]) -> None:
        """Append; parts leave in the background."""
        file = self._file
        for buffer in buffers:
            if file.position + buffer.nbytes > file.nbytes:
                end = file.position + buffer.nbytes
                raise StorageError(
                    f"a write to {end:,} does not fit the {counted(file.nbytes, 'byte')}", where=file.where
                )
            if buffer.nbytes:
                self._uploads.append(file, buffer.cast("B"), n_files=1)

    def finish(self) -> list[Any]:
        """Wait until all parts are in the storage; the file's token and its parts."""
        file = self._file
        if file.position != file.nbytes:
            raise StorageError(f"expected {counted(file.nbytes, 'byte')}, got {file.position:,}", where=file.where)
        self._uploads.flush()
        return file.receipt()

    def abandon(self) -> None:
        """Nothing more leaves; the parts go with ``discard``."""
        with suppress(CkptError):
            self._uploads.flush()
