"""A log in a local file."""

from __future__ import annotations

import os

__all__ = ["FileLog"]


class FileLog:
    """Bytes that are added to, durable once ``append`` returns. The file appears with the first."""

    def __init__(self, path: str) -> None:
        self._path = path

    def read(self) -> bytes:
        """All that was appended; nothing at first."""
        try:
            with open(self._path, "rb") as file:
                return file.read()
        except FileNotFoundError:
            return b""

    def append(self, data: bytes) -> None:
        """Add ``data`` and wait until it is on the device."""
        with open(self._path, "ab") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
