"""Opening turns what the user typed, a path or a URL, into a store and its listing. Knows no format."""

from __future__ import annotations

import os

from ckpt_tool.errors import NotFound, UsageError
from ckpt_tool.storage.local.store import LocalStore
from ckpt_tool.storage.store import Listing, Store
from ckpt_tool.storage.urls import is_local, join_url, local_path, scheme_of, unfolded

__all__ = ["is_local", "join_url", "local_path", "open_payload", "open_store"]

_ARCHIVES = (".tar", ".nemo")
"""Names of files that are looked into."""


def open_store(url: str | os.PathLike[str], *, remembers_bytes: int = 0) -> tuple[Store, Listing]:
    """The store of ``url`` with its listing.

    A folder is listed with all that is below it; for a file the store is that of its folder and the listing has the
    file as ``entry``, with its siblings. A tar archive (``.tar``, ``.nemo``) is a folder of its members, and a local
    path may lead on into it. Costs one listing, and for a URL one request more. Of what is far away at least
    ``remembers_bytes`` are kept in memory once they were read, for who looks at everything more than once.

    Raises:
        NotFound: nothing is there; the hint names what is beside it.
        UsageError: a URL whose scheme is unknown or whose client is not installed.
    """
    store = open_payload(url, remembers_bytes=remembers_bytes)
    return store, store.listing()


def open_payload(url: str | os.PathLike[str], *, remembers_bytes: int = 0) -> Store:
    """As `open_store`, for who knows already what lies there: nothing is listed, but for an archive.

    Raises:
        NotFound: nothing is there; the hint names what is beside it.
        UsageError: nothing at all, or a URL whose scheme is unknown or whose client is not installed.
    """
    text = os.fspath(url)
    if not text:  # what a shell makes of a variable without a value
        raise UsageError("the path is empty", hint='write "." for the folder that you are in')
    if not is_local(text):
        from ckpt_tool.storage.remembering import RememberingStore

        return _looked_into(RememberingStore(_open_remote(text), max_bytes=remembers_bytes), text)
    path = local_path(text) or "."
    if not os.path.exists(path):
        inside = _inside_archive(path)
        if inside is not None:
            return inside
        raise NotFound("no such file or folder", where=text, hint=_hint(path))
    if os.path.isdir(path):
        root = path.rstrip(os.sep + (os.altsep or "")) or path
        return LocalStore(root)
    folder, name = os.path.split(path)
    return _looked_into(LocalStore(folder or ".", entry=name), name)


def _inside_archive(path: str) -> Store | None:
    """The folder of an archive that a path leads into, ``run.tar/step-1``; None where there is none.

    Raises:
        FormatError: the archive is damaged.
    """
    parts = path.replace(os.sep, "/").rstrip("/").split("/")
    for n in range(1, len(parts)):
        archive, folder = "/".join(parts[:n]), "/".join(parts[n:])
        if parts[n - 1].endswith(_ARCHIVES) and os.path.isfile(archive):
            from ckpt_tool.storage.virtual.subfolder import Subfolder

            store = open_payload(archive)
            if any(member.startswith(f"{folder}/") for member in store.listing().paths):
                return Subfolder(store, folder)
            store.close()
    return None


def _looked_into(store: Store, name: str) -> Store:
    """The store itself, or the archive that the file is which was named."""
    if not name.endswith(_ARCHIVES):
        return store
    from ckpt_tool.storage.virtual.tar import open_tar

    return open_tar(store, store.listing()) or store


def _open_remote(url: str) -> Store:
    """The store of a URL; each client is imported where it is needed, for they cost tens of milliseconds."""
    match scheme_of(url):
        case "s3" | "s3a":
            from ckpt_tool.storage.s3.store import open_s3

            return open_s3(url)
        case "hdfs" | "viewfs":
            from ckpt_tool.storage.hdfs.store import open_hdfs

            return open_hdfs(url)
        case _:
            from ckpt_tool.storage.remote.store import open_fsspec

            return open_fsspec(url)


def _hint(path: str) -> str | None:
    url = unfolded(path)
    if url is not None:
        return f"a URL has two slashes: {url}"
    if path.startswith("~"):
        return f"only shells know ~: {os.path.expanduser(path)}"
    if os.path.islink(path):
        return f"it is a link to {os.readlink(path)!r}, which does not exist"
    folder, name = os.path.split(os.path.abspath(path))
    while not os.path.isdir(folder) and folder != os.path.dirname(folder):
        folder, name = os.path.split(folder)
    try:
        names = os.listdir(folder)
    except OSError:  # a hint is worth no second failure
        return None
    from ckpt_tool.storage.nearby import did_you_mean

    return did_you_mean(name, names) or f"{folder!r} is empty"
