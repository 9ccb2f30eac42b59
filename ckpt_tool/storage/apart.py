"""A source and a target must lie apart: what is written into a source, or in its place, is no copy of it any more."""

from __future__ import annotations

import os

from ckpt_tool.errors import UsageError
from ckpt_tool.storage.urls import is_local, local_path, scheme_of

__all__ = ["check_apart"]

_ONE_STORE = {"s3a": "s3", "viewfs": "hdfs"}
"""Schemes that name the same storage as another one."""


def check_apart(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    when_equal: str = "write it beside the source, and rename it when it is complete",
) -> None:
    """Raise where a target would change its own source.

    Local paths are compared as they really lie, through links and ``..``; URLs by their text.

    Args:
        source: what is read, a file or a folder.
        target: what would be written.
        when_equal: the hint for a target that is the source itself.

    Raises:
        UsageError: the target is the source, lies inside it, or holds it; or one of them is no name.
    """
    said = os.fspath(target)
    for role, name in (("source", os.fspath(source)), ("target", said)):
        if not name:  # what a shell makes of a variable without a value
            raise UsageError(f"the path of the {role} is empty", hint='write "." for the folder that you are in')
    inner, outer = _place(target), _place(source)
    if inner == outer:
        raise UsageError("is source and target at once", where=said, hint=when_equal)
    if inner.startswith(_as_folder(outer)):
        raise UsageError(
            f"lies inside the source {os.fspath(source)}, whose files it would lie among",
            where=said,
            hint=f"write it beside: {outer}-{inner.rpartition('/')[2]}",
        )
    if outer.startswith(_as_folder(inner)):
        raise UsageError(
            f"holds the source {os.fspath(source)}, which would be lost with all else in it",
            where=said,
            hint="name a folder of its own for the target",
        )


def _place(url: str | os.PathLike[str]) -> str:
    """Where it really is, with slashes."""
    if is_local(url):
        return os.path.realpath(local_path(url) or ".").replace(os.sep, "/")
    text = os.fspath(url)
    scheme = scheme_of(text) or ""
    return f"{_ONE_STORE.get(scheme, scheme)}{text[len(scheme) :].rstrip('/')}"


def _as_folder(place: str) -> str:
    return place.rstrip("/") + "/"
