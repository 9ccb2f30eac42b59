"""A tar archive as a folder: its members are read where they lie, nothing is unpacked.

Headers of 512 bytes each are walked once, through windows, so that small members cost no request of their own. Names
are not trusted: what leaves the archive is refused, links and devices are left out. Source: POSIX.1-2017 ``pax``
(ustar and pax headers), GNU tar's long names and base-256 sizes. Knows no format.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_tool.errors import FormatError, NotFound, StorageError, Unsupported
from ckpt_tool.manifest.model import FileRange
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted
from ckpt_tool.storage.store import Listing, ReadCost, Store, without_shadows
from ckpt_tool.storage.urls import check_path, join_url

__all__ = ["TarStore", "open_tar"]

_BLOCK = 512
_WINDOW_NBYTES = 256 << 10
_MAX_MEMBERS = 2_000_000
_MAX_NAME_NBYTES = 64 << 10
_FILES = frozenset({b"0", b"\0", b"7"})
_LONG_NAME, _PAX, _SPARSE = b"L", b"x", b"S"
# torch.save's own archives of 2017, which are no folders of files.
_TORCH_MEMBERS = frozenset({"sys_info", "pickle", "storages", "tensors"})


def open_tar(store: Store, listing: Listing) -> TarStore | None:
    """The archive that the listing's entry is, None when it is none, or one of torch.save's of 2017.

    Raises:
        FormatError: a damaged or cut archive, or names that leave it.
        Unsupported: sparse members.
    """
    entry = listing.entry
    if entry is None or listing.nbytes(entry) < _BLOCK or store.read(entry, 257, 5) != b"ustar":
        return None
    members = _members(store, entry, listing.nbytes(entry))
    return None if members.keys() >= _TORCH_MEMBERS else TarStore(store, entry, members)


@dataclass(frozen=True)
class TarStore:
    """Members of the tar archive ``path`` of ``inner``; closed with it."""

    inner: Store
    path: str
    members: dict[str, tuple[int, int]]
    """By name: where a member's bytes start, and how many there are."""

    @property
    def url(self) -> str:
        """URL of the archive."""
        return join_url(self.inner.url, self.path)

    @property
    def cost(self) -> ReadCost:
        """As the store around it."""
        return self.inner.cost

    def listing(self, *, anew: bool = False) -> Listing:
        """All members, each as old as the archive; no request, but where it is asked ``anew``."""
        outer = self.inner.listing(anew=anew)
        sizes = {name: nbytes for name, (_, nbytes) in sorted(self.members.items())}
        modified, tag = outer.modified.get(self.path), outer.tags.get(self.path)
        times = {} if modified is None else dict.fromkeys(sizes, modified)
        tags = {} if tag is None else dict.fromkeys(sizes, tag)
        return Listing(self.url, without_shadows(sizes), modified=times, tags=tags)

    def read(self, path: str, offset: int, length: int) -> bytes:
        """See ``Store.read``."""
        return self.inner.read(self.path, self._place(path, offset, length), length)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """See ``Store.read_into``."""
        self.inner.read_into(self.path, self._place(path, offset, buffer.nbytes), buffer)

    def fetch(self, ranges: Sequence[FileRange]) -> list[bytes]:
        """See ``Store.fetch``."""
        return self.inner.fetch(
            [FileRange(self.path, self._place(r.path, r.offset, r.length), r.length) for r in ranges]
        )

    def close(self) -> None:
        """Close the store around it."""
        self.inner.close()

    def _place(self, path: str, offset: int, length: int) -> int:
        where = join_url(self.url, path)
        found = self.members.get(check_path(path, root=self.url))
        if found is None:
            raise NotFound("no such member", where=where)
        start, nbytes = found
        if offset < 0 or length < 0:
            raise FormatError(f"expected a byte range, got offset {offset:,} and length {length:,}", where=where)
        if offset + length > nbytes:
            got = max(nbytes - offset, 0)
            raise StorageError(
                f"expected {counted(length, 'byte')}, got {min(got, length):,}", where=f"{where}:{offset}"
            )
        return start + offset


