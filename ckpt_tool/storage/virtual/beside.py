"""Files of two stores as if they lay in one folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckpt_tool.manifest.model import FileRange
from ckpt_tool.records import dataclass
from ckpt_tool.storage.store import Listing, ReadCost, Store

__all__ = ["Beside", "beside"]


def beside(host: Listing, guest: Listing, guests: frozenset[str], paths: Iterable[str]) -> Listing:
    """What two listings have of ``paths``, those in ``guests`` being ``guest``'s."""
    of = {path: guest if path in guests else host for path in sorted(paths)}
    return Listing(
        host.url,
        {path: each.sizes[path] for path, each in of.items() if path in each.sizes},
        modified={path: each.modified[path] for path, each in of.items() if path in each.modified},
        tags={path: each.tags[path] for path, each in of.items() if path in each.tags},
    )


@dataclass(frozen=True)
class Beside:
    """Reads of ``guest`` for the paths in ``guests``, of ``host`` for all others; closing it leaves both open."""

    host: Store
    guest: Store
    guests: frozenset[str]
    sizes: Listing
    """What there is of both."""

    @property
    def url(self) -> str:
        """That of the host."""
        return self.host.url

    @property
    def cost(self) -> ReadCost:
        """As the host's."""
        return self.host.cost

    def listing(self, *, anew: bool = False) -> Listing:
        """What there is of both; no request, but where it is asked ``anew``."""
        if not anew:
            return self.sizes
        host, guest = self.host.listing(anew=True), self.guest.listing(anew=True)
        return beside(host, guest, self.guests, self.sizes.sizes)

    def holder(self, path: str) -> Store:
        """The store that has a file."""
        return self.guest if path in self.guests else self.host

    def read(self, path: str, offset: int, length: int) -> bytes:
        """See ``Store.read``."""
        return self.holder(path).read(path, offset, length)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """See ``Store.read_into``."""
        self.holder(path).read_into(path, offset, buffer)

    def fetch(self, ranges: Sequence[FileRange]) -> list[bytes]:
        """See ``Store.fetch``."""
        found: dict[int, bytes] = {}
        for store, is_guest in ((self.host, False), (self.guest, True)):
            rows = [row for row, each in enumerate(ranges) if (each.path in self.guests) is is_guest]
            found |= dict(zip(rows, store.fetch([ranges[row] for row in rows]), strict=True))
        return [found[row] for row in range(len(ranges))]

    def close(self) -> None:
        """Nothing: both stay open."""
