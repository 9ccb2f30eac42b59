"""Files of zeros beside stored ones."""

from __future__ import annotations

import pytest

from ckpt_tool.errors import StorageError
from ckpt_tool.manifest.model import ZEROS, FileEntry, FileRange
from ckpt_tool.manifest.tables import FileTable
from ckpt_tool.storage.memory import MemoryStore
from ckpt_tool.storage.virtual.zeros import with_zeros

FILES = FileTable((FileEntry("a", 4), FileEntry("zeros", 8, codec=ZEROS)))


def test_zeros_are_read_beside_stored_files() -> None:
    """Any range of them, without a request; other files are the inner store's."""
    inner = MemoryStore({"a": b"abcd"})
    store = with_zeros(inner, FILES)
    assert store.fetch([FileRange("zeros", 2, 3), FileRange("a", 1, 2)]) == [bytes(3), b"bc"]
    assert store.read("zeros", 0, 8) == bytes(8)
    buffer = bytearray(b"xxxx")
    store.read_into("zeros", 4, memoryview(buffer))
    assert buffer == bytes(4)
    store.read_into("a", 0, memoryview(buffer))
    assert buffer == b"abcd"


def test_reading_past_the_zeros_is_an_error() -> None:
    """A manifest that asks for more than it declared is wrong."""
    with pytest.raises(StorageError, match="there are 8 zeros"):
        with_zeros(MemoryStore({}), FILES).read("zeros", 6, 3)


def test_without_such_files_the_store_is_the_same() -> None:
    """No wrapper where there is nothing to add."""
    inner = MemoryStore({"a": b"abcd"})
    assert with_zeros(inner, FileTable((FileEntry("a", 4),))) is inner
