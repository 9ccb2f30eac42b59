"""A journal lists the units of a plan whose bytes are safely in the target, so that a killed run can go on.

One JSON line for the plan, then one per unit. A line is written only after the unit's bytes were flushed to storage,
so what it says can be trusted after a crash of the machine too. A torn last line is ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import astuple
from functools import cached_property
from typing import TYPE_CHECKING

from ckpt_tool.engine.base import CastEffect
from ckpt_tool.errors import UsageError
from ckpt_tool.records import dataclass

if TYPE_CHECKING:
    from ckpt_tool.storage.target import Log  # who loads into a job has records of units, and no target

__all__ = ["Journal", "UnitRecord"]

_VERSION = 4


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
    """Append-only record of one run; the plan's fingerprint is taken when something is written or read.

    ``stamp`` is of the files that are read. A process that is given none leaves them to the one that leads.
    """

    def __init__(
        self,
        log: Log,
        fingerprint: Callable[[], str],
        *,
        where: str,
        has_digests: bool,
        stamp: Callable[[], str] | None = None,
    ) -> None:
        self._log = log
        self._fingerprint = fingerprint
        self._has_digests = has_digests
        self._stamp = stamp
        self._where = where
        self._is_begun = False

    @cached_property
    def _head(self) -> dict[str, object]:
        stamp = None if self._stamp is None else self._stamp()
        return {"version": _VERSION, "plan": self._fingerprint(), "digests": self._has_digests, "read": stamp}

    def load(self) -> Mapping[int, UnitRecord]:
        """Finished units of an earlier run of the same plan; empty when there is no journal.

        Raises:
            UsageError: the journal belongs to another plan, or the source has changed since.
        """
        lines = self._log.read().decode("ascii").split("\n")
        records: dict[int, UnitRecord] = {}
        for number, line in enumerate(lines[:-1]):  # what follows the last newline was torn off
            row = json.loads(line)
            if number == 0:
                self._check(row)
                self._is_begun = True
                continue
            records[row["unit"]] = UnitRecord(
                row["unit"],
                tuple((r, c) for r, c in row["crc32"]),
                tuple((fqn, CastEffect(*effect)) for fqn, *effect in row["casts"]),
                tuple((number, nbytes, linear) for number, nbytes, linear in row["digests"]),
            )
        return records

    def _check(self, head: dict[str, object]) -> None:
        then, now = head.get("read"), self._head["read"]
        if head | {"read": now} != self._head:
            raise UsageError(
                "the unfinished target was begun from another source or with other options", where=self._where,
                hint="repeat the command as it was first given, or start over with --overwrite",
            )  # fmt: skip
        if None not in {then, now} and then != now:
            raise UsageError(
                "files of the source have changed since the unfinished target was begun", where=self._where,
                hint="start over with --overwrite",
            )  # fmt: skip

    def append(self, records: list[UnitRecord]) -> None:
        """Add finished units and make them durable; without any, only say whose journal this is."""
        rows: list[dict[str, object]] = [] if self._is_begun else [self._head]
        rows += [
            {
                "unit": record.unit,
                "crc32": record.crc32,
                "casts": [(fqn, *astuple(effect)) for fqn, effect in record.casts],
                "digests": record.digests,
            }
            for record in records
        ]
        if rows:
            self._log.append("".join(json.dumps(row) + "\n" for row in rows).encode("ascii"))
        self._is_begun = True
