"""Small files beside an unfinished target in a place for parts: logs, and notes by which processes find each other."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckpt_tool.storage.fetch import fetch_all
from ckpt_tool.storage.parts.place import PartPlace
from ckpt_tool.storage.parts.uploads import N_UPLOADS
from ckpt_tool.storage.unfinished import JOURNAL_NAME

__all__ = ["PartLog", "PartNotes"]

_NUMBER = re.compile(r"\d{8}")


class PartLog:
    """A log in files of their own below ``folder``, for storage that does not append.

    Args:
        place: where the target is.
        folder: of this log alone.
        found: paths of files of the target that are there.
    """

    def __init__(self, place: PartPlace, folder: str, found: Iterable[str]) -> None:
        self._place = place
        self._folder = folder
        start = len(folder) + 1
        self._paths = sorted(path for path in found if path.startswith(f"{folder}/") and _NUMBER.fullmatch(path, start))

    def read(self) -> bytes:
        """All that was appended; nothing at first."""
        found = fetch_all(self._place.get, self._paths, concurrency=N_UPLOADS)
        return b"".join(data or b"" for data in found)

    def append(self, data: bytes) -> None:
        """Add ``data``, which is durable then."""
        number = int(self._paths[-1].rpartition("/")[2]) + 1 if self._paths else 0
        path = f"{self._folder}/{number:08d}"
        self._place.put(path, data)
        self._paths.append(path)

    def delete(self, *, keep: int = 0) -> None:
        """Begin anew, or with ``keep`` after the first so many additions."""
        fetch_all(self._place.delete, self._paths[keep:], concurrency=N_UPLOADS)
        self._paths = self._paths[:keep]


class PartNotes:
    """Notes by name; each is written by one process."""

    def __init__(self, place: PartPlace) -> None:
        self._place = place

    def put(self, name: str, data: bytes) -> None:
        """Write a note, or write it anew."""
        self._place.put(f"{JOURNAL_NAME}/{name}", data)

    def get(self, name: str) -> bytes | None:
        """What it says, None where there is none."""
        return self._place.get(f"{JOURNAL_NAME}/{name}")
