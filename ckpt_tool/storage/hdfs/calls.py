"""Calls into hdfs-native, which waits without an end and fails with the words of Java: ended in time, in words of ours.

Knows no paths.
"""

from __future__ import annotations

import errno
import re
import threading
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["HdfsError", "Watch", "watched"]

Result = TypeVar("Result")

_REMOTE = re.compile(r'RPCError\("([\w.$]+)", "(.*)', re.DOTALL)
_LOCAL = re.compile(r'(\w+)\("?(.*?)"?\)$', re.DOTALL)
_NUMBERS = {
    "AccessControlException": errno.EACCES,
    "AuthorizationException": errno.EACCES,
    "DSQuotaExceededException": errno.ENOSPC,
    "FSLimitException$MaxDirectoryItemsExceededException": errno.ENOSPC,
    "FSLimitException$PathComponentTooLongException": errno.ENAMETOOLONG,
    "HadoopIllegalArgumentException": errno.EINVAL,
    "InvalidArgument": errno.EINVAL,
    "InvalidPath": errno.EINVAL,
    "InvalidPathException": errno.EINVAL,
    "NSQuotaExceededException": errno.ENOSPC,
    "ParentNotDirectoryException": errno.ENOTDIR,
    "UnsupportedErasureCodingPolicy": errno.EOPNOTSUPP,
    "UnsupportedFeature": errno.EOPNOTSUPP,
    "UnsupportedOperationException": errno.EOPNOTSUPP,
    "UrlParseError": errno.EINVAL,
}
"""Of failures that come again however often one tries."""
_USER = 'check who asks: HADOOP_USER_NAME, or the Kerberos ticket ("klist")'
_SETTINGS = (
    "name the name node's host and port, or set HADOOP_CONF_DIR to the folder of core-site.xml and hdfs-site.xml"
)
_HINTS = {"AccessControlException": _USER, "AuthorizationException": _USER, "InvalidArgument": _SETTINGS}


class HdfsError(OSError):
    """What the cluster or the library says; ``errno`` is set where it will say so again."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{text} ({code})" if text else code)
        self.code = code
        """The exception's own name, without its package."""
        self.errno = _NUMBERS.get(code)
        self.hint = _HINTS.get(code)


class Watch:
    """How a call tells that it comes on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = time.monotonic()
        self._is_given_up = False

    def alive(self) -> None:
        """Bytes came or went.

        Raises:
            TimeoutError: nobody waits for the call any more.
        """
        with self._lock:
            if self._is_given_up:
                raise TimeoutError
            self._last = time.monotonic()

    def left_s(self, silence_s: float) -> float:
        """How long it may go on in silence; 0 is the end, and the call will be told so."""
        with self._lock:
            left = self._last + silence_s - time.monotonic()
            self._is_given_up = left <= 0
            return max(left, 0)


def watched(call: Callable[[Watch], Result], silence_s: float) -> Result:
    """``call(watch)`` in a thread of its own, given up after ``silence_s`` without an end or a sign of life.

    A call into the library cannot be ended from outside, so that one that is given up is left to itself: it must write
    to nothing that others have, and its thread keeps no process alive.

    Raises:
        TimeoutError: it was given up.
        HdfsError: the library failed, with no class of Python for it.
    """
    watch, is_over = Watch(), threading.Event()
    found: list[Result] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call(watch))
        except BaseException as error:  # noqa: BLE001 - it is raised again where it is waited for
            failed.append(error)
        is_over.set()

    threading.Thread(target=run, daemon=True, name="hdfs").start()
    left_s = silence_s
    while not is_over.wait(left_s):
        left_s = watch.left_s(silence_s)
        if not left_s:
            raise TimeoutError(f"no answer within {silence_s:g} s")
    if not failed:
        return found[0]
    error = failed.pop()
    if isinstance(error, RuntimeError):  # NotImplementedError too
        raise _translated(str(error)) from error
    raise error


def _translated(text: str) -> HdfsError:
    r"""An error from how the library prints one.

    >>> _translated('RPCError("org.apache.SafeModeException", "It is in \\"safe\\" mode.\\n\\tat org.x")')
    HdfsError('It is in "safe" mode. (SafeModeException)')
    >>> _translated('InvalidArgument("No NameNode hosts found")')
    HdfsError('No NameNode hosts found (InvalidArgument)')
    """
    remote = _REMOTE.match(text)
    if remote is not None:
        said = _first_line(remote[2].removesuffix('")'))
        return HdfsError(remote[1].rpartition(".")[2], said)
    local = _LOCAL.match(text)
    if local is not None:
        return HdfsError(local[1], _first_line(local[2]))
    return HdfsError(text.partition("\n")[0], "")


def _first_line(text: str) -> str:
    """Of a text that Rust has quoted."""
    return text.partition("\\n")[0].replace('\\"', '"')
