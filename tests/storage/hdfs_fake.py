"""As much of the package ``hdfs_native`` as the client uses, with its files in a dict; it dies when it is told to."""

from __future__ import annotations

import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Cluster", "Died", "fake_module"]


class Died(BaseException):
    """As if the process was killed: nobody handles it."""


@dataclass
class Cluster:
    """One name node."""

    files: dict[str, bytes] = field(default_factory=dict)
    blocks: dict[str, int] = field(default_factory=dict)
    folders: set[str] = field(default_factory=lambda: {"/"})
    n_calls: int = 0
    dies_at: int | None = None
    """The call that is the last; odd ones are not done any more."""
    stalls_at: int | None = None
    """The first call that gets no answer."""
    stall: threading.Event = field(default_factory=threading.Event)
    loses_answers: bool = False
    """Whether each rename is done and then says that it failed."""

    def call(self) -> None:
        """Count one."""
        self.n_calls += 1
        if self.stalls_at is not None and self.n_calls >= self.stalls_at:
            self.stall.wait(30)
            raise RuntimeError("nobody hears this any more")
        if self.dies_at is not None and self.n_calls >= self.dies_at:
            raise Died

    def make(self, folder: str) -> None:
        """A folder and those above it."""
        while folder:
            self.folders.add(folder)
            folder = folder.rpartition("/")[0]

    def below(self, path: str) -> list[str]:
        """Files and folders below a folder."""
        return sorted(p for p in [*self.files, *self.folders] if p.startswith(path.rstrip("/") + "/") and p != "/")


@dataclass
class _Status:
    path: str
    length: int
    isdir: bool
    modification_time: int = 1_700_000_000_000


@dataclass
class _Options:
    overwrite: bool = False
    create_parent: bool = True
    block_size: int | None = None


class _Reader:
    def __init__(self, cluster: Cluster, path: str) -> None:
        self._cluster = cluster
        self._data = cluster.files[path]

    def __len__(self) -> int:
        return len(self._data)

    def read_range_stream(self, offset: int, length: int) -> Iterator[bytes]:
        """Pieces of a range, which must lie within the file: the real one panics."""
        self._cluster.call()
        assert offset + length <= len(self._data)
        for at in range(offset, offset + length, 700):
            yield self._data[at : min(at + 700, offset + length)]


class _Writer:
    def __init__(self, cluster: Cluster, path: str, room: int) -> None:
        self._cluster, self._path, self._room = cluster, path, room

    def write(self, data: Any) -> int:
        """Append; never to a second block, for which a busy cluster is not ready."""
        self._cluster.call()
        self._room -= len(data)
        if self._room < 0:
            raise RuntimeError(
                'RPCError("org.apache.hadoop.NotReplicatedYetException", "Not replicated yet\\n\\tat x")'
            )
        self._cluster.files[self._path] += bytes(data)
        return len(data)

    def close(self) -> None:
        """Done."""
        self._cluster.call()


class _Client:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def get_file_info(self, path: str) -> _Status:
        """Of a file or folder."""
        self._cluster.call()
        if path in self._cluster.files:
            return _Status(path, len(self._cluster.files[path]), False)
        if path not in self._cluster.folders:
            raise FileNotFoundError(path)
        return _Status(path, 0, True)

    def list_status(self, path: str, recursive: bool) -> Iterator[_Status]:
        """What lies in or below a folder."""
        info = self.get_file_info(path)
        found = self._cluster.below(path) if info.isdir else [path]
        for each in found:
            if recursive or each.count("/") == path.rstrip("/").count("/") + 1:
                yield _Status(each, len(self._cluster.files.get(each, b"")), each in self._cluster.folders)

    def read(self, path: str) -> _Reader:
        """A reader."""
        self._cluster.call()
        if path not in self._cluster.files:
            raise FileNotFoundError(path)
        return _Reader(self._cluster, path)

    def create(self, path: str, options: _Options) -> _Writer:
        """A writer; the file is there at once, and empty."""
        self._cluster.call()
        if path in self._cluster.files and not options.overwrite:
            raise FileExistsError(path)
        self._cluster.make(path.rpartition("/")[0])
        self._cluster.files[path] = b""
        assert options.block_size is not None
        self._cluster.blocks[path] = options.block_size
        return _Writer(self._cluster, path, options.block_size)

    def append(self, path: str) -> _Writer:
        """A writer at the end of a file that is closed."""
        self._cluster.call()
        block = self._cluster.blocks[path]
        return _Writer(self._cluster, path, block - len(self._cluster.files[path]) % block)

    def mkdirs(self, path: str, _permission: int, _parents: bool) -> None:
        """A folder and those above it."""
        self._cluster.call()
        self._cluster.make(path)

    def rename(self, source: str, target: str, overwrite: bool) -> None:
        """A file or folder."""
        self._cluster.call()
        cluster = self._cluster
        if source not in cluster.files and source not in cluster.folders:
            raise FileNotFoundError(source)
        if target in cluster.files or target in cluster.folders:
            if not overwrite:
                raise FileExistsError(target)
            if target in cluster.folders:
                raise RuntimeError("rename destination directory is not empty")
        for path in [source, *cluster.below(source)]:
            new = target + path[len(source) :]
            if path in cluster.files:
                cluster.files[new] = cluster.files.pop(path)
            else:
                cluster.folders.discard(path)
                cluster.folders.add(new)
        if cluster.loses_answers:
            raise RuntimeError("the connection was reset")

    def delete(self, path: str, recursive: bool) -> bool:
        """A file, or a folder with what is in it."""
        self._cluster.call()
        cluster = self._cluster
        for each in [path, *(cluster.below(path) if recursive else [])]:
            cluster.files.pop(each, None)
            cluster.folders.discard(each)
        return True


def fake_module(cluster: Cluster) -> types.ModuleType:
    """The package."""
    module = types.ModuleType("hdfs_native")
    module.__dict__.update(Client=lambda _root: _Client(cluster), WriteOptions=_Options)
    return module
