r"""A URL names a file or folder; a plain path is one too, and so is ``C:\x``, whose letter is no scheme.

Pure text: opens nothing, and knows no file system. Remote URLs are never normalised, because ``gs://b//x`` and
``gs://b/x`` are two different objects.
"""

from __future__ import annotations

import os
import re
from urllib.parse import unquote

from ckpt_tool.errors import FormatError, UsageError

__all__ = ["check_path", "is_local", "join_url", "local_path", "scheme_of", "shown", "split_url", "unfolded"]

# Two characters at least: a single letter before the colon is a Windows drive.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+)(?:://|::(?=.*://))", re.DOTALL)
_FOLDED = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+):/(?!/)(.*)", re.DOTALL)
_DRIVE = re.compile(r"[A-Za-z]:")
_SEPARATORS = re.compile(r"[/\\]")
_LOCAL_SCHEMES = frozenset({"file", "local"})


def scheme_of(url: str | os.PathLike[str]) -> str | None:
    r"""The scheme in lower case, None for a plain path; of a chain (``simplecache::s3://``) the first.

    >>> scheme_of("s3://b/x"), scheme_of("run/step_5"), scheme_of("C:\\x"), scheme_of("\\\\?\\C:\\x")
    ('s3', None, None, None)
    """
    match = _SCHEME.match(os.fspath(url))
    return match[1].lower() if match else None


def is_local(url: str | os.PathLike[str]) -> bool:
    """Whether ``url`` lies in this machine's file system.

    >>> is_local("file:///tmp/x"), is_local("C:/x"), is_local("memory://x")
    (True, True, False)
    """
    scheme = scheme_of(url)
    return scheme is None or scheme in _LOCAL_SCHEMES


def unfolded(path: str) -> str | None:
    """The URL that a path was before something folded its slashes, as pathlib does; None where it was none.

    >>> unfolded("s3:/b/x"), unfolded("file:/a"), unfolded("run/x"), unfolded("C:/x")
    ('s3://b/x', 'file:///a', None, None)
    """
    folded = _FOLDED.match(path)
    if folded is None:
        return None
    slash = "/" if is_local(f"{folded[1]}://") else ""  # behind the name of a machine, which is left out
    return f"{folded[1]}://{slash}{folded[2]}"


def local_path(url: str | os.PathLike[str]) -> str:
    """The operating system's path of a local URL; plain paths are returned as they are.

    >>> local_path("file:///a%20b"), local_path("file:///C:/x"), local_path("file://localhost/x")
    ('/a b', 'C:/x', '/x')

    Raises:
        UsageError: the URL is a remote one.
    """
    text = os.fspath(url)
    scheme = scheme_of(text)
    if scheme is None:
        return text
    if scheme not in _LOCAL_SCHEMES:
        raise UsageError(f"expected a path on this machine, got a {scheme} URL", where=text)
    rest = unquote(text.partition("://")[2]).removeprefix("localhost")
    return rest[1:] if rest.startswith("/") and _DRIVE.match(rest, 1) else rest


def join_url(url: str, path: str) -> str:
    """``path`` below ``url``; slashes already there are kept.

    >>> join_url("gs://b//x", "a/b"), join_url("run/", "a"), join_url("run", "")
    ('gs://b//x/a/b', 'run/a', 'run')
    """
    if not path:
        return url
    return f"{url}{path}" if not url or url.endswith(("/", "\\")) else f"{url}/{path}"


def split_url(url: str) -> tuple[str, str]:
    """Folder and last name, so that ``join_url(*split_url(url)) == url``.

    >>> split_url("s3://b//x/a.pt"), split_url("s3://b/a.pt")
    (('s3://b//x', 'a.pt'), ('s3://b', 'a.pt'))
    """
    folder, _, name = url.rpartition("/")
    return folder, name


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


def check_path(path: str, *, root: str) -> str:
    r"""``path`` itself, if it stays below ``root`` on every system.

    Backslashes count as separators although POSIX allows them in names: a checkpoint that is harmless here must not
    be harmful on Windows.

    >>> check_path("a/b.pt", root="run")
    'a/b.pt'

    Raises:
        FormatError: empty, absolute, with a drive letter, a ``..`` part or a NUL character.
    """
    leaves = path.startswith(("/", "\\")) or _DRIVE.match(path) is not None or ".." in _SEPARATORS.split(path)
    if leaves:
        raise FormatError(f"path {path!r} leaves the checkpoint's folder", where=root)
    if not path or "\0" in path:
        raise FormatError(f"expected the name of a file, got {path!r}", where=root)
    return path
