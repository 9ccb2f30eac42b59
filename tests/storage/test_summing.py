"""Sums of files come from what was read, and the rest is read once."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.manifest.model import FileRange
from ckpt_tool.storage.memory import MemoryStore
from ckpt_tool.storage.summing import SummingStore
from tests.storage.recording import RecordingStore

DATA = bytes(range(256)) * 3


@given(st.lists(st.tuples(st.integers(0, 700), st.integers(0, 68)), max_size=8))
def test_any_reads_give_the_sum(ranges: list[tuple[int, int]]) -> None:
    """Whatever was read, in any order, twice or not at all, the file's CRC-32 is that of its bytes."""
    store = SummingStore(MemoryStore({"a": DATA}))
    for number, (offset, length) in enumerate(ranges):
        if number % 3 == 0:
            store.read("a", offset, length)
        elif number % 3 == 1:
            store.read_into("a", offset, memoryview(bytearray(length)))
        else:
            store.fetch([FileRange("a", offset, length)])
    assert store.file_crc32("a", len(DATA)) == zlib.crc32(DATA)


def test_nothing_is_read_twice() -> None:
    """Only gaps are read, one request each."""
    inner = RecordingStore(MemoryStore({"a": DATA, "empty": b""}))
    store = SummingStore(inner)
    for offset in (100, 0, 10, 20, 700):
        store.read("a", offset, 10)
    inner.clear()
    assert store.file_crc32("a", len(DATA)) == zlib.crc32(DATA)
    assert [(call.offset, call.length) for call in inner.calls] == [(30, 70), (110, 590), (710, 58)]
    assert store.file_crc32("empty", 0) == 0
