"""A journal lists the units of a plan whose bytes are safely in the target, so that a killed run can go on.

One JSON line for the plan, then one per unit. A line is written only after the unit's bytes were flushed to storage,
so what it says can be trusted after a crash of the machine too. A torn last line is ignored.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

from ckpt_tool.engine.base import CastEffect
from ckpt_tool.errors import UsageError

__all__ = ["Journal", "UnitRecord"]

_VERSION = 3


@dataclass(frozen=True, slots=True)
class UnitRecord:
    """What must be remembered of a finished unit."""

    unit: int
    crc32: tuple[tuple[int, int], ...]
    """(row of the plan's writes, CRC-32 of its bytes)."""
    casts: tuple[tuple[str, CastEffect], ...]
    """By fqn, what the cast did to the elements of the unit."""
    digests: tuple[tuple[int, int, int], ...] = ()
    """What the unit adds to digests, where they are taken; see ``tile_digests``."""


class Journal:
    """Append-only record of one run."""

    def __init__(self, path: Path, fingerprint: str, *, has_digests: bool = False) -> None:
        self._path = path
        self._head = {"version": _VERSION, "plan": fingerprint, "digests": has_digests}

    def load(self) -> Mapping[int, UnitRecord]:
        """Finished units of an earlier run of the same plan; empty when there is no journal.

        Raises:
            UsageError: the journal belongs to another plan.
        """
        if not self._path.exists():
            return {}
        lines = self._path.read_text(encoding="ascii").split("\n")
        records: dict[int, UnitRecord] = {}
        for number, line in enumerate(lines[:-1]):  # what follows the last newline was torn off
            row = json.loads(line)
            if number == 0:
                if row != self._head:
                    raise UsageError(
                        "the unfinished target was begun from another source or with other options",
                        where=str(self._path.parent),
                        hint="repeat the command as it was first given, or start over with --overwrite",
                    )
                continue
            records[row["unit"]] = UnitRecord(
                row["unit"],
                tuple((r, c) for r, c in row["crc32"]),
                tuple((fqn, CastEffect(*effect)) for fqn, *effect in row["casts"]),
                tuple((number, nbytes, linear) for number, nbytes, linear in row["digests"]),
            )
        return records

    def append(self, records: list[UnitRecord]) -> None:
        """Add finished units and make them durable."""
        is_new = not self._path.exists()
        with self._path.open("a", encoding="ascii") as file:
            if is_new:
                file.write(json.dumps(self._head) + "\n")
            for record in records:
                row = {
                    "unit": record.unit,
                    "crc32": record.crc32,
                    "casts": [(fqn, *astuple(effect)) for fqn, effect in record.casts],
                    "digests": record.digests,
                }
                file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
