"""The file system of one name node, as far as checkpoints need it. Knows paths and bytes, no checkpoints.

hdfs-native speaks the protocol itself; it finds ``core-site.xml`` and ``hdfs-site.xml`` through ``HADOOP_CONF_DIR`` or
``HADOOP_HOME``, and a user in ``HADOOP_USER_NAME`` or a Kerberos ticket. It cannot CONCAT, which WebHDFS can.
"""

from __future__ import annotations

import getpass
import http.client
import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit
from xml.etree import ElementTree as ET

from ckpt_tool.errors import NotFound, StorageError, UsageError
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted
from ckpt_tool.storage.hdfs.calls import HdfsError, Watch, watched
from ckpt_tool.storage.remote.http_client import HttpClient, silence_s
from ckpt_tool.storage.remote.retry import attempt, retried
from ckpt_tool.storage.traffic import current_traffic

__all__ = ["HdfsClient", "HdfsFile", "split_hdfs_url"]

Result = TypeVar("Result")

CONNECTS_WITHIN_S = 10.0
_WEBHDFS_PORT = 9870
_MAX_READERS = 256
_BLOCK_BYTES = 128 << 20
"""Of files for which nobody wants another: what clusters have unless they are told otherwise."""
_PIECE_BYTES = 1 << 20
"""Written between two signs of life."""


@dataclass(frozen=True, slots=True)
class HdfsFile:
    """A file or folder as it is listed."""

    path: str
    nbytes: int
    is_folder: bool
    modified: float


def split_hdfs_url(url: str) -> tuple[str, str]:
    """Name node and path.

    >>> split_hdfs_url("hdfs://nn:8020/runs/a/"), split_hdfs_url("hdfs://lab/x")
    (('hdfs://nn:8020', '/runs/a'), ('hdfs://lab', '/x'))
    """
    scheme, _, rest = url.partition("://")
    authority, _, path = rest.partition("/")
    return f"{scheme}://{authority}", "/" + path.rstrip("/")


