"""An S3 store reads byte ranges of the objects below one prefix; it knows no format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckpt_tool.errors import CkptError, FormatError, NotFound, StorageError
from ckpt_tool.manifest.model import FileRange
from ckpt_tool.sizes import counted
from ckpt_tool.storage.fetch import fetch_all
from ckpt_tool.storage.listed_once import ListedOnce
from ckpt_tool.storage.nearby import did_you_mean
from ckpt_tool.storage.remote.http_client import HttpStatusError
from ckpt_tool.storage.s3.answers import S3Object
from ckpt_tool.storage.s3.client import S3Client, split_s3_url
from ckpt_tool.storage.store import REMOTE_COST, Listing, without_shadows
from ckpt_tool.storage.urls import check_path, join_url, split_url

__all__ = ["S3Store", "open_s3"]

_RANGES_AT_ONCE = 128
"""Of one call, which has ten requests under way."""


class S3Store:
    """Objects below ``url``.

    Args:
        url: a folder, kept as it is, never normalised.
        entry: the one object in it that the user named; the listing then has only it and its siblings.
        is_alone: the bucket must not be listed; the listing then has that object only.
    """

    def __init__(self, url: str, *, entry: str | None = None, is_alone: bool = False) -> None:
        self.url = url
        self.cost = REMOTE_COST
        bucket, key = split_s3_url(url)
        self._client = S3Client(bucket)
        self._prefix = key if not key or key.endswith("/") else f"{key}/"
        self._entry = entry
        self._is_alone = is_alone
        self._listing = ListedOnce(self._listed)
        self._is_closed = False

    def listing(self, *, anew: bool = False) -> Listing:
        """All objects below the root, or the entry and its siblings; a request for each thousand, cached.

        Raises:
            NotFound: nothing is below the root.
        """
        return self._listing.get(anew=anew)

    def _listed(self) -> Listing:
        found: list[S3Object] = []
        if self._is_alone and self._entry is not None:
            one = self._client.head(self._prefix + self._entry)
            found += [] if one is None else [one]
        else:
            for page in self._client.pages(self._prefix, delimiter="" if self._entry is None else "/"):
                found += page.objects
        files = {o.key[len(self._prefix) :]: o for o in found if not o.key.endswith("/")}
        if not files or (self._entry is not None and self._entry not in files):
            raise NotFound("nothing is here", where=join_url(self.url, self._entry or ""))
        return Listing(
            self.url,
            without_shadows({path: files[path].nbytes for path in sorted(files)}, self._entry),
            self._entry,
            {path: o.modified for path, o in files.items() if o.modified is not None},
            tags={path: o.tag for path, o in files.items() if o.tag},
        )

    def read(self, path: str, offset: int, length: int) -> bytes:
        """``length`` bytes of ``path`` from ``offset``: one request; for an empty range a look at the size."""
        key, where = self._place(path, offset, length)
        known = self._listing.kept.sizes.get(path) if self._listing.kept is not None else None
        if (known is None and length > REMOTE_COST.max_read_bytes) or not length:
            # Memory is not taken on the word of an index alone.
            known = known if known is not None else self._size(key, where)
        if known is not None and known < offset + length:
            got = max(known - offset, 0)
            raise StorageError(f"expected {counted(length, 'byte')}, got {got:,}", where=f"{where}:{offset}")
        data = bytearray(length)
        if length:
            self._client.read_into(key, offset, memoryview(data), where=where)
        return bytes(data)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``path`` at ``offset``: one request, and no copy of the bytes."""
        key, where = self._place(path, offset, buffer.nbytes)
        if buffer.nbytes:
            self._client.read_into(key, offset, buffer.cast("B"), where=where)

    def fetch(self, ranges: Sequence[FileRange]) -> list[bytes]:
        """The bytes of each range, in order; one request each, ``cost.concurrency`` at once."""
        for r in ranges:
            self._place(r.path, r.offset, r.length)
        if not self._client.reads_many:
            return fetch_all(self._one, ranges, concurrency=self.cost.concurrency)
        found: dict[int, bytes] = {}
        batches = list(self._batches(ranges))
        answers = fetch_all(lambda rows: self._batch(ranges, rows), batches, concurrency=self.cost.concurrency)
        for rows, answer in zip(batches, answers, strict=True):
            found |= zip(rows, answer, strict=True)
        return [found[number] for number in range(len(ranges))]

    def _batches(self, ranges: Sequence[FileRange]) -> Iterator[list[int]]:
        """Numbers of ranges of one object that are fetched together: neither too many nor too long for one call."""
        batches: dict[str, list[int]] = {}
        nbytes = dict.fromkeys((r.path for r in ranges), 0)
        for number, r in enumerate(ranges):
            batch = batches.setdefault(r.path, [])
            if batch and (len(batch) >= _RANGES_AT_ONCE or nbytes[r.path] + r.length > self.cost.max_read_bytes):
                yield batch
                batch = batches[r.path] = []
                nbytes[r.path] = 0
            batch.append(number)
            nbytes[r.path] += r.length
        yield from batches.values()

    def _batch(self, ranges: Sequence[FileRange], rows: Sequence[int]) -> list[bytes]:
        """Some ranges of one object, together if they lie within it, so that what is wrong with one can be told."""
        path = ranges[rows[0]].path
        known = self._listing.kept.sizes.get(path) if self._listing.kept is not None else None
        if (
            len(rows) > 1
            and known is not None
            and all(0 < ranges[row].length <= known - ranges[row].offset for row in rows)
        ):
            starts, lengths = [ranges[row].offset for row in rows], [ranges[row].length for row in rows]
            found = self._client.read_many(self._prefix + path, starts, lengths)
            if found is not None:
                return found
        return [self._one(ranges[row]) for row in rows]

    def _one(self, r: FileRange) -> bytes:
        return self.read(r.path, r.offset, r.length)

    def close(self) -> None:
        """Close connections; further reads fail."""
        self._is_closed = True
        self._client.close()

    def _place(self, path: str, offset: int, length: int) -> tuple[str, str]:
        where = join_url(self.url, path)
        if self._is_closed:
            raise StorageError("used after it was closed", where=where)
        if offset < 0 or length < 0:
            raise FormatError(f"expected a byte range, got offset {offset:,} and length {length:,}", where=where)
        return self._prefix + check_path(path, root=self.url), where

    def _size(self, key: str, where: str) -> int:
        found = self._client.head(key)
        if found is None:
            raise NotFound("no such file", where=where)
        return found.nbytes


