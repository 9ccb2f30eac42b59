"""Trying again: which failures of remote storage may pass, how long to wait, and what they become when they do not.

The libraries behind a storage raise errors of their own, so that an error is judged by where its class comes from.
Knows no storage.
"""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from ckpt_tool.errors import CkptError, NotFound, StorageError, Unsupported

__all__ = ["attempt", "failure_of", "first_line", "is_from_storage", "retried"]

Result = TypeVar("Result")

ATTEMPTS = 5
FIRST_PAUSE_S = 0.2
MAX_PAUSE_S = 5.0

_CLIENTS = frozenset({"adlfs", "aiobotocore", "aiohttp", "azure", "botocore", "gcsfs", "google", "requests", "urllib3"})
_TRANSIENT_CODES = frozenset(
    {
        "BadDigest", "ConditionalRequestConflict", "IncompleteBody", "InvalidPart", "MalformedXML",
        "OperationAborted", "RequestTimeout", "SlowDown", "XAmzContentSHA256Mismatch",
    }
)  # fmt: skip  # of S3, whatever the status: the body was hurt on its way or came too slowly, or two met at one object
_PERMANENT = frozenset(
    {
        errno.EACCES, errno.EEXIST, errno.EINVAL, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOSPC,
        errno.ENOTDIR, errno.EOPNOTSUPP, errno.EPERM, errno.EROFS,
    }
)  # fmt: skip
_PERMANENT_TYPES = (PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError, FileNotFoundError)
_TRANSIENT_STATUS = frozenset({408, 425, 429})
_LASTING_STATUS = frozenset({501, 505})
"""Of the server's own failures those that are no accident."""
_LONGEST_WAIT_S = 60.0
"""A server that asks for a longer pause is not waited for."""


def failure_of(error: Exception, where: str) -> CkptError | None:
    """``error`` as one of ours, None when it does not come from the storage (a bug, which must be seen as one)."""
    if isinstance(error, CkptError):
        return error
    error = _behind(error)
    if isinstance(error, FileNotFoundError) or getattr(error, "status", None) == 404:
        return NotFound("no such file", where=where)
    if isinstance(error, NotImplementedError) and _client(error) in {"fsspec", *_CLIENTS}:
        return Unsupported("files are not written to this kind of storage", where=where)
    name = type(error).__name__
    text = first_line(error)
    is_refused = isinstance(error, PermissionError) or "AccessControlException" in text
    said = getattr(error, "hint", None)
    hint = said if isinstance(said, str) else None
    if is_refused or "Credential" in name or getattr(error, "status", None) in {401, 403}:
        usual = "check the credentials that this process sees (environment, profile, metadata service)"
        return StorageError(f"access is refused: {text}", where=where, hint=hint or usual)
    if is_from_storage(error):
        if text and _client(error) == "ckpt_tool":
            name = ""  # our own clients say what is wrong in words
        return StorageError(": ".join(filter(None, (name, text))), where=where, hint=hint)
    return None


def attempt(call: Callable[[], Result], *, where: str) -> Result:
    """``call()``, once, its failures as ours: for requests that must not be sent twice."""
    return _tried(call, where=where, attempts=1, on_retry=None)


def retried(call: Callable[[], Result], *, where: str, on_retry: Callable[[], None] | None = None) -> Result:
    """``call()``, sent again after transient failures, at most ``ATTEMPTS`` times with growing pauses.

    ``on_retry`` is called before each further attempt.

    Raises:
        NotFound: the file is not there.
        StorageError: it failed for good; the last error is chained.
    """
    return _tried(call, where=where, attempts=ATTEMPTS, on_retry=on_retry)


def _tried(call: Callable[[], Result], *, where: str, attempts: int, on_retry: Callable[[], None] | None) -> Result:
    number = 1
    while True:
        try:
            return call()
        except Exception as error:
            failure = failure_of(error, where)
            if failure is None or failure is error:
                raise
            asked_s = _asked_pause_s(_behind(error))
            if number >= attempts or asked_s > _LONGEST_WAIT_S or not _is_transient(_behind(error)):
                if number > 1:
                    failure.message += f" (after {number} attempts)"
                if asked_s > _LONGEST_WAIT_S:
                    failure.hint = f"the server asks to come again in {asked_s:,.0f} s"
                raise failure from error
        pause_s = min(FIRST_PAUSE_S * 2 ** (number - 1), MAX_PAUSE_S) * (0.5 + random.random())  # noqa: S311 - spreads clients, guards nothing
        time.sleep(max(pause_s, asked_s))
        number += 1
        if on_retry is not None:
            on_retry()


def _asked_pause_s(error: Exception) -> float:
    """Seconds that the server asks to wait (``Retry-After``); 0 where it does not, or names an hour instead."""
    headers = getattr(error, "headers", None)
    said = headers.get("retry-after") if isinstance(headers, Mapping) else None
    return float(said) if isinstance(said, str) and said.isdecimal() else 0.0


def first_line(error: Exception) -> str:
    """Text of an error without what follows a question mark of a URL, which may be a signature."""
    line = next(iter(str(error).splitlines()), "").partition("\\n\\tat ")[0]  # a trace of Java, quoted
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


def is_from_storage(error: Exception) -> bool:
    """Whether ``error`` tells of the storage or the way to it, and not of a bug."""
    # asyncio.TimeoutError is no OSError before Python 3.11; fsspec's FSTimeoutError derives from it.
    is_timeout = isinstance(error, TimeoutError) or "Timeout" in type(error).__name__
    is_native = isinstance(error, RuntimeError) and _client(error) == "hdfs_native"  # which raises no other class
    return isinstance(error, OSError) or is_timeout or is_native or type(error).__module__.partition(".")[0] in _CLIENTS


def _is_transient(error: Exception) -> bool:
    status = getattr(error, "status", None)
    if getattr(error, "code", None) in _TRANSIENT_CODES:
        return True
    if isinstance(status, int):
        return status in _TRANSIENT_STATUS or (status >= 500 and status not in _LASTING_STATUS)
    if isinstance(error, _PERMANENT_TYPES) or "Credential" in type(error).__name__ or "AccessControl" in str(error):
        return False
    # What boto reports it has tried again itself, for ten seconds.
    if _client(error) == "botocore":
        return False
    is_tls = hasattr(error, "library")  # which has numbers of its own
    return not (isinstance(error, OSError) and not is_tls and error.errno in _PERMANENT)