class HdfsClient:
    """Calls to one name node, each tried again while that may help. Safe to use from several threads."""

    def __init__(self, root: str) -> None:
        try:
            import hdfs_native
        except ImportError as error:
            hint = 'pip install "ckpt-tool[hdfs]"'
            raise UsageError("the client for hdfs:// is not installed", where=root, hint=hint) from error
        self.root = root
        self.traffic = current_traffic()
        self._native: Any = hdfs_native
        self._silence_s = silence_s()
        self._has_answered = False
        self._readers: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._can_concat = self._can_append = True
        _check_answers(root)
        self._client = attempt(lambda: self._in_time(lambda: hdfs_native.Client(root)), where=root)

    def _tried(self, call: Callable[[Watch], Result], *, where: str) -> Result:
        """``call(watch)``, counted, watched and tried again."""

        def counted() -> Result:
            self.traffic.note()
            try:
                result = watched(call, self._silence_s)
            except TimeoutError as error:
                if self._has_answered:
                    raise
                hint = "the port must be that of dfs.namenode.rpc-address, not that of the web pages"
                raise StorageError(f"the name node does not answer: {error}", where=self.root, hint=hint) from error
            self._has_answered = True
            return result

        return retried(counted, where=where, on_retry=self.traffic.note_retry)

    def info(self, path: str) -> HdfsFile | None:
        """One file or folder, None where there is none."""
        try:
            return _file(self._tried(lambda _: self._client.get_file_info(path), where=self._where(path)))
        except NotFound:
            return None

    def files(self, path: str, *, deep: bool = True) -> list[HdfsFile]:
        """Everything below a folder, or only what lies in it; nothing where there is no such folder."""

        def ask(watch: Watch) -> list[HdfsFile]:
            found = []
            for status in self._client.list_status(path, deep):
                watch.alive()
                found.append(_file(status))
            return found

        self.traffic.note(requests=0, listings=1)
        try:
            return self._tried(ask, where=self._where(path))
        except NotFound:
            return []

    def read(self, path: str, offset: int, length: int, *, where: str) -> bytearray:
        """A range that lies within the file: the client's library ends the process on others.

        Raises:
            NotFound: no such file.
            StorageError: the file ends before the range does, or it failed for good.
        """
        is_again = False

        def ask(watch: Watch) -> bytearray:
            nonlocal is_again
            if is_again:
                self._forget(path)  # it may hold places of blocks that have moved
            is_again = True
            reader = self._reader(path)
            size = len(reader)
            if size < offset + length:
                got = max(size - offset, 0)
                raise StorageError(
                    f"expected {counted(length, 'byte')}, got {got:,} before the end of the file ({length - got:,} "
                    "missing)",
                    where=f"{where}:{offset}",
                )
            return _all_of(reader, offset, length, watch)

        data = self._tried(ask, where=where)
        self.traffic.note(requests=0, received=len(data))
        return data

    def read_now(self, path: str) -> bytes | None:
        """All of a small file as it is now, None where there is none; ``read`` goes by its first look at a file."""

        def ask(watch: Watch) -> bytearray:
            reader = self._client.read(path)
            return _all_of(reader, 0, len(reader), watch)

        try:
            data = self._tried(ask, where=self._where(path))
        except NotFound:
            return None
        self.traffic.note(requests=0, received=len(data))
        return bytes(data)

    def write(
        self, path: str, data: bytes | bytearray | memoryview, *, scratch: str, block_bytes: int | None = None
    ) -> None:
        """Write a file, over what is there; it appears under its name when it is whole, before it is in ``scratch``."""
        self.rename(self._written(data, scratch, block_bytes), path, replace=True)

    def write_new(self, path: str, data: bytes | bytearray | memoryview, *, scratch: str) -> bool:
        """Write a small file where there is none; False tells that one is there."""
        return self.rename(self._written(data, scratch, None), path, replace=False)

    def _written(self, data: bytes | bytearray | memoryview, scratch: str, block_bytes: int | None) -> str:
        """A new file in a folder."""
        path = f"{scratch}/{uuid.uuid4().hex}.tmp"

        self.write_pieces(path, lambda: [data], block_bytes=block_bytes)
        return path

    def write_pieces(
        self,
        path: str,
        pieces: Callable[[], Iterable[bytes | bytearray | memoryview]],
        *,
        block_bytes: int | None = None,
    ) -> None:
        """Write a file front to back, over what is there; ``pieces`` is called anew for each attempt."""

        def ask() -> None:
            self.traffic.note()
            try:
                self._write_all(path, pieces(), block_bytes or _BLOCK_BYTES)
            except HdfsError as error:
                if not (self._can_append and error.code == "UnsupportedOperationException"):
                    raise
                self._can_append = False  # files with erasure codes
                self._write_all(path, pieces(), block_bytes or _BLOCK_BYTES)

        retried(ask, where=self._where(path), on_retry=self.traffic.note_retry)

    def _write_all(self, path: str, pieces: Iterable[bytes | bytearray | memoryview], block_bytes: int) -> None:
        """Write a file once.

        It is closed after each block and opened again: the library asks for the next block before the name node has
        heard that the last one is stored, and takes its "not replicated yet" for the end.
        """
        options = self._native.WriteOptions(overwrite=True, create_parent=True, block_size=block_bytes)
        writer, room = self._in_time(lambda: self._client.create(path, options)), block_bytes
        for piece in pieces:
            view = memoryview(piece).cast("B")
            while view:
                if not room:
                    if self._can_append:
                        self._in_time(writer.close)
                        writer = self._in_time(lambda: self._client.append(path))
                    room = block_bytes
                n = min(room, _PIECE_BYTES, len(view))
                self._in_time(partial(writer.write, view[:n]))
                self.traffic.note(requests=0, sent=n)
                view, room = view[n:], room - n
        self._in_time(writer.close)

    def _in_time(self, call: Callable[[], Result]) -> Result:
        """One call, not tried again."""
        return watched(lambda _: call(), self._silence_s)

    def make_folder(self, path: str) -> None:
        """Make a folder and those above it."""
        self._tried(lambda _: self._client.mkdirs(path, 0o755, True), where=self._where(path))  # noqa: FBT003

    def rename(self, source: str, target: str, *, replace: bool) -> bool:
        """Give another name in one step; False where something has it and may not be replaced."""
        is_again = False

        def ask(_: Watch) -> bool:
            nonlocal is_again
            was_asked, is_again = is_again, True
            try:
                self._client.rename(source, target, replace)
            except (FileExistsError, FileNotFoundError) as error:
                if was_asked and not self._is_there(source) and self._is_there(target):
                    return True  # the answer to an earlier attempt was lost
                if isinstance(error, FileNotFoundError):
                    raise
                return False
            return True

        return self._tried(ask, where=self._where(target))

    def _is_there(self, path: str) -> bool:
        try:
            self._client.get_file_info(path)
        except FileNotFoundError:
            return False
        return True

    def delete(self, path: str) -> None:
        """Remove a file, or a folder with all in it, if it is there."""
        self._forget(path)
        try:
            self._tried(lambda _: self._client.delete(path, True), where=self._where(path))  # noqa: FBT003
        except NotFound:
            return

    def concat(self, target: str, sources: Sequence[str]) -> bool:
        """Append whole files to another without moving a byte; False where the cluster does not allow it.

        All blocks but the last of the last file must be full. ``CKPT_WEBHDFS`` or the cluster's settings name the
        address.
        """
        if not self._can_concat:
            return False
        query = f"?op=CONCAT&sources={quote(','.join(sources))}&user.name={quote(_user())}"
        try:
            client = HttpClient(_webhdfs(self.root))
            answer = client.request("POST", f"/webhdfs/v1{quote(target)}{query}", headers={})
            client.close()
        except (OSError, http.client.HTTPException):
            self._can_concat = False
            return False
        self.traffic.note()
        self._can_concat = answer.status == 200
        self._forget(target)
        return self._can_concat

    def _reader(self, path: str) -> Any:
        with self._lock:
            found = self._readers.get(path)
        if found is None:
            found = self._client.read(path)
            with self._lock:
                if len(self._readers) >= _MAX_READERS:
                    self._readers.clear()
                self._readers[path] = found
        return found

    def _forget(self, path: str) -> None:
        """Look at a file anew the next time."""
        with self._lock:
            self._readers.pop(path, None)

    def _where(self, path: str) -> str:
        return f"{self.root}{path}"


