"""A folder of a store as a store of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ckpt_tool.errors import CkptError
from ckpt_tool.manifest.model import FileRange
from ckpt_tool.records import dataclass
from ckpt_tool.storage.store import Listing, ReadCost, Store

__all__ = ["Subfolder", "places_below", "sublisting"]


@contextmanager
def places_below(folder: str) -> Iterator[None]:
    """Errors raised within name places relative to ``folder``; they leave with it in front."""
    try:
        yield
    except CkptError as error:
        if folder and error.where and "://" not in error.where and not error.where.startswith(("/", f"{folder}/")):
            error.where = f"{folder}/{error.where}"
        error.files = tuple(f"{folder}/{path}" if folder else path for path in error.files)
        raise


def sublisting(listing: Listing, folder: str) -> Listing:
    """The files below ``folder``, relative to it.

    >>> sublisting(Listing("u", {"a/b": 1, "c": 2}), "a").sizes
    {'b': 1}
    """
    prefix = folder.rstrip("/") + "/"
    below = {path[len(prefix) :]: path for path in listing.sizes if path.startswith(prefix)}
    return Listing(
        f"{listing.url.rstrip('/')}/{folder}",
        {path: listing.sizes[full] for path, full in below.items()},
        modified={path: listing.modified[full] for path, full in below.items() if full in listing.modified},
        tags={path: listing.tags[full] for path, full in below.items() if full in listing.tags},
    )


@dataclass(frozen=True)
class Subfolder:
    """Reads below ``folder`` of ``inner``; closing it leaves ``inner`` open."""

    inner: Store
    folder: str

    @property
    def url(self) -> str:
        """URL of the folder."""
        return f"{self.inner.url.rstrip('/')}/{self.folder}"

    @property
    def cost(self) -> ReadCost:
        """As the store around it."""
        return self.inner.cost

    def listing(self, *, anew: bool = False) -> Listing:
        """Files below the folder; no request beyond those of the store around it."""
        return sublisting(self.inner.listing(anew=anew), self.folder)

    def read(self, path: str, offset: int, length: int) -> bytes:
        """See ``Store.read``."""
        return self.inner.read(f"{self.folder}/{path}", offset, length)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """See ``Store.read_into``."""
        self.inner.read_into(f"{self.folder}/{path}", offset, buffer)

    def fetch(self, ranges: Sequence[FileRange]) -> list[bytes]:
        """See ``Store.fetch``."""
        return self.inner.fetch([FileRange(f"{self.folder}/{r.path}", r.offset, r.length) for r in ranges])

    def close(self) -> None:
        """Nothing: the store around it stays open."""
