"""A place takes files in parts: each part is uploaded whole, and when all are there they are joined to the file.

Parts outlive the process that sent them, so a killed run can go on. Protocol and records only; knows no checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from ckpt_tool.records import dataclass, field
from ckpt_tool.storage.target import Bytes

__all__ = ["Begun", "Part", "PartLimits", "PartPlace"]


@dataclass(frozen=True, slots=True)
class PartLimits:
    """What parts may be like."""

    min_bytes: int
    """Of every part but a file's last."""
    usual_bytes: int
    """Long enough to hide the latency, short enough to send again."""
    max_parts: int
    multiple: int = 1
    """The length of every part but a file's last is a multiple of this."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part that the storage has."""

    nbytes: int
    tag: str
    """What the storage calls it."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A file that was begun and not joined."""

    token: str
    """What the storage calls it."""
    parts: Mapping[int, Part] = field(default_factory=dict)
    """By number, from 1."""
    modified: float | None = None
    """When the last part came, or it was begun, seconds since 1970; None where the storage does not tell."""


class PartPlace(Protocol):
    """Files below one final name; the path ``""`` is the one file of that name itself.

    Safe to use from several threads. Every call tries again what may pass.
    """

    url: str
    limits: PartLimits
    is_named_last: bool
    """Whether ``finish`` gives everything its final name in one step, so that nothing of it is seen before."""

    def old_files(self) -> Sequence[str]:
        """Paths of what is under the final name now, files of an unfinished target that were joined among them."""
        ...

    def look(self) -> tuple[Sequence[str], dict[str, int]]:
        """``old_files`` and ``files`` at once."""
        ...

    def old_head(self, length: int) -> bytes | None:
        """The first bytes of a file of the final name itself, all of a shorter one; None where there is none.

        Raises:
            UsageError: a folder has the name.
        """
        ...

    def files(self) -> dict[str, int]:
        """Size of each whole file of this target, control files included."""
        ...

    def begun(self) -> dict[str, Begun]:
        """Files in parts; of several beginnings of one file the one with most parts, the others are dropped."""
        ...

    def under_way(self) -> list[tuple[str, Begun]]:
        """Path of every beginning, several of one file among them; none is dropped."""
        ...

    def begin(self, path: str) -> str:
        """Begin a file; returns its token."""
        ...

    def put_part(self, path: str, token: str, number: int, data: Bytes) -> str:
        """Send one part, from 1; returns its tag. Sending it again replaces it."""
        ...

    def join(self, path: str, token: str, parts: Mapping[int, Part], *, is_new: bool) -> bool:
        """Make one file of the parts; with ``is_new`` only where there is none, and False tells that one is there."""
        ...

    def drop(self, path: str, token: str) -> None:
        """Let go of a file's parts."""
        ...

    def put(self, path: str, data: Bytes, *, is_new: bool = False) -> bool:
        """Write a small file at once; ``is_new`` as in ``join``."""
        ...

    def get(self, path: str) -> bytes | None:
        """Content of a small file, None where there is none."""
        ...

    def delete(self, path: str) -> None:
        """Remove a file of this target, if it is there."""
        ...

    def clear(self) -> None:
        """Remove what is left of a target of which nothing is kept, as empty folders."""
        ...

    def finish(self, *, replace: bool) -> None:
        """Give everything its final name, where that is a step of its own; ``replace`` what has it."""
        ...

    def close(self) -> None:
        """Release connections."""
        ...
