"""An fsspec store reads byte ranges below any URL that fsspec knows; it knows no format.

Requests that fail for a moment (timeouts, resets, 5xx, short answers) are sent again a bounded number of times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_tool.errors import FormatError, NotFound, StorageError
from ckpt_tool.manifest.model import FileRange
from ckpt_tool.sizes import counted
from ckpt_tool.storage.fetch import fetch_all
from ckpt_tool.storage.listed_once import ListedOnce
from ckpt_tool.storage.local.store import MAX_DEPTH
from ckpt_tool.storage.remote.file_system import WEB, modified_of, open_remote, tag_of
from ckpt_tool.storage.remote.retry import failure_of, retried
from ckpt_tool.storage.store import REMOTE_COST, Listing, without_shadows
from ckpt_tool.storage.traffic import current_traffic
from ckpt_tool.storage.urls import check_path, join_url, scheme_of, shown, split_url

__all__ = ["FsspecStore", "open_fsspec"]


class _ShortAnswerError(OSError):
    """The server sent another number of bytes than was asked for."""


class FsspecStore:
    """Files below ``url``.

    Args:
        url: a folder; kept as it is, never normalised.
        entry: the one file in it that the user named.
        entry_query: what follows the entry's name in its URL (``?download=true``).
    """

    def __init__(self, url: str, *, entry: str | None = None, entry_query: str = "") -> None:
        self.url = shown(url)
        self.cost = REMOTE_COST
        self._fs, root = open_remote(url)
        self._root = root.rstrip("/")
        self._entry = entry
        self._entry_query = entry_query
        self._listing = ListedOnce(self._listed)
        self._is_closed = False
        self._traffic = current_traffic()

    def listing(self, *, anew: bool = False) -> Listing:
        """All files below the root, or the entry and its siblings; one request per page, cached.

        Raises:
            NotFound: nothing is below the root.
        """
        return self._listing.get(anew=anew)

    def read(self, path: str, offset: int, length: int) -> bytes:
        """``length`` bytes of ``path`` from ``offset``: one request; for an empty range a look at the size."""
        where = self._where(path, offset, length)
        if length == 0:
            self._size(path, where)
            return b""
        key = self._key(path)
        on_retry = self._traffic.note_retry
        return retried(lambda: self._read_once(key, path, offset, length), where=where, on_retry=on_retry)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``path`` at ``offset``: one request, and one copy of the bytes."""
        data = self.read(path, offset, buffer.nbytes)
        if data:
            buffer.cast("B")[:] = data

    def fetch(self, ranges: Sequence[FileRange]) -> list[bytes]:
        """The bytes of each range, in order; one request each, ``cost.concurrency`` at once."""
        if not getattr(self._fs, "async_impl", False) or len(ranges) <= 1:
            return fetch_all(lambda r: self.read(r.path, r.offset, r.length), ranges, concurrency=self.cost.concurrency)
        wanted = [(index, r) for index, r in enumerate(ranges) if r.length]
        for r in ranges:
            self._where(r.path, r.offset, r.length)
        self._traffic.note(requests=len(wanted))
        answers = self._fs.cat_ranges(
            [self._key(r.path) for _, r in wanted],
            [r.offset for _, r in wanted],
            [r.end for _, r in wanted],
            batch_size=self.cost.concurrency,
            on_error="return",
        )
        results = [b""] * len(ranges)
        for (index, r), answer in zip(wanted, answers, strict=True):
            if isinstance(answer, Exception):
                where = join_url(self.url, r.path)
                failure = failure_of(answer, where)
                if failure is None or isinstance(failure, NotFound):
                    raise (failure or answer) from answer
            is_right = isinstance(answer, (bytes, bytearray)) and len(answer) == r.length
            if is_right:
                self._traffic.note(requests=0, received=r.length)
            results[index] = bytes(answer) if is_right else self.read(r.path, r.offset, r.length)
        return results

    def close(self) -> None:
        """Make further reads fail. The client belongs to fsspec, which shares it."""
        self._is_closed = True

    def _read_once(self, key: str, path: str, offset: int, length: int) -> bytes:
        self._traffic.note()
        try:
            data = self._fs.cat_file(key, start=offset, end=offset + length)
        except (OSError, ValueError) as error:
            # Object stores answer a range behind the end with an error that says little.
            if not isinstance(error, FileNotFoundError):
                self._check_end(path, offset, length)
            raise
        if len(data) > length:
            raise StorageError(
                f"expected {counted(length, 'byte')}, got {len(data):,}: the server does not serve byte ranges",
                where=f"{join_url(self.url, path)}:{offset}",
                hint="download the files and open them here",
            )
        if len(data) < length:
            self._check_end(path, offset, length)
            raise _ShortAnswerError(f"expected {counted(length, 'byte')}, got {len(data):,}")
        self._traffic.note(requests=0, received=length)
        return bytes(data)

    def _check_end(self, path: str, offset: int, length: int) -> None:
        """Raise when the range ends behind the file; costs a request where nothing was listed yet."""
        where = join_url(self.url, path)
        size = self._size(path, where)
        if size is not None and size < offset + length:
            got = max(size - offset, 0)
            raise StorageError(
                f"expected {counted(length, 'byte')}, got {got:,} before the end of the file ({length - got:,} "
                "missing)",
                where=f"{where}:{offset}",
            )

    def _size(self, path: str, where: str) -> int | None:
        known = self._listing.kept.sizes.get(path) if self._listing.kept is not None else None
        if known is not None:
            return known
        size = self._info(path, where).get("size")
        return None if size is None else int(size)

    def _info(self, path: str, where: str) -> dict[str, Any]:
        info: dict[str, Any] = retried(lambda: self._fs.info(self._key(path)), where=where)
        if info.get("type") == "directory":
            raise NotFound("no such file, it is a folder", where=where)
        return info

    def _key(self, path: str) -> str:
        key = f"{self._root}/{check_path(path, root=self.url)}"
        return key + self._entry_query if path == self._entry else key

    def _where(self, path: str, offset: int, length: int) -> str:
        where = join_url(self.url, path)
        if self._is_closed:
            raise StorageError("used after it was closed", where=where)
        if offset < 0 or length < 0:
            raise FormatError(f"expected a byte range, got offset {offset:,} and length {length:,}", where=where)
        return where

    def _listed(self) -> Listing:
        found: list[dict[str, Any]]
        # Links of a web page can lead round in circles, each time under another name.
        bounds = {"maxdepth": MAX_DEPTH} if scheme_of(self.url) in WEB else {}
        self._traffic.note(listings=1)
        # fsspec keeps listings; the one from before a file was written elsewhere is wrong.
        self._fs.invalidate_cache()
        if self._entry is None:
            found = list(retried(lambda: self._fs.find(self._root, detail=True, **bounds), where=self.url).values())
        elif bounds:  # folders of web servers are rarely listed
            found = []
        else:
            found = retried(lambda: self._fs.ls(self._root, detail=True), where=self.url)
        infos: dict[str, dict[str, Any]] = {}
        for info in found:
            if not info["name"].startswith(f"{self._root}/"):
                if info["name"] == self._root:
                    continue
                message = f"the server lists {info['name']!r}, which is not below the folder that was asked for"
                raise StorageError(message, where=self.url, hint="check the slashes of the URL")
            path = info["name"][len(self._root) + 1 :]
            is_around = bool(bounds) and not {".", ".."}.isdisjoint(path.split("/"))  # a link of a page to itself
            if info.get("type") == "file" and path and "?" not in path and not path.endswith("/") and not is_around:
                infos[path] = info
        if self._entry is not None:
            infos.setdefault(self._entry, {})
        infos = {path: infos[path] if infos[path].get("size") is not None else self._sized(path) for path in infos}
        if not infos:
            raise NotFound("nothing is here", where=self.url)
        times = {path: modified_of(info) for path, info in infos.items()}
        tags = {path: tag_of(info) for path, info in infos.items()}
        return Listing(
            self.url,
            without_shadows({path: int(infos[path]["size"]) for path in sorted(infos)}, self._entry),
            self._entry,
            {path: seconds for path, seconds in times.items() if seconds is not None},
            tags={path: tag for path, tag in tags.items() if tag is not None},
        )

    def _sized(self, path: str) -> dict[str, Any]:
        """What the server tells of a file of which the listing tells no size."""
        where = join_url(self.url, path)
        info = self._info(path, where)
        if info.get("size") is None:
            raise StorageError("the server does not tell the file's size", where=where, hint="download the file first")
        return info


