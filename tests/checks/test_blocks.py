"""Blocks over spans: every byte of every span is seen once, in order or not, whatever the spans look like."""

from __future__ import annotations

import threading
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_tool.checks.blocks import Clip, cut_blocks, stream_blocks
from ckpt_tool.errors import CkptError, StorageError
from ckpt_tool.geometry.columns import Int64Array
from ckpt_tool.manifest.model import FileRange
from ckpt_tool.storage.memory import MemoryStore
from tests.storage.recording import RecordingStore

FILES = {"a": bytes(range(256)) * 3, "b": bytes(reversed(range(256)))}
SPANS = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 200), st.integers(0, 120)).map(
        lambda s: (s[0], s[1], min(s[1] + s[2], 256))
    ),
    max_size=12,
)


class Collector:
    """Keeps the bytes of every clip, and what failed."""

    def __init__(self) -> None:
        self.seen_clips: dict[int, dict[int, bytes]] = {}
        self.addresses: set[int] = set()
        self.failures: list[tuple[FileRange, list[int], type[CkptError]]] = []
        self._lock = threading.Lock()

    def visit(self, clips: list[Clip]) -> None:
        """Take in one block."""
        with self._lock:
            for clip in clips:
                parts = self.seen_clips.setdefault(clip.span, {})
                assert clip.start not in parts
                parts[clip.start] = clip.data.tobytes()
                self.addresses.add((clip.data.ctypes.data - clip.start) % 16)

    def failed(self, where: FileRange, spans: list[int], error: CkptError) -> None:
        """Take in one failure."""
        self.failures.append((where, spans, type(error)))

    def seen(self) -> dict[int, dict[int, bytes]]:
        """All clips."""
        return self.seen_clips


def columns(spans: list[tuple[int, int, int]]) -> tuple[Int64Array, Int64Array, Int64Array]:
    """File, start and stop of spans."""
    table = np.array(spans, dtype=np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


@given(SPANS, st.integers(16, 80), st.integers(0, 40), st.integers(1, 3))
def test_spans_are_seen_whole(spans: list[tuple[int, int, int]], block_bytes: int, gap: int, n_workers: int) -> None:
    """The clips of a span, put together, are its bytes; and no byte of a file is read twice."""
    file, start, stop = columns(spans)
    blocks = cut_blocks(file, start, stop, block_bytes=block_bytes, max_gap_bytes=gap)
    assert ((blocks.stop - blocks.start) <= block_bytes).all()
    store = RecordingStore(MemoryStore(FILES))
    found, taken = Collector(), list[object]()
    stream_blocks(
        blocks, ("a", "b"), start, stop, store=store, n_workers=n_workers, visitor=lambda: found, take=taken.append
    )
    assert found.failures == []
    for span, (number, low, high) in enumerate(spans):
        assert (
            b"".join(data for _, data in sorted(found.seen_clips.get(span, {}).items()))
            == FILES["ab"[number]][low:high]
        )
    reads = sorted((call.path, call.offset, call.offset + call.length) for call in store.calls)
    for (path, _, end), (other, begin, _) in pairwise(reads):
        assert path != other or end <= begin


def test_cuts_lie_between_elements() -> None:
    """A span that starts anywhere is cut a multiple of 16 bytes behind its start."""
    file, start, stop = columns([(0, 3, 700)])
    blocks = cut_blocks(file, start, stop, block_bytes=100, max_gap_bytes=0)
    assert set(((blocks.start[1:] - 3) % 16).tolist()) == {0}


def test_small_gaps_are_read_over() -> None:
    """Two spans near each other cost one request, far from each other two."""
    file, start, stop = columns([(0, 0, 10), (0, 20, 30)])
    assert len(cut_blocks(file, start, stop, block_bytes=100, max_gap_bytes=10)) == 1
    assert len(cut_blocks(file, start, stop, block_bytes=100, max_gap_bytes=9)) == 2


def test_block_that_cannot_be_read_is_handed_over_and_the_rest_goes_on() -> None:
    """A range beyond the end fails alone."""
    file, start, stop = columns([(1, 0, 50), (1, 250, 300), (0, 0, 8)])
    blocks = cut_blocks(file, start, stop, block_bytes=100, max_gap_bytes=0)
    found, taken = Collector(), list[object]()
    stream_blocks(
        blocks, ("a", "b"), start, stop, store=MemoryStore(FILES), n_workers=1, visitor=lambda: found, take=taken.append
    )
    assert sorted(found.seen_clips) == [0, 2]
    assert found.failures == [(FileRange("b", 250, 50), [1], StorageError)]


@pytest.mark.parametrize("start", [0, 4, 8, 12, 5])
def test_elements_lie_on_their_own_alignment(start: int) -> None:
    """Payload may begin anywhere in a file; in memory it begins where its elements like it."""
    file, low, high = columns([(0, start, 400)])
    blocks = cut_blocks(file, low, high, block_bytes=128, max_gap_bytes=0)
    found, taken = Collector(), list[object]()
    stream_blocks(
        blocks, ("a", "b"), low, high, store=MemoryStore(FILES), n_workers=1, visitor=lambda: found, take=taken.append
    )
    assert found.addresses == {0}
