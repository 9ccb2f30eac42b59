"""A side file is a small one beside or apart from a checkpoint, written whole in one step and replaced at will.

What is replaced must be of its own kind: a checkpoint that was named by mistake stays. Nothing is listed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import BinaryIO

from ckpt_tool.errors import NotFound, StorageError, UsageError
from ckpt_tool.sizes import shell_word
from ckpt_tool.storage.urls import is_local, local_path

__all__ = ["HEAD_BYTES", "put_side_file", "read_side_file", "refuse_other", "unwritable"]

HEAD_BYTES = 4096
"""Of a file that is there, its mark lies within these."""
_PIECE_BYTES = 1 << 20


def refuse_other(head: bytes, mark: bytes, where: str, what: str) -> None:
    """Nothing, where a file begins with ``head`` that is of the kind that is to be written, or is empty.

    Raises:
        UsageError: it is another one.
    """
    if head and mark not in head:
        said = f"{where} is here and is no {what}: it is not overwritten"
        raise UsageError(said, hint="name another file, or remove it")


def unwritable(error: OSError, url: str | os.PathLike[str]) -> StorageError:
    """Why a local file cannot be written, and what to do where that is its folder."""
    text = os.fspath(url)
    path = local_path(url)
    home, folder = os.path.expanduser(path), os.path.dirname(path)
    hint = None
    if home != path:
        hint = f"only shells know ~: {home}"
    elif isinstance(error, FileNotFoundError) and folder and not os.path.isdir(folder):
        hint = f"make its folder: mkdir -p {shell_word(folder)}"
    elif isinstance(error, IsADirectoryError):
        hint = "give the name of a file in it"
    return StorageError(f"cannot be written: {error.strerror or error}", where=text, hint=hint)


def read_side_file(url: str, length: int) -> bytes | None:
    """The first bytes of a file at a path or URL, all of a shorter one; None where no file is. One request.

    Raises:
        UsageError: a scheme that nobody knows; on HDFS, a folder.
        StorageError: it cannot be read.
    """
    if not is_local(url):
        return _remote_head(url, length)
    try:
        with open(local_path(url), "rb") as file:
            return b"".join(_pieces(file, length))
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        return None
    except OSError as error:
        raise StorageError(f"cannot be read: {error.strerror}", where=url) from error


def _pieces(file: BinaryIO, length: int) -> Iterator[bytes]:
    """The first ``length`` bytes, for which a single call would lay out memory whatever the file has."""
    while length and (piece := file.read(min(length, _PIECE_BYTES))):
        length -= len(piece)
        yield piece


def _remote_head(url: str, length: int) -> bytes | None:
    from ckpt_tool.storage.parts.places import part_place  # local commands do without all of these

    place = part_place(url, single_file=True)
    if place is not None:
        try:
            return place.old_head(length)
        finally:
            place.close()
    from ckpt_tool.storage.remote.file_system import open_remote
    from ckpt_tool.storage.remote.retry import retried
    from ckpt_tool.storage.traffic import current_traffic
    from ckpt_tool.storage.urls import shown

    (fs, key), traffic = open_remote(url), current_traffic()
    traffic.note()
    try:
        data = bytes(retried(lambda: fs.cat_file(key, 0, length), where=shown(url)))
    except NotFound:
        return None
    traffic.note(requests=0, received=len(data))
    return data


def put_side_file(url: str, data: bytes, *, mark: bytes | None, what: str) -> None:
    """Write a file at a URL: one request, and one to look at what is there.

    Args:
        url: its name.
        data: all of it.
        mark: what a file of its kind has near its beginning; None to replace whatever is there.
        what: name of its kind, for messages.

    Raises:
        UsageError: a file is there that has no such mark, or no file can be there.
        StorageError: the storage refused.
    """
    from ckpt_tool.storage.parts.places import part_place

    if mark is not None:
        refuse_other(_remote_head(url, HEAD_BYTES) or b"", mark, url, what)
    place = part_place(url, single_file=True)
    if place is not None:
        try:
            place.put("", data)
            place.finish(replace=True)
        finally:
            place.close()
        return
    from ckpt_tool.storage.remote.file_system import open_remote
    from ckpt_tool.storage.remote.retry import retried
    from ckpt_tool.storage.traffic import current_traffic
    from ckpt_tool.storage.urls import shown

    fs, key = open_remote(url)
    current_traffic().note(sent=len(data))
    retried(lambda: fs.pipe_file(key, data), where=shown(url))
