"""A remote is a file system that fsspec reaches: how one is opened, and what its failures mean.

The libraries behind fsspec raise errors of their own, so that an error is judged by where its class comes from. Knows
no paths below a root and no bytes.
"""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any, TypeVar

from fsspec.core import url_to_fs

from ckpt_tool.errors import CkptError, NotFound, StorageError, UsageError
from ckpt_tool.storage.urls import scheme_of

__all__ = ["attempt", "failure_of", "modified_of", "open_remote", "retried", "shown"]

Result = TypeVar("Result")

ATTEMPTS = 5
FIRST_PAUSE_S = 0.2
MAX_PAUSE_S = 5.0

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "hdfs": "hdfs", "viewfs": "hdfs"}
_PACKAGES = {"http": "aiohttp", "https": "aiohttp", "abfs": "adlfs", "az": "adlfs", "hf": "huggingface_hub"}
_CLIENTS = frozenset({"adlfs", "aiobotocore", "aiohttp", "azure", "botocore", "gcsfs", "google", "requests", "urllib3"})
_PERMANENT = frozenset(
    {
        errno.EACCES, errno.EEXIST, errno.EINVAL, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOSPC,
        errno.ENOTDIR, errno.EOPNOTSUPP, errno.EPERM, errno.EROFS,
    }
)  # fmt: skip
_PERMANENT_TYPES = (PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError, FileNotFoundError)
_TRANSIENT_STATUS = frozenset({408, 425, 429})


def open_remote(url: str) -> tuple[Any, str]:
    """The file system of ``url`` and the URL as that file system spells it; no request is made.

    Raises:
        UsageError: nobody knows the scheme, or its package is not installed; the hint says which to install.
        StorageError: the client could not be set up.
    """
    scheme = scheme_of(url) or ""
    try:
        fs, root = url_to_fs(url)
    except ImportError as error:
        raise UsageError(
            f"the client for {scheme}:// is not installed", where=shown(url), hint=_remedy(scheme)
        ) from error
    except ValueError as error:
        hint = "use a path, or a URL that fsspec knows (s3://, gs://, hdfs://, https:// ...)"
        raise UsageError(f"{scheme}:// cannot be opened: {error}", where=shown(url), hint=hint) from error
    except (
        OSError,
        RuntimeError,
    ) as error:  # HDFS clients: pyarrow's looks for Java only now, the other for name nodes
        if not _is_from_storage(error):
            raise
        remedy = _remedy(scheme) if scheme in _EXTRAS else None
        raise StorageError(
            f"the client for {scheme}:// does not start: {_first_line(error)}", where=shown(url), hint=remedy
        ) from error
    return fs, str(root)


def shown(url: str) -> str:
    """``url`` as messages may show it: without password and without query, which may be a signature.

    >>> shown("https://me:secret@host/a.pt?X-Amz-Signature=1"), shown("s3://b//x?y")
    ('https://host/a.pt', 's3://b//x?y')
    """
    head, mark, rest = url.partition("://")
    if not mark:
        return url
    authority, slash, path = rest.partition("/")
    if scheme_of(url) in {"http", "https"}:
        path = path.partition("?")[0]
    return f"{head}://{authority.rpartition('@')[2]}{slash}{path}"


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


def failure_of(error: Exception, where: str) -> CkptError | None:
    """``error`` as one of ours, None when it does not come from the storage (a bug, which must be seen as one)."""
    if isinstance(error, CkptError):
        return error
    error = _behind(error)
    if isinstance(error, FileNotFoundError):
        return NotFound("no such file", where=where)
    name = type(error).__name__
    text = _first_line(error)
    if isinstance(error, PermissionError) or "Credential" in name or getattr(error, "status", None) in {401, 403}:
        hint = "check the credentials that this process sees (environment, profile, metadata service)"
        return StorageError(f"access is refused: {text}", where=where, hint=hint)
    if _is_from_storage(error):
        return StorageError(f"{name}: {text}" if text else name, where=where)
    return None


def attempt(call: Callable[[], Result], *, where: str) -> Result:
    """``call()``, once, its failures as ours: for requests that must not be sent twice."""
    return _tried(call, where=where, attempts=1)


def retried(call: Callable[[], Result], *, where: str) -> Result:
    """``call()``, sent again after transient failures, at most ``ATTEMPTS`` times with growing pauses.

    Raises:
        NotFound: the file is not there.
        StorageError: it failed for good; the last error is chained.
    """
    return _tried(call, where=where, attempts=ATTEMPTS)


def _tried(call: Callable[[], Result], *, where: str, attempts: int) -> Result:
    number = 1
    while True:
        try:
            return call()
        except Exception as error:
            failure = failure_of(error, where)
            if failure is None or failure is error:
                raise
            if number >= attempts or not _is_transient(_behind(error)):
                if number > 1:
                    failure.message += f" (after {number} attempts)"
                raise failure from error
        pause_s = min(FIRST_PAUSE_S * 2 ** (number - 1), MAX_PAUSE_S)
        time.sleep(pause_s * (0.5 + random.random()))  # noqa: S311 - spreads clients, guards nothing
        number += 1


def _first_line(error: Exception) -> str:
    """Text of an error without what follows a question mark of a URL, which may be a signature."""
    line = next(iter(str(error).splitlines()), "")
    return line.partition("?")[0] if "://" in line else line


def _behind(error: Exception) -> Exception:
    """What happened: the HTTP client of fsspec calls every failure of a first look "file not found"."""
    cause = error.__cause__
    if not (isinstance(error, FileNotFoundError) and isinstance(cause, Exception)):
        return error
    is_missing = _client(cause) != "aiohttp" or getattr(cause, "status", None) in {404, 410}
    return error if is_missing else cause


def _client(error: Exception) -> str:
    """The package whose class ``error`` is of; for a builtin class, the one whose code was running."""
    module = type(error).__module__
    trace = error.__traceback__
    if module == "builtins" and trace is not None:
        while trace.tb_next is not None:
            trace = trace.tb_next
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
    return module.partition(".")[0]


def _is_from_storage(error: Exception) -> bool:
    # asyncio.TimeoutError is no OSError before Python 3.11; fsspec's FSTimeoutError derives from it.
    is_timeout = isinstance(error, TimeoutError) or "Timeout" in type(error).__name__
    is_native = isinstance(error, RuntimeError) and _client(error) == "hdfs_native"  # which raises no other class
    return isinstance(error, OSError) or is_timeout or is_native or type(error).__module__.partition(".")[0] in _CLIENTS


def _is_transient(error: Exception) -> bool:
    status = getattr(error, "status", None)
    if isinstance(status, int):
        return status in _TRANSIENT_STATUS or status >= 500
    if isinstance(error, _PERMANENT_TYPES) or "Credential" in type(error).__name__:
        return False
    # What boto reports it has tried again itself, for ten seconds.
    return _client(error) != "botocore" and not (isinstance(error, OSError) and error.errno in _PERMANENT)


def _remedy(scheme: str) -> str:
    if scheme in _EXTRAS:
        return f'pip install "ckpt-tool[{_EXTRAS[scheme]}]"'
    return f"pip install {_PACKAGES[scheme]}" if scheme in _PACKAGES else "install the package that fsspec asks for"