def _all_of(reader: Any, offset: int, length: int, watch: Watch) -> bytearray:
    """A range that lies within the file, as it comes."""
    data, at = bytearray(length), 0
    for piece in reader.read_range_stream(offset, length) if length else ():
        watch.alive()
        data[at : at + len(piece)] = piece
        at += len(piece)
    if at != length:
        raise ConnectionError(f"expected {counted(length, 'byte')}, got {at:,}")
    return data


def _file(status: Any) -> HdfsFile:
    return HdfsFile(status.path, status.length, status.isdir, status.modification_time / 1000)


def _user() -> str:
    return os.environ.get("HADOOP_USER_NAME") or getpass.getuser()


def _check_answers(root: str) -> None:
    """Raise where nobody listens: the library would try for three minutes. Names without a port are services."""
    parts = urlsplit(root)
    if parts.port is None or parts.hostname is None:
        return
    try:
        socket.create_connection((parts.hostname, parts.port), CONNECTS_WITHIN_S).close()
    except OSError as error:
        message = f"the name node does not answer: {error.strerror or error}"
        raise StorageError(message, where=root) from error


def _webhdfs(root: str) -> str:
    """Address of the name node's web server."""
    given = os.environ.get("CKPT_WEBHDFS")
    if given:
        return given if "://" in given else f"http://{given}"
    host = urlsplit(root).hostname or "localhost"
    for name, value in _settings():
        if name.startswith("dfs.namenode.http-address") and (value.partition(":")[0] == host or "." in name[25:]):
            return f"http://{value}"
    return f"http://{host}:{_WEBHDFS_PORT}"


def _settings() -> Iterator[tuple[str, str]]:
    """Names and values of the cluster's settings, where there are any."""
    folder = os.environ.get("HADOOP_CONF_DIR") or os.path.join(os.environ.get("HADOOP_HOME", ""), "etc/hadoop")
    try:
        tree = ET.parse(os.path.join(folder, "hdfs-site.xml"))  # noqa: S314 - see the import
    except (OSError, ET.ParseError):
        return
    for node in tree.iter("property"):
        yield node.findtext("name", "").strip(), node.findtext("value", "").strip()
