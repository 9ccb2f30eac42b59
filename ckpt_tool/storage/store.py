"""A store reads byte ranges of the files below one root; it knows no format and no tensor."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Protocol

from ckpt_tool.errors import NotFound
from ckpt_tool.manifest.model import FileRange
from ckpt_tool.records import dataclass, field

__all__ = ["REMOTE_COST", "Listing", "ReadCost", "Store", "without_shadows"]


@dataclass(frozen=True, slots=True)
class ReadCost:
    """What a request costs on a kind of storage, as knobs for coalescing."""

    max_gap_bytes: int
    """Two ranges at most this far apart are cheaper to read as one."""
    max_read_bytes: int
    """No single request is longer than this."""
    concurrency: int
    """Requests that are worth having under way at once."""
    read_ahead_bytes: int = 0
    """Bytes worth fetching before they are needed; 0 where a read is as quick as a thread that waits for it."""


# A request costs 10 to 100 ms of latency whatever its length, a connection carries about 100 MB/s: a gap of 1 MiB is
# read over for less than a request. Reads of 16 MiB are long enough to hide the latency and short enough to repeat.
REMOTE_COST = ReadCost(max_gap_bytes=1 << 20, max_read_bytes=16 << 20, concurrency=16, read_ahead_bytes=128 << 20)


@dataclass(frozen=True)
class Listing:
    """Files below a root, paths with ``/`` and relative to it, sorted."""

    url: str
    sizes: dict[str, int]
    """Bytes of each file."""
    entry: str | None = None
    """The one file that the user named, when the URL was a file: ``url`` is then its folder and ``sizes`` has only it
    and its siblings."""
    modified: dict[str, float] = field(default_factory=dict)
    """When each file was last written, in seconds since 1970, where the storage tells."""
    empty: tuple[str, ...] = ()
    """Folders that nothing lies in, where the storage has folders."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Links to folders, and links to nothing: path, and where it leads to, relative to the root where it lies below."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """What the storage calls the content of each file, another for another content, where it has such names."""

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """All paths, sorted; only ``entry`` when a single file was named."""
        return (self.entry,) if self.entry is not None else tuple(sorted(self.sizes))

    def match(self, pattern: str) -> tuple[str, ...]:
        """Paths that fit a glob; ``*`` does not cross ``/``.

        >>> Listing("", {"a.pt": 1, "b/a.pt": 1}).match("*.pt")
        ('a.pt',)
        """
        depth = pattern.count("/")
        return tuple(p for p in self.paths if p.count("/") == depth and fnmatch.fnmatchcase(p, pattern))

    def named(self, place: str | None) -> str | None:
        """The file that a place such as an error's (``a/b.pt:64``) is in; None for a place that is in none.

        >>> Listing("", {"a": 1, "a/b.pt": 1}).named("a/b.pt:64+8"), Listing("", {"a": 1}).named("ab")
        ('a/b.pt', None)
        """
        if place is None:
            return None
        fronts = (place, *(place[: end.start()] for end in re.finditer(":", place)))
        return next((path for path in fronts if path in self.sizes), None)

    def __contains__(self, path: object) -> bool:
        """Whether ``path`` is a file here (siblings of ``entry`` included)."""
        return path in self.sizes

    def nbytes(self, path: str) -> int:
        """Bytes of one file.

        Raises:
            NotFound: no such file.
        """
        size = self.sizes.get(path)
        if size is None:
            raise NotFound("no such file", where=f"{self.url.rstrip('/')}/{path}")
        return size


def without_shadows(sizes: Mapping[str, int], entry: str | None = None) -> dict[str, int]:
    """The files without those in which macOS keeps the attributes of others, on drives and in archives that have none.

    They have the ending of the files that they stand beside, in number and place, and nothing of what these hold.
    ``entry``, which somebody named, stays. Source: RFC 1740 (AppleDouble); ``tar`` and ``zip`` of macOS.

    >>> without_shadows({"a.pt": 9, "._a.pt": 4, "._b.pt": 4, "__MACOSX/._a.pt": 4})
    {'a.pt': 9, '._b.pt': 4}
    """
    return {path: n for path, n in sizes.items() if "._" not in path or path == entry or not _is_shadow(path, sizes)}


def _is_shadow(path: str, sizes: Mapping[str, int]) -> bool:
    folder, slash, name = path.rpartition("/")
    return name.startswith("._") and (
        f"{folder}{slash}{name.removeprefix('._')}" in sizes or "__MACOSX" in folder.split("/")
    )


class Store(Protocol):
    """Random reads below ``url``. Safe to use from several threads.

    Every read is exact: fewer bytes than asked for is a ``StorageError``, a missing file ``NotFound``. Paths that leave
    the root are a ``FormatError``.
    """

    @property
    def url(self) -> str:
        """The root, as the user wrote it."""
        ...

    @property
    def cost(self) -> ReadCost:
        """What requests cost here."""
        ...

    def listing(self, *, anew: bool = False) -> Listing:
        """All files below the root; one listing call per folder or page, cached. ``anew`` asks again, as for once."""
        ...

    def read(self, path: str, offset: int, length: int) -> bytes:
        """``length`` bytes of ``path`` from ``offset``: one request."""
        ...

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``path`` at ``offset``: one request."""
        ...

    def fetch(self, ranges: Sequence[FileRange]) -> list[bytes]:
        """The bytes of each range, in order; one request each, ``cost.concurrency`` at once."""
        ...

    def close(self) -> None:
        """Release handles; further reads fail."""
        ...
