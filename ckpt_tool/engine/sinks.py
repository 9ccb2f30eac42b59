"""Sinks put the engine's pieces and the writer's segments into a target, in the order that the target can take."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Protocol

from ckpt_tool.formats.base import Segment
from ckpt_tool.storage.target import Target

__all__ = ["OrderedSink", "RandomSink", "Sink"]

_JOINED_NBYTES = 1 << 20
"""Segments are joined until there are so many bytes; larger ones gain nothing from it."""


class Sink(Protocol):
    """Where payload and segments of one run go."""

    def write(self, path: str, offset: int, data: memoryview) -> None:
        """Put payload at byte ``offset`` of ``path``; the buffer is reused after the call."""
        ...

    def finish(self, segments: Iterable[Segment]) -> None:
        """Put everything that is not payload, after the last ``write``."""
        ...


class RandomSink:
    """For targets that take bytes at any offset: headers go last, so that an unfinished file never reads as whole."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def write(self, path: str, offset: int, data: memoryview) -> None:
        """Put payload at its place at once."""
        self._target.write(path, offset, data)

    def finish(self, segments: Iterable[Segment]) -> None:
        """Put the segments in the given order, those that follow each other in a file at once."""
        path, start, pending = "", 0, bytearray()
        for segment in segments:
            if segment.path != path or segment.offset != start + len(pending) or len(pending) > _JOINED_NBYTES:
                if pending:
                    self._target.write(path, start, pending)
                path, start, pending = segment.path, segment.offset, bytearray()
            pending += segment.data
        if pending:
            self._target.write(path, start, pending)


class OrderedSink:
    """For targets without seek: each file is written from its first byte to its last.

    Payload must come in ascending order per file, as the tiles of a plan do; the segments known beforehand are put in
    between, and gaps (alignment) are filled with zeros. What an interrupted run has written is not written again.
    """

    def __init__(self, target: Target, segments: Iterable[Segment]) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._position: dict[str, int] = {}
        self._starts: dict[str, int] = {}
        self._pending: dict[str, list[Segment]] = {}
        for segment in sorted(segments, key=lambda s: (s.path, -s.offset)):
            self._pending.setdefault(segment.path, []).append(segment)

    def write(self, path: str, offset: int, data: memoryview) -> None:
        """Put payload after the segments that lie before it."""
        with self._lock:
            self._put_segments(path, before=offset)
            self._put(path, offset, data)

    def finish(self, segments: Iterable[Segment]) -> None:
        """Put what is left; ``segments`` repeats those given before and adds none that lie before payload."""
        with self._lock:
            for path in list(self._pending):
                self._put_segments(path, before=None)
            for segment in segments:
                position, start = self._position_of(segment.path)
                is_cut = position == start and segment.offset + len(segment.data) > start
                if segment.offset >= position or is_cut:
                    self._put(segment.path, segment.offset, segment.data)

    def _put_segments(self, path: str, before: int | None) -> None:
        pending = self._pending.get(path, [])
        while pending and (before is None or pending[-1].offset < before):
            segment = pending.pop()
            self._put(path, segment.offset, segment.data)

    def _put(self, path: str, offset: int, data: bytes | memoryview) -> None:
        position, start = self._position_of(path)
        if offset < start:
            data = data[start - offset :]
            offset = start
        if not data:
            return
        if offset > position:
            self._target.write(path, position, bytes(offset - position))
        self._target.write(path, offset, data)
        self._position[path] = offset + len(data)

    def _position_of(self, path: str) -> tuple[int, int]:
        """Where the file ends now, and where this run began to write it."""
        if path not in self._starts:
            self._starts[path] = self._position[path] = self._target.start_of(path)
        return self._position[path], self._starts[path]
