"""A finding is one thing that is wrong, or worth knowing, about a checkpoint."""

from __future__ import annotations

from enum import IntEnum

from ckpt_tool.manifest.model import FileRange
from ckpt_tool.records import dataclass

__all__ = ["Finding", "Severity"]


class Severity(IntEnum):
    """How much harm a finding means, worst last."""

    INFO = 0
    """Worth knowing; nothing is wrong."""
    WARNING = 1
    """Suspicious, or not provable from the files."""
    ERROR = 2
    """Data is missing, contradictory or damaged."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact about a checkpoint, with its place."""

    kind: str
    """Stable identifier in kebab case: ``missing-file``, ``gap``, ``crc-mismatch`` ..."""
    severity: Severity
    message: str
    """A sentence: what is wrong, expected and got."""
    fqn: str | None = None
    where: FileRange | None = None
    """File and bytes concerned, if it has a place."""
