"""What every store must do; subclassed once for each. Files are put in place without the store under test."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from ckpt_tool.errors import FormatError, NotFound, StorageError
from ckpt_tool.manifest.model import FileRange

if TYPE_CHECKING:
    from ckpt_tool.storage.store import Store

FILES = {
    "a.bin": bytes(range(256)) * 40,
    "empty": b"",
    "sub/b.bin": b"0123456789",
    "sub/deep/c.bin": b"c" * 70_000,
}

HOSTILE = (
    "../outside",
    "/etc/passwd",
    "sub/../../outside",
    "..\\outside",
    "\\\\host\\share",
    "C:\\x",
    "C:x",
    "",
    "a\0b",
)


class StoreTests:
    """Each subclass gives a fixture ``store`` that holds ``FILES`` and nothing else."""

    def test_listing(self, store: Store) -> None:
        """All files are listed with their sizes, relative to the root, sorted."""
        listing = store.listing()
        assert listing.sizes == {path: len(data) for path, data in FILES.items()}
        assert listing.paths == tuple(sorted(FILES))
        assert listing.entry is None
        assert listing.url == store.url

    @pytest.mark.parametrize("path", sorted(FILES))
    def test_read_whole(self, store: Store, path: str) -> None:
        """A whole file reads as it was written."""
        assert store.read(path, 0, len(FILES[path])) == FILES[path]

    def test_read_range(self, store: Store) -> None:
        """A range is exact, and an empty one at the end is no error."""
        assert store.read("a.bin", 250, 12) == FILES["a.bin"][250:262]
        assert store.read("a.bin", 10_239, 1) == b"\xff"
        assert store.read("a.bin", 10_240, 0) == b""

    def test_read_into(self, store: Store) -> None:
        """A buffer is filled in place, whatever its item size, and nothing beside it is touched."""
        buffer = bytearray(20)
        store.read_into("sub/b.bin", 2, memoryview(buffer)[5:11])
        assert bytes(buffer) == bytes(5) + b"234567" + bytes(9)
        words = memoryview(bytearray(16)).cast("Q")
        store.read_into("a.bin", 16, words)
        assert words.tobytes() == FILES["a.bin"][16:32]
        store.read_into("a.bin", 0, memoryview(b""))

    def test_fetch(self, store: Store) -> None:
        """Ranges come back in the order asked for, repeated and empty ones too."""
        ranges = [FileRange("a.bin", i * 7 % 10_000, i % 50) for i in range(60)] + [FileRange("sub/b.bin", 3, 4)] * 2
        assert store.fetch(ranges) == [FILES[r.path][r.offset : r.end] for r in ranges]
        assert store.fetch([]) == []

    def test_beyond_the_end(self, store: Store) -> None:
        """Fewer bytes than asked for is an error that says both numbers, not a short result."""
        with pytest.raises(StorageError, match=r"sub/b\.bin:8: expected 5 bytes, got 2"):
            store.read("sub/b.bin", 8, 5)
        with pytest.raises(StorageError, match="expected 5 bytes, got 2"):
            store.read_into("sub/b.bin", 8, memoryview(bytearray(5)))
        with pytest.raises(StorageError, match="expected 1 byte, got 0"):
            store.read("sub/b.bin", 100, 1)
        with pytest.raises(StorageError, match="got 2"):
            store.fetch([FileRange("a.bin", 0, 1), FileRange("sub/b.bin", 8, 5)])
        with pytest.raises(StorageError, match="expected 1,152,921,504,606,846,976 bytes, got 10"):
            store.read("sub/b.bin", 0, 1 << 60)

    def test_missing(self, store: Store) -> None:
        """A file that is not there is NotFound, with its name."""
        with pytest.raises(NotFound, match=r"sub/none\.bin"):
            store.read("sub/none.bin", 0, 1)
        with pytest.raises(NotFound, match=r"sub/none\.bin"):
            store.fetch([FileRange("a.bin", 0, 1), FileRange("sub/none.bin", 0, 1)])

    @pytest.mark.parametrize("path", HOSTILE)
    def test_hostile_path(self, store: Store, path: str) -> None:
        """A path that leaves the root on any system is refused before it is looked at."""
        with pytest.raises(FormatError):
            store.read(path, 0, 1)

    def test_negative_range(self, store: Store) -> None:
        """Negative numbers, as a corrupt index may hold, count from nowhere."""
        with pytest.raises(FormatError, match="expected a byte range"):
            store.read("a.bin", -1, 1)
        with pytest.raises(FormatError, match="expected a byte range"):
            store.read("a.bin", 5, -1)

    def test_threads(self, store: Store) -> None:
        """Many threads read at once and each gets its own bytes."""
        ranges = [(path, i) for i in range(0, 10, 2) for path in FILES if path != "empty"] * 10

        def is_right(item: tuple[str, int]) -> bool:
            path, offset = item
            return store.read(path, offset, 2) == FILES[path][offset : offset + 2]

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(is_right, ranges))

    def test_closed(self, store: Store) -> None:
        """After close, reads fail."""
        store.read("a.bin", 0, 1)
        store.close()
        with pytest.raises(StorageError, match="closed"):
            store.read("a.bin", 0, 1)