def open_fsspec(url: str) -> FsspecStore:
    """The store of a remote folder, or of a remote file's folder with that file as its entry: one request.

    Raises:
        NotFound: nothing is there; the hint names what is nearby.
        UsageError: the scheme is unknown or its client is not installed.
    """
    fs, root = open_remote(url)
    try:
        info = retried(lambda: fs.info(root), where=shown(url))
    except NotFound as error:
        error.hint = error.hint or _nearby(fs, root)
        error.message = "no such file or folder"
        raise
    is_web = scheme_of(url) in WEB
    if info.get("type") != "file" or url.endswith("/") or (is_web and _is_web_folder(url, info)):
        return FsspecStore(url)
    plain, mark, query = url.partition("?") if is_web else (url, "", "")
    folder, name = split_url(plain)
    return FsspecStore(folder, entry=name, entry_query=mark + query)


def _is_web_folder(url: str, info: Mapping[str, Any]) -> bool:
    """Whether a web address names a server, or answers with a page where a name without an ending was asked for."""
    _, slash, path = url.partition("://")[2].partition("/")
    is_page = str(info.get("mimetype", "")).startswith("text/html")
    return not (slash and path) or (is_page and not set(".?") & set(path.rpartition("/")[2]))


def _nearby(fs: Any, root: str) -> str | None:
    from ckpt_tool.storage.nearby import did_you_mean

    folder, name = split_url(root.rstrip("/"))
    try:
        found = fs.ls(folder, detail=False)
    except (OSError, ValueError, NotImplementedError):  # a hint is worth no second failure
        return None
    return did_you_mean(name, [key.rstrip("/").rpartition("/")[2] for key in found])
