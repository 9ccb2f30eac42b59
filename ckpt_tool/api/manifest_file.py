"""A manifest of digests as a file, at a path or a URL: beside the checkpoint that it describes, or anywhere."""

from __future__ import annotations

import os
from pathlib import Path

from ckpt_tool.errors import FormatError, NotFound
from ckpt_tool.manifest.digest_table import SCHEMA, SUFFIX, DigestTable, parse_table
from ckpt_tool.sizes import shell_word
from ckpt_tool.storage.side_file import HEAD_BYTES, put_side_file, read_side_file, refuse_other, unwritable
from ckpt_tool.storage.urls import is_local, local_path

__all__ = [
    "SUFFIX",
    "check_manifest",
    "check_replaceable",
    "is_manifest_file",
    "manifest_beside",
    "read_manifest",
    "write_manifest",
    "write_text",
]

_MAX_BYTES = 1 << 30
_WHAT = "list of digests"


def manifest_beside(url: str | os.PathLike[str]) -> str:
    """Where the manifest of a checkpoint lies that was written along with it.

    >>> manifest_beside("runs/step_5/"), manifest_beside("s3://b/model.safetensors")
    ('runs/step_5.digests.json', 's3://b/model.safetensors.digests.json')
    """
    text = os.fspath(url)
    return f"{text.rstrip('/' + os.sep) or text}{SUFFIX}"


def write_manifest(table: DigestTable, url: str | os.PathLike[str]) -> None:
    """Write the table as a JSON file, a line for each tensor and file; ``DigestTable.to_json`` documents it.

    Raises:
        StorageError: it cannot be written.
    """
    write_text(table.to_text(), os.fspath(url), schema=SCHEMA, what=_WHAT)


def write_text(text: str, url: str, *, schema: str, what: str) -> None:
    """Write a small document of a schema at a path or URL, whole or not at all.

    Raises:
        StorageError: it cannot be written.
        UsageError: a file of that name is here, and it is no such document.
    """
    mark = _mark_of(schema)
    if not is_local(url):
        put_side_file(url, text.encode(), mark=mark, what=what)
        return
    target = Path(local_path(url))
    check_replaceable(target, mark, what)
    partial = target.with_name(f"{target.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(target)
    except OSError as error:
        raise unwritable(error, url) from error


def check_manifest(url: str | os.PathLike[str]) -> None:
    """Nothing, where a list of digests can be written; before the work that it takes to make one.

    Raises:
        UsageError: another file is there.
    """
    check_replaceable(url, _mark_of(SCHEMA), _WHAT)


def _mark_of(schema: str) -> bytes:
    """What a document of a schema has near its beginning, whatever the version."""
    return f'"{schema.rpartition("/")[0]}/'.encode()


def check_replaceable(url: str | os.PathLike[str], mark: bytes, what: str) -> None:
    """Nothing, where no file is there, or one of the kind that is to be written.

    Raises:
        UsageError: it is another one, such as a checkpoint that was named by mistake.
    """
    text = os.fspath(url)
    refuse_other(read_side_file(text, HEAD_BYTES) or b"", mark, text, what)


def read_manifest(url: str | os.PathLike[str]) -> DigestTable:
    """The table that ``write_manifest`` wrote.

    Raises:
        NotFound: no such file.
        FormatError: it is something else.
        IntegrityError: it was changed after it was written.
    """
    where = os.fspath(url)
    data = read_side_file(where, _MAX_BYTES + 1)
    if data is None:
        if is_local(where) and os.path.isdir(local_path(where)):
            raise FormatError("expected a manifest of digests, which is a file, got a folder", where=where)
        hint = f'write it with "ckpt verify SRC --write-manifest {shell_word(where)}"'
        raise NotFound("no such file", where=where, hint=hint)
    if len(data) > _MAX_BYTES:
        raise FormatError(f"expected a manifest of digests, got a file of more than {_MAX_BYTES:,} bytes", where=where)
    return parse_table(data, where=where)


def is_manifest_file(url: str | os.PathLike[str]) -> bool:
    """Whether a JSON file is there that says at its beginning that it is a manifest of digests."""
    text = os.fspath(url)
    return text.endswith(".json") and _mark_of(SCHEMA) in (read_side_file(text, HEAD_BYTES) or b"")
