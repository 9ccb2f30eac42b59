"""An HDFS store reads byte ranges of the files below one folder; it knows no format."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_tool.errors import FormatError, NotFound, StorageError
from ckpt_tool.manifest.model import FileRange
from ckpt_tool.storage.fetch import fetch_all
from ckpt_tool.storage.hdfs.client import HdfsClient, split_hdfs_url
from ckpt_tool.storage.listed_once import ListedOnce
from ckpt_tool.storage.nearby import did_you_mean
from ckpt_tool.storage.store import REMOTE_COST, Listing, without_shadows
from ckpt_tool.storage.urls import check_path, join_url

__all__ = ["HdfsStore", "open_hdfs"]


class HdfsStore:
    """Files below ``url``.

    Args:
        url: a folder.
        client: of its name node, None for a new one.
        entry: the one file in it that the user named; the listing then has only it and its siblings.
    """

    def __init__(self, url: str, *, client: HdfsClient | None = None, entry: str | None = None) -> None:
        self.url = url
        self.cost = REMOTE_COST
        root, path = split_hdfs_url(url)
        self._client = HdfsClient(root) if client is None else client
        self._root = path.rstrip("/")
        self._entry = entry
        self._listing = ListedOnce(self._listed)
        self._is_closed = False

    def listing(self, *, anew: bool = False) -> Listing:
        """All files below the root, or the entry and its siblings, with their times; cached.

        Raises:
            NotFound: nothing is below the root.
        """
        return self._listing.get(anew=anew)

    def _listed(self) -> Listing:
        found = [f for f in self._client.files(self._root or "/", deep=self._entry is None) if not f.is_folder]
        files = {f.path[len(self._root) + 1 :]: f for f in found}
        if not files:
            raise NotFound("nothing is here", where=self.url)
        sizes = without_shadows({path: files[path].nbytes for path in sorted(files)}, self._entry)
        times = {path: f.modified for path, f in files.items()}
        return Listing(self.url, sizes, self._entry, times)

    def read(self, path: str, offset: int, length: int) -> bytes:
        """``length`` bytes of ``path`` from ``offset``; the first time the name node is asked too."""
        return bytes(self._range(path, offset, length))

    def _range(self, path: str, offset: int, length: int) -> bytearray:
        where = join_url(self.url, path)
        if self._is_closed:
            raise StorageError("used after it was closed", where=where)
        if offset < 0 or length < 0:
            raise FormatError(f"expected a byte range, got offset {offset:,} and length {length:,}", where=where)
        full = f"{self._root}/{check_path(path, root=self.url)}"
        return self._client.read(full, offset, length, where=where)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``path`` at ``offset``: one request, and one copy of the bytes."""
        data = self._range(path, offset, buffer.nbytes)
        if data:
            buffer.cast("B")[:] = data

    def fetch(self, ranges: Sequence[FileRange]) -> list[bytes]:
        """The bytes of each range, in order; one request each, ``cost.concurrency`` at once."""
        return fetch_all(lambda r: self.read(r.path, r.offset, r.length), ranges, concurrency=self.cost.concurrency)

    def close(self) -> None:
        """Make further reads fail."""
        self._is_closed = True


def open_hdfs(url: str) -> HdfsStore:
    """The store of a folder, or of a file's folder with that file as its entry.

    Raises:
        NotFound: nothing is there; the hint names what is nearby.
        UsageError: the client is not installed.
        StorageError: the name node does not answer.
    """
    root, path = split_hdfs_url(url)
    client = HdfsClient(root)
    found = client.info(path)
    folder, _, name = path.rpartition("/")
    if found is None:
        names = [f.path.rpartition("/")[2] for f in client.files(folder or "/", deep=False)]
        raise NotFound("no such file or folder", where=url, hint=did_you_mean(name, names))
    if found.is_folder:
        return HdfsStore(url, client=client)
    return HdfsStore(f"{root}{folder}", client=client, entry=name)