def _members(store: Store, path: str, nbytes: int) -> dict[str, tuple[int, int]]:
    """Regular files of the archive; of two with one name the later one, as tar itself unpacks them."""
    window = _Window(store, path, nbytes)
    found: dict[str, tuple[int, int]] = {}
    name, size = None, None  # from headers that speak of the next member
    at = 0
    while at + _BLOCK <= nbytes:
        header = window.read(at, _BLOCK)
        where = f"{join_url(store.url, path)}:{at}"
        if not header.strip(b"\0"):
            break
        kind = header[156:157]
        stated = _number(header[124:136], where)
        _check_sum(header, where)
        length = size if size is not None and kind in _FILES else stated
        start = at + _BLOCK
        if start + length > nbytes:
            raise FormatError(
                f"a member of {counted(length, 'byte')}, {nbytes - start:,} are left: the archive was cut",
                where=where,
                hint="fetch or copy it again",
            )
        if kind in (_LONG_NAME, _PAX):
            if length > _MAX_NAME_NBYTES:
                raise FormatError(f"a name of {counted(length, 'byte')}", where=where)
            text = window.read(start, length)
            if kind == _LONG_NAME:
                name = _text(text.rstrip(b"\0"), where)
            else:
                name, size = _pax(text, where, name, size)
        else:
            if kind == _SPARSE:
                raise Unsupported("a sparse member", where=where, hint="pack it again without --sparse")
            if kind in _FILES:
                own = (name or _name(header, where)).removeprefix("./")
                found[check_path(own, root=join_url(store.url, path))] = (start, length)
                if len(found) > _MAX_MEMBERS:
                    raise FormatError(f"more than {counted(_MAX_MEMBERS, 'member')}", where=where)
            name, size = None, None
        at = start + -(-length // _BLOCK) * _BLOCK
    return found


@dataclass(slots=True)
class _Window:
    """Reads that are served from one window where they can be."""

    store: Store
    path: str
    nbytes: int
    start: int = 0
    data: bytes = b""

    def read(self, offset: int, length: int) -> bytes:
        """``length`` bytes from ``offset``."""
        if not self.start <= offset or offset + length > self.start + len(self.data):
            self.start = offset
            self.data = self.store.read(self.path, offset, min(max(_WINDOW_NBYTES, length), self.nbytes - offset))
        return self.data[offset - self.start : offset - self.start + length]


def _check_sum(header: bytes, where: str) -> None:
    expected = _number(header[148:156], where)
    if expected != sum(header[:148]) + sum(header[156:]) + 8 * ord(" "):
        raise FormatError("the header of a member does not match its checksum", where=where)


def _number(field: bytes, where: str) -> int:
    """Octal digits, or GNU's base 256 behind a high bit."""
    if field[0] & 0x80:
        return int.from_bytes(field, "big") & ((1 << (8 * len(field) - 1)) - 1)
    digits = field.replace(b"\0", b" ").strip()
    try:
        return int(digits or b"0", 8)
    except ValueError as error:
        raise FormatError(f"{digits[:20]!r} is no number of tar", where=where) from error


def _name(header: bytes, where: str) -> str:
    name, prefix = header[:100].split(b"\0")[0], header[345:500].split(b"\0")[0]
    is_posix = header[257:263] == b"ustar\0"
    return _text(prefix + b"/" + name if is_posix and prefix else name, where)


def _text(raw: bytes, where: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"the name {raw[:50]!r} is no UTF-8 text", where=where) from error


def _pax(text: bytes, where: str, name: str | None, size: int | None) -> tuple[str | None, int | None]:
    """Name and size in records of ``LENGTH KEY=VALUE``."""
    while text:
        digits, _, _ = text.partition(b" ")
        if not digits.isdigit() or not len(digits) + 3 <= int(digits) <= len(text):
            raise FormatError("a damaged pax header", where=where)
        record = text[len(digits) + 1 : int(digits) - 1]
        text = text[int(digits) :]
        key, _, value = record.partition(b"=")
        if key == b"path":
            name = _text(value, where)
        elif key == b"size":
            if not value.isdigit() or len(value) > 18:
                raise FormatError("a damaged pax header", where=where)
            size = int(value)
        elif key.startswith(b"GNU.sparse"):
            raise Unsupported("a sparse member", where=where, hint="pack it again without --sparse")
    return name, size
