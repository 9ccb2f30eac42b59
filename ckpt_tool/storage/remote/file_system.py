"""A remote is a file system that fsspec reaches: how one is opened, and how it spells what it lists.

Knows no paths below a root and no bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from fsspec import filesystem
from fsspec.core import url_to_fs

from ckpt_tool.errors import StorageError, UsageError
from ckpt_tool.storage.remote.http_client import server_of, silence_s
from ckpt_tool.storage.remote.retry import first_line, is_from_storage
from ckpt_tool.storage.urls import scheme_of, shown

__all__ = ["WEB", "modified_of", "open_remote", "tag_of"]

_ASKED = re.compile(r"bytes=(\d+)-")
_TOLD = re.compile(r"bytes (\d+)-")
WEB = frozenset({"http", "https"})
_EXTRAS = {"gs": "gs", "gcs": "gs"}
_PACKAGES = {"http": "aiohttp", "https": "aiohttp", "abfs": "adlfs", "az": "adlfs", "hf": "huggingface_hub"}


def open_remote(url: str) -> tuple[Any, str]:
    """The file system of ``url`` and the URL as that file system spells it; no request is made.

    Raises:
        UsageError: nobody knows the scheme, or its package is not installed; the hint says which to install. Or a web
            address that is none.
        StorageError: the client could not be set up.
    """
    scheme = scheme_of(url) or ""
    try:
        fs, root = _opened_web(url) if scheme in WEB else url_to_fs(url)
    except UsageError:
        raise
    except ImportError as error:
        raise UsageError(
            f"the client for {scheme}:// is not installed", where=shown(url), hint=_remedy(scheme) or first_line(error)
        ) from error
    except ValueError as error:
        hint = "use a path, or a URL that fsspec knows (s3://, gs://, hdfs://, https:// ...)"
        raise UsageError(f"{scheme}:// cannot be opened: {error}", where=shown(url), hint=hint) from error
    except (
        OSError,
        RuntimeError,
    ) as error:  # HDFS clients: pyarrow's looks for Java only now, the other for name nodes
        if not is_from_storage(error):
            raise
        remedy = _remedy(scheme) if scheme in _EXTRAS else None
        raise StorageError(
            f"the client for {scheme}:// does not start: {first_line(error)}", where=shown(url), hint=remedy
        ) from error
    return fs, str(root)


def _opened_web(url: str) -> tuple[Any, str]:
    """As `open_remote`, of a web server: fsspec takes an IPv6 address for a chain of URLs, and knows no silence."""
    from aiohttp import ClientTimeout

    try:
        server_of(url)
    except UsageError as error:
        raise UsageError(error.message, where=shown(url)) from error
    silent_s = silence_s()
    timeout = ClientTimeout(total=None, sock_connect=silent_s, sock_read=silent_s)
    options = {"timeout": timeout, "trust_env": True, "raise_for_status": _refuse_other_range}
    return filesystem(scheme_of(url), client_kwargs=options), url


async def _refuse_other_range(response: Any) -> None:
    """Raise when an answer says of itself that it is another part of the file than was asked for."""
    said = response.headers.get("Content-Range", "")
    asked = _ASKED.match(response.request_info.headers.get("Range", ""))
    told = _TOLD.match(said)
    if response.status == 206 and asked is not None and told is not None and int(asked[1]) != int(told[1]):
        raise OSError(f"expected bytes from {asked[1]} on, the server sent {said!r}")


def modified_of(info: Mapping[str, Any]) -> float | None:
    """When a listed file was last written, in seconds since 1970; every file system calls it otherwise.

    >>> modified_of({"name": "a", "mtime": 5}), modified_of({"LastModified": "1970-01-01T00:00:07Z"})
    (5.0, 7.0)
    """
    for key in ("mtime", "LastModified", "last_modified", "updated", "modified", "created"):
        value = info.get(key)
        if isinstance(value, str):
            try:
                value = datetime.fromisoformat(value.replace("Z", "+00:00"))
            except ValueError:
                continue
        if isinstance(value, datetime):
            value = (value if value.tzinfo else value.replace(tzinfo=timezone.utc)).timestamp()
        if isinstance(value, int | float):
            return float(value)
    return None


def tag_of(info: Mapping[str, Any]) -> str | None:
    """What the server calls a listed file's content, another for another content; None where it does not say.

    >>> tag_of({"name": "a", "ETag": '"5"'}), tag_of({"generation": 7}), tag_of({"etag": None})
    ('"5"', '7', None)
    """
    found = next((info[key] for key in ("ETag", "etag", "generation", "md5Hash") if info.get(key)), None)
    return None if found is None else str(found)


def _remedy(scheme: str) -> str | None:
    """What to install, where fsspec says it only in general."""
    if scheme in _EXTRAS:
        return f'pip install "ckpt-tool[{_EXTRAS[scheme]}]"'
    return f"pip install {_PACKAGES[scheme]}" if scheme in _PACKAGES else None
