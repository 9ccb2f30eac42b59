"""A side file is a small one beside or apart from a checkpoint, written whole in one step and replaced at will.

What is replaced must be of its own kind: a checkpoint that was named by mistake stays. Files far away only.
"""

from __future__ import annotations

from contextlib import suppress

from ckpt_tool.errors import NotFound, UsageError
from ckpt_tool.storage.part_places import part_place
from ckpt_tool.storage.retry import retried, shown
from ckpt_tool.storage.traffic import current_traffic

__all__ = ["HEAD_BYTES", "put_side_file", "refuse_other"]

HEAD_BYTES = 4096
"""Of a file that is there, its mark lies within these."""


def refuse_other(head: bytes, mark: bytes, where: str, what: str) -> None:
    """Nothing, where a file begins with ``head`` that is of the kind that is to be written, or is empty.

    Raises:
        UsageError: it is another one.
    """
    if head and mark not in head:
        said = f"{where} is here and is no {what}: it is not overwritten"
        raise UsageError(said, hint="name another file, or remove it")


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
    place = part_place(url, single_file=True)
    if place is not None:
        try:
            if mark is not None:
                refuse_other(place.old_head(HEAD_BYTES) or b"", mark, url, what)
            place.put("", data)
            place.finish(replace=True)
        finally:
            place.close()
        return
    from ckpt_tool.storage.remote import open_remote  # fsspec costs 80 ms of start-up

    fs, key = open_remote(url)
    traffic = current_traffic()
    if mark is not None:
        with suppress(NotFound):
            traffic.note()
            refuse_other(retried(lambda: fs.cat_file(key, 0, HEAD_BYTES), where=shown(url)), mark, shown(url), what)
    traffic.note(sent=len(data))
    retried(lambda: fs.pipe_file(key, data), where=shown(url))
