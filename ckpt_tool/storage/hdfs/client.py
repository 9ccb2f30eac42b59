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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit
from xml.etree import ElementTree as ET

from ckpt_tool.errors import NotFound, StorageError, UsageError
from ckpt_tool.records import dataclass
from ckpt_tool.storage.http_client import HttpClient
from ckpt_tool.storage.retry import retried
from ckpt_tool.storage.traffic import current_traffic

__all__ = ["HdfsClient", "HdfsFile", "split_hdfs_url"]

Result = TypeVar("Result")

CONNECTS_WITHIN_S = 10.0
_WEBHDFS_PORT = 9870
_MAX_READERS = 256


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
        _check_answers(root)
        self._client = self.tried(lambda: hdfs_native.Client(root), where=root)
        self._readers: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._can_concat = True

    def tried(self, call: Callable[[], Result], *, where: str) -> Result:
        """``call()``, counted and tried again."""

        def counted() -> Result:
            self.traffic.note()
            return call()

        return retried(counted, where=where, on_retry=self.traffic.note_retry)

    def info(self, path: str) -> HdfsFile | None:
        """One file or folder, None where there is none."""
        try:
            return _file(self.tried(lambda: self._client.get_file_info(path), where=self._where(path)))
        except NotFound:
            return None

    def files(self, path: str, *, deep: bool = True) -> list[HdfsFile]:
        """Everything below a folder, or only what lies in it; nothing where there is no such folder."""
        self.traffic.note(requests=0, listings=1)
        try:
            found = self.tried(lambda: list(self._client.list_status(path, deep)), where=self._where(path))
        except NotFound:
            return []
        return [_file(status) for status in found]

    def read(self, path: str, offset: int, length: int, *, where: str) -> bytes:
        """A range that lies within the file: the client's library ends the process on others.

        Raises:
            NotFound: no such file.
            StorageError: the file ends before the range does, or it failed for good.
        """

        def ask() -> bytes:
            reader = self._reader(path)
            size = len(reader)
            if size < offset + length:
                got = max(size - offset, 0)
                raise StorageError(
                    f"expected {length:,} bytes, got {got:,} before the end of the file ({length - got:,} missing)",
                    where=f"{where}:{offset}",
                )
            try:
                data: bytes = reader.read_range(offset, length) if length else b""
            except BaseException:
                with self._lock:
                    self._readers.pop(path, None)  # it may hold places of blocks that have moved
                raise
            return data

        data = self.tried(ask, where=where)
        self.traffic.note(requests=0, received=len(data))
        return data

    def read_now(self, path: str) -> bytes | None:
        """All of a small file as it is now, None where there is none; ``read`` goes by its first look at a file."""

        def ask() -> bytes:
            reader = self._client.read(path)
            data: bytes = reader.read_range(0, len(reader)) if len(reader) else b""
            return data

        try:
            data = self.tried(ask, where=self._where(path))
        except NotFound:
            return None
        self.traffic.note(requests=0, received=len(data))
        return data

    def write(
        self, path: str, data: bytes | bytearray | memoryview, *, scratch: str, block_bytes: int | None = None
    ) -> None:
        """Write a file, over what is there; it appears under its name when it is whole, before it is in ``scratch``."""
        try:
            self.rename(self._written(data, scratch, block_bytes), path, replace=True)
        except NotFound:
            found = self.info(path)
            if found is None or found.nbytes != len(data):  # else the answer to an earlier attempt was lost
                raise

    def write_new(self, path: str, data: bytes | bytearray | memoryview, *, scratch: str) -> bool:
        """Write a small file where there is none; False tells that one is there, maybe after all this one."""
        try:
            return self.rename(self._written(data, scratch, None), path, replace=False)
        except NotFound:  # the answer to an earlier attempt was lost
            return False

    def _written(self, data: bytes | bytearray | memoryview, scratch: str, block_bytes: int | None) -> str:
        """A new file in a folder."""
        path = f"{scratch}/{uuid.uuid4().hex}.tmp"

        def ask() -> None:
            options = self._native.WriteOptions(overwrite=True, create_parent=True, block_size=block_bytes)
            writer = self._client.create(path, options)
            writer.write(data)
            writer.close()

        self.tried(ask, where=self._where(path))
        self.traffic.note(requests=0, sent=len(data))
        return path

    def write_pieces(self, path: str, pieces: Iterator[bytes]) -> None:
        """Write a file front to back, over what is there; once, for the pieces come once."""
        options = self._native.WriteOptions(overwrite=True, create_parent=True)
        writer = self.tried(lambda: self._client.create(path, options), where=self._where(path))
        for piece in pieces:
            self.traffic.note(requests=0, sent=len(piece))
            writer.write(piece)
        writer.close()

    def make_folder(self, path: str) -> None:
        """Make a folder and those above it."""
        self.tried(lambda: self._client.mkdirs(path, 0o755, True), where=self._where(path))  # noqa: FBT003

    def rename(self, source: str, target: str, *, replace: bool) -> bool:
        """Give another name in one step; False where something has it and may not be replaced."""

        def ask() -> bool:
            try:
                self._client.rename(source, target, replace)
            except FileExistsError:
                return False
            return True

        return self.tried(ask, where=self._where(target))

    def delete(self, path: str) -> None:
        """Remove a file, or a folder with all in it, if it is there."""
        with self._lock:
            self._readers.pop(path, None)
        try:
            self.tried(lambda: self._client.delete(path, True), where=self._where(path))  # noqa: FBT003
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
        with self._lock:
            self._readers.pop(target, None)
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

    def _where(self, path: str) -> str:
        return f"{self.root}{path}"


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
