"""The table of formats: what is read, what is written, and what each was proven with.

A proof names a program and its version, and is a test of this repository: a bundled checkpoint that the program wrote
and that is read bit for bit, or a target that the program opens. What has no proof has none here either.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ckpt_tool.formats.registry import readers, writer_names

__all__ = ["FormatRow", "format_rows"]


@dataclass(frozen=True, slots=True)
class FormatRow:
    """One format."""

    name: str
    reads: bool
    writes: bool
    what: str
    """What people call it."""
    proven: tuple[str, ...] = ()
    """Each a direction, a program and its version."""

    def to_json(self) -> dict[str, Any]:
        """The fields."""
        return asdict(self)


_FACTS: dict[str, tuple[str, tuple[str, ...]]] = {}


def format_rows() -> tuple[FormatRow, ...]:
    """Formats of this package, then those of installed extensions, as they are registered."""
    read = [reader.name for reader in readers()]
    written = writer_names()
    return tuple(
        FormatRow(name, name in read, name in written, *_FACTS.get(name, ("extension", ())))
        for name in dict.fromkeys((*read, *written))
    )
