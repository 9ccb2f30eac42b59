"""Opening turns what the user typed, a path or a URL, into a store and its listing. Knows no format."""

from __future__ import annotations

import errno
import os
import stat

from ckpt_tool.errors import NotFound, StorageError, UsageError
from ckpt_tool.storage.local.store import LocalStore
from ckpt_tool.storage.store import Listing, Store
from ckpt_tool.storage.urls import is_local, join_url, local_path, scheme_of, unfolded

__all__ = ["is_local", "join_url", "local_path", "open_payload", "open_store"]

_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})
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
        UsageError: nothing at all, a pipe or a device, or a URL of an unknown scheme or of a client that is not
            installed.
        StorageError: the system does not tell what is there.
    """
    text = os.fspath(url)
    if not text:  # what a shell makes of a variable without a value
        raise UsageError("the path is empty", hint='write "." for the folder that you are in')
    if not is_local(text):
        from ckpt_tool.storage.remembering import RememberingStore

        return _looked_into(RememberingStore(_open_remote(text), max_bytes=remembers_bytes), text)
    path = local_path(text) or "."
    mode = _mode_of(path, text)
    if mode is None:
        inside = _inside_archive(path)
        if inside is not None:
            return inside
        raise NotFound("no such file or folder", where=text, hint=_hint(path))
    if stat.S_ISDIR(mode):
        root = path.rstrip(os.sep + (os.altsep or "")) or path
        return LocalStore(root)
    if not stat.S_ISREG(mode):  # reading one may wait for ever, or never end
        kind = "pipe" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "device"
        raise UsageError(f"is a {kind}, expected a file or a folder", where=text, hint="copy what comes out to a file")
    folder, name = os.path.split(path)
    return _looked_into(LocalStore(folder or ".", entry=name), name)


def _mode_of(path: str, where: str) -> int | None:
    """What lies at a path, links followed; None where nothing does.

    Raises:
        StorageError: the system does not tell.
    """
    try:
        return os.stat(path).st_mode
    except OSError as error:
        if error.errno in _ABSENT:
            return None
        reason = error.strerror or str(error)
        hint = "look at the rights of its folders, and as whom you run" if error.errno == errno.EACCES else None
        raise StorageError(f"cannot be looked at: {reason}", where=where, hint=hint) from error
    except ValueError as error:  # a NUL
        raise UsageError("is no path", where=repr(where)) from error


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
        target = os.readlink(path)
        is_round = os.path.lexists(os.path.join(os.path.dirname(path), target))
        return f"it is a link to {target!r}, which {'leads back to it' if is_round else 'does not exist'}"
    folder, name = os.path.split(os.path.abspath(path))
    while not os.path.isdir(folder) and folder != os.path.dirname(folder):
        folder, name = os.path.split(folder)
    try:
        names = os.listdir(folder)
    except OSError:  # a hint is worth no second failure
        return None
    from ckpt_tool.storage.nearby import did_you_mean

    return did_you_mean(name, names) or f"{folder!r} is empty"