def open_s3(url: str) -> S3Store:
    """The store of a folder, or of an object's folder with that object as its entry.

    A folder costs a request for each thousand objects; an object three.

    Raises:
        NotFound: nothing is there; the hint names what is nearby.
    """
    store = S3Store(url)
    try:
        store.listing()
    except CkptError as error:
        store.close()
        is_refused = isinstance(error.__cause__, HttpStatusError) and error.__cause__.status == 403
        if not is_refused and (not isinstance(error, NotFound) or "no such bucket" in error.message):
            raise
        bucket, key = split_s3_url(url)
        if not key:
            raise
        client = S3Client(bucket)
        try:
            return _opened_object(client, url, key, error if is_refused else None)
        finally:
            client.close()
    return store


def _opened_object(client: S3Client, url: str, key: str, refusal: CkptError | None) -> S3Store:
    """The store of the one object that is named, as nothing lies below it, or listing was refused."""
    found = None
    try:
        if not key.endswith("/"):
            found = client.head(key)
    except StorageError:
        if refusal is None:
            raise
    if found is not None:
        folder, name = split_url(url)
        return S3Store(folder, entry=name, is_alone=refusal is not None)
    if refusal is None:
        raise _nothing(client, url, key) from None
    cause = refusal.__cause__
    if isinstance(cause, HttpStatusError) and cause.hint is None:
        refusal.hint = f"listing needs the right s3:ListBucket, the URL of one file does not; else {refusal.hint}"
    raise refusal


def _nothing(client: S3Client, url: str, key: str) -> NotFound:
    """The error for a name that nothing has; the hint names what is nearby."""
    folder, _, name = key.rstrip("/").rpartition("/")
    prefix = f"{folder}/" if folder else ""
    try:
        page = next(client.pages(prefix, delimiter="/"))
    except (NotFound, StorageError):  # a hint is worth no second failure
        return NotFound("no such file or folder", where=url)
    folders = [f[len(prefix) : -1] for f in page.folders]
    if name in folders:
        return NotFound("is a folder with nothing in it", where=url)
    names = [*(o.key[len(prefix) :] for o in page.objects), *folders]
    return NotFound("no such file or folder", where=url, hint=did_you_mean(name, [each for each in names if each]))
