"""Reading ahead: ranges that are wanted soon, in a known order, are fetched before they are asked for.

Neighbours are read as one request where a gap between them costs less than a request, and several requests are under
way while the caller works on what has come. Knows no format.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

import numpy as np

from ckpt_tool.geometry.runs import merge_runs
from ckpt_tool.manifest.model import FileRange
from ckpt_tool.records import dataclass
from ckpt_tool.storage.store import Store

__all__ = ["ReadAhead"]

_RANGES_AT_ONCE = 4096


@dataclass(slots=True, eq=False)
class _Block:
    """Bytes of one stretch of a file, once its requests are answered."""

    offset: int
    data: memoryview
    requests: list[Future[None]]
    n_wanted: int
    """Ranges in it that were not asked for yet; its memory is let go with the last."""


class ReadAhead:
    """``inner``, for one thread that reads ``ranges`` in their order; other reads go through.

    Args:
        inner: stays open.
        ranges: what will be read, looked at as far as memory reaches. One that is left out in the end costs its bytes.
        max_bytes: fetched and not yet used at most, about.
        concurrency: requests under way.
    """

    def __init__(self, inner: Store, ranges: Iterable[FileRange], *, max_bytes: int, concurrency: int) -> None:
        self._inner = inner
        self._ranges: Iterator[FileRange] = iter(ranges)
        self._batch_bytes = max(max_bytes // 2, 1)
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="ckpt-ahead")
        self._blocks: dict[tuple[str, int, int], list[_Block]] = {}
        self._left: list[int] = []
        """Ranges of each batch under way that were not asked for yet, the current batch first."""
        self._batch_of: dict[tuple[str, int, int], list[int]] = {}
        self._n_batches = 0
        self._n_done = 0
        self._start_batch()
        self._start_batch()

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer``: from what was fetched, or by a request of its own where this range was not announced."""
        key = (path, offset, buffer.nbytes)
        blocks = self._blocks.get(key)
        if not blocks:
            self._inner.read_into(path, offset, buffer)
            return
        block = blocks.pop(0)
        if not blocks:
            del self._blocks[key]
        for request in block.requests:
            request.result()
        start = offset - block.offset
        buffer.cast("B")[:] = block.data[start : start + buffer.nbytes]
        block.n_wanted -= 1
        if not block.n_wanted:
            block.data = memoryview(b"")
        self._count(key)

    def close(self) -> None:
        """Let go of what was fetched; requests that were not sent are not."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._blocks.clear()

    def _count(self, key: tuple[str, int, int]) -> None:
        """Note that a range was asked for; with the last of the oldest batch a new batch is fetched."""
        numbers = self._batch_of[key]
        self._left[numbers.pop(0)] -= 1
        if not numbers:
            del self._batch_of[key]
        while self._n_done < self._n_batches and not self._left[self._n_done]:
            self._n_done += 1
            self._start_batch()

    def _start_batch(self) -> None:
        batch = self._next_batch()
        if not batch:
            return
        number = self._n_batches
        self._n_batches += 1
        self._left.append(len(batch))
        for r in batch:
            self._batch_of.setdefault((r.path, r.offset, r.length), []).append(number)
        by_path: dict[str, list[FileRange]] = {}
        for r in batch:
            by_path.setdefault(r.path, []).append(r)
        first_use = {(r.path, r.offset, r.length): at for at, r in reversed(list(enumerate(batch)))}
        stretches = [stretch for ranges in by_path.values() for stretch in self._stretches(ranges)]
        stretches.sort(key=lambda found: min(first_use[r.path, r.offset, r.length] for r in found[2]))
        for offset, length, ranges in stretches:
            block = self._fetched(ranges[0].path, offset, length, len(ranges))
            for r in ranges:
                self._blocks.setdefault((r.path, r.offset, r.length), []).append(block)

    def _next_batch(self) -> list[FileRange]:
        batch: list[FileRange] = []
        nbytes = 0
        for r in islice(self._ranges, _RANGES_AT_ONCE):
            batch.append(r)
            nbytes += r.length
            if nbytes >= self._batch_bytes:
                break
        return batch

    def _stretches(self, ranges: Sequence[FileRange]) -> list[tuple[int, int, list[FileRange]]]:
        """Offset and length of each read of one file, with the ranges in it."""
        cost = self._inner.cost
        starts = np.array([r.offset for r in ranges], dtype=np.int64)
        lengths = np.array([r.length for r in ranges], dtype=np.int64)
        offset, length, read_of = merge_runs(
            starts, lengths, max_gap_bytes=cost.max_gap_bytes, max_read_bytes=cost.max_read_bytes, split=False
        )
        found: list[tuple[int, int, list[FileRange]]] = [
            (at, n, []) for at, n in zip(offset.tolist(), length.tolist(), strict=True)
        ]
        for r, read in zip(ranges, read_of.tolist(), strict=True):
            found[read][2].append(r)
        return found

    def _fetched(self, path: str, offset: int, length: int, n_wanted: int) -> _Block:
        """A block whose requests are on their way, several where it is long."""
        data = memoryview(bytearray(length))
        step = self._inner.cost.max_read_bytes
        requests = [
            self._pool.submit(self._inner.read_into, path, offset + at, data[at : at + step])
            for at in range(0, length, step)
        ]
        return _Block(offset, data, requests, n_wanted)
