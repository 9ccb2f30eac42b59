"""A folder or file of HDFS as a place for parts: each part is a file, CONCAT makes one of them, a rename names all.

Everything lies in ``<final>.partial`` until then, or with a token in ``<final>.<token>.partial``. CONCAT moves no byte
but wants full blocks (FSDirConcatOp of Hadoop 3.3), so that a part is one block; where the cluster does not allow it
(encryption zones, snapshots, no WebHDFS), parts are copied one after another. Knows no markers and no checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from urllib.parse import quote, unquote

from ckpt_tool.errors import StorageError, TargetExists, UsageError
from ckpt_tool.storage.hdfs.client import HdfsClient, split_hdfs_url
from ckpt_tool.storage.parts.place import Begun, Part, PartLimits
from ckpt_tool.storage.target import Bytes
from ckpt_tool.storage.unfinished import JOURNAL_NAME

__all__ = ["HdfsPlace"]

PART_LIMITS = PartLimits(min_bytes=1 << 20, usual_bytes=64 << 20, max_parts=100_000, multiple=1 << 20)
_PARTS = ".parts"
_CONTENT = "content"
_SOURCES_CHARACTERS = 4000
"""Of one CONCAT: a request line of the web server has 8 KiB."""
_COPY_BYTES = 8 << 20
_MIN_BLOCK_BYTES = 1 << 20


class HdfsPlace:
    """Files below ``url``, or with ``single_file`` that one file.

    Raises:
        UsageError: the root folder, or the client is not installed.
        StorageError: the name node does not answer.
    """

    is_named_last = True

    def __init__(self, url: str, *, single_file: bool, token: str | None = None) -> None:
        self.url = url
        self.limits = PART_LIMITS
        root, self._final = split_hdfs_url(url)
        if self._final == "/":
            raise UsageError("is the root folder, and is not written to", where=url, hint="name a folder in it")
        self._client = HdfsClient(root)
        self._single_file = single_file
        own = self._final if token is None else f"{self._final}.{token}"
        self._partial, self._former = f"{own}.partial", f"{own}.replaced"
        self._parts_folder = f"{self._partial}/{_PARTS}"
        self._made: set[str] = set()
        """Folders that this process has made."""

    def old_files(self) -> Sequence[str]:
        """Paths of files under the final name; ``""`` is a file of that name itself."""
        found = self._client.info(self._final)
        if found is None:
            return []
        if not found.is_folder:
            return [""]
        return [f.path[len(self._final) + 1 :] for f in self._client.files(self._final) if not f.is_folder]

    def look(self) -> tuple[Sequence[str], dict[str, int]]:
        """``old_files`` and ``files``."""
        return self.old_files(), self.files()

    def old_head(self, length: int) -> bytes | None:
        """The first bytes of a file of that name."""
        found = self._client.info(self._final)
        if found is None:
            return None
        if found.is_folder:
            raise UsageError("is a folder, expected to write a file", where=self.url, hint="name the file in it")
        return bytes(self._client.read(self._final, 0, min(length, found.nbytes), where=self.url))

    def files(self) -> dict[str, int]:
        """Size of each whole file of this target, control files included."""
        start = len(self._partial) + 1
        found = {f.path[start:]: f.nbytes for f in self._client.files(self._partial) if not f.is_folder}
        found = {path: n for path, n in found.items() if not path.startswith(f"{_PARTS}/")}
        if self._single_file and _CONTENT in found:
            found[""] = found.pop(_CONTENT)
        return found

    def begun(self) -> dict[str, Begun]:
        """Files with parts."""
        found: dict[str, Begun] = {}
        for path, begun in self.under_way():
            if _was_being_joined(begun.parts):
                self.drop(path, begun.token)
            else:
                found[path] = begun
        return found

    def under_way(self) -> list[tuple[str, Begun]]:
        """Files with parts, each begun once: its path names where they lie."""
        return [(_path_of(token), Begun(token, own)) for token, own in self._parts().items()]

    def begin(self, path: str) -> str:
        """The folder of a file's parts."""
        token = f"{self._parts_folder}/_{quote(path, safe='')}"
        self._make_folder(token)
        return token

    def put_part(self, path: str, token: str, number: int, data: Bytes) -> str:  # noqa: ARG002 - the token names it
        """Write one part, which is one block."""
        name = f"{number:08d}"
        block_bytes = max(-(-len(data) // _MIN_BLOCK_BYTES) * _MIN_BLOCK_BYTES, _MIN_BLOCK_BYTES)
        self._client.write(f"{token}/{name}", data, scratch=self._parts_folder, block_bytes=block_bytes)
        return name

    def join(self, path: str, token: str, parts: Mapping[int, Part], *, is_new: bool) -> bool:
        """Append all parts to the first, and give it the file's name."""
        first, *others = [f"{token}/{part.tag}" for part in parts.values()]
        joined = first
        for batch in _batches(others):
            if not self._client.concat(first, batch):
                joined = f"{self._parts_folder}/{quote(path, safe='')}.tmp"
                left = [first, *others[others.index(batch[0]) :]]
                self._client.write_pieces(joined, partial(self._content, left))
                break
        full = self._full(path)
        self._make_folder(full.rpartition("/")[0])
        is_named = self._client.rename(joined, full, replace=not is_new)
        if is_named:
            self._client.delete(token)
        return is_named

    def drop(self, path: str, token: str) -> None:  # noqa: ARG002 - the token names it
        """Remove the parts of a file."""
        self._client.delete(token)

    def put(self, path: str, data: Bytes, *, is_new: bool = False) -> bool:
        """Write a small file."""
        full = self._full(path)
        self._make_folder(full.rpartition("/")[0])
        if is_new:
            return self._client.write_new(full, data, scratch=self._parts_folder)
        self._client.write(full, data, scratch=self._parts_folder)
        return True

    def get(self, path: str) -> bytes | None:
        """Content of a small file, which another process may have written anew."""
        return self._client.read_now(self._full(path))

    def delete(self, path: str) -> None:
        """Remove a file."""
        self._client.delete(self._full(path))

    def clear(self) -> None:
        """Remove the folder of everything."""
        self._made.clear()
        self._client.delete(self._partial)

    def finish(self, *, replace: bool) -> None:
        """Rename the folder, or the one file in it; what has the name is moved away first and removed after.

        Raises:
            TargetExists: something has taken the name in the meantime.
        """
        self._made.clear()
        for folder in (self._parts_folder, f"{self._partial}/{JOURNAL_NAME}"):
            self._client.delete(folder)
        if self._single_file:
            is_named = self._client.rename(f"{self._partial}/{_CONTENT}", self._final, replace=replace)
        else:
            if replace and self._client.info(self._final) is not None:
                self._client.delete(self._former)
                self._client.rename(self._final, self._former, replace=False)
            is_named = self._client.rename(self._partial, self._final, replace=False)
            if is_named and replace:
                self._client.delete(self._former)
        if not is_named:
            raise TargetExists("something has taken the name", where=self.url, hint=f'all is in "{self._partial}"')
        self._client.delete(self._partial)

    def close(self) -> None:
        """Nothing is held."""

    def _parts(self) -> dict[str, dict[int, Part]]:
        """Parts by token."""
        parts: dict[str, dict[int, Part]] = {}
        for f in self._client.files(self._parts_folder):
            token, _, name = f.path.rpartition("/")
            if not f.is_folder and name.isdecimal():
                parts.setdefault(token, {})[int(name)] = Part(f.nbytes, name)
        return parts

    def _make_folder(self, folder: str) -> None:
        """Make a folder, once."""
        if folder not in self._made:
            self._client.make_folder(folder)
            self._made.add(folder)

    def _full(self, path: str) -> str:
        return f"{self._partial}/{path or _CONTENT}"

    def _content(self, paths: Sequence[str]) -> Iterator[Bytes]:
        for path in paths:
            found = self._client.info(path)
            if found is None:
                raise StorageError("a part has vanished", where=f"{self._client.root}{path}")
            for at in range(0, found.nbytes, _COPY_BYTES):
                yield self._client.read(path, at, min(_COPY_BYTES, found.nbytes - at), where=self.url)


def _path_of(token: str) -> str:
    return unquote(token.rpartition("/")[2]).removeprefix("_")


def _was_being_joined(parts: Mapping[int, Part]) -> bool:
    """Whether some parts were appended to the first already, so that their places are not known any more."""
    others = [part.nbytes for number, part in parts.items() if number > 1]
    return 1 in parts and 2 not in parts and bool(others) and parts[1].nbytes > max(others)


def _batches(paths: Sequence[str]) -> Iterator[list[str]]:
    """Paths in groups that fit a request."""
    batch: list[str] = []
    length = 0
    for path in paths:
        if batch and length + len(path) > _SOURCES_CHARACTERS:
            yield batch
            batch, length = [], 0
        batch.append(path)
        length += len(quote(path)) + 3
    if batch:
        yield batch
