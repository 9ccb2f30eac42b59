"""The record is complete, in order, and of the requests only."""

from __future__ import annotations

import pytest

from ckpt_tool.errors import NotFound
from ckpt_tool.manifest.model import FileRange
from ckpt_tool.storage.memory import MemoryStore
from tests.storage.recording import ReadCall, RecordingStore


def test_every_kind_of_read_is_recorded() -> None:
    """read, read_into and each range of fetch are one call; listings are none; failed reads are calls."""
    store = RecordingStore(MemoryStore({"a": b"0123456789"}))
    store.listing()
    store.read("a", 0, 3)
    store.read_into("a", 4, memoryview(bytearray(2)))
    store.fetch([FileRange("a", 1, 1), FileRange("a", 9, 1)])
    with pytest.raises(NotFound):
        store.read("b", 0, 1)
    expected = (
        ReadCall("a", 0, 3),
        ReadCall("a", 4, 2),
        ReadCall("a", 1, 1),
        ReadCall("a", 9, 1),
        ReadCall("b", 0, 1),
    )
    assert store.calls == expected
    assert store.nbytes == 8
    store.clear()
    assert len(store.calls) == store.nbytes == 0
