"""``python read_ranges.py CLIENT URL LENGTH COUNT``: read ranges of one object, with gaps, by ours, obstore or s3fs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any


def ours(url: str, starts: Sequence[int], length: int) -> Any:
    """The store that commands read from."""
    from ckpt_tool.manifest.model import FileRange
    from ckpt_tool.storage.open import open_store

    store, listing = open_store(url)
    return store.fetch([FileRange(listing.entry or "", start, length) for start in starts])


def obstore(url: str, starts: Sequence[int], length: int) -> Any:
    """Its call for many ranges, none read together."""
    import os

    import obstore as package
    from obstore.store import S3Store

    bucket, _, key = url.partition("://")[2].partition("/")
    store = S3Store(bucket, endpoint=os.environ["AWS_ENDPOINT_URL"], client_options={"allow_http": True})
    return package.get_ranges(store, key, starts=starts, lengths=[length] * len(starts), coalesce=0)


def s3fs(url: str, starts: Sequence[int], length: int) -> Any:
    """Through fsspec."""
    import fsspec

    fs = fsspec.filesystem("s3")
    return fs.cat_ranges([url] * len(starts), list(starts), [start + length for start in starts], batch_size=16)


GAP_BYTES = 64 << 10
"""So that no client reads neighbours together."""
CLIENTS: dict[str, Callable[[str, Sequence[int], int], Any]] = {"ours": ours, "obstore": obstore, "s3fs": s3fs}

if __name__ == "__main__":
    client, where, each, n = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:5])
    found = CLIENTS[client](where, [i * (each + GAP_BYTES) for i in range(n)], each)
    if sum(len(data) for data in found) != n * each:
        raise SystemExit("other bytes than were asked for")
