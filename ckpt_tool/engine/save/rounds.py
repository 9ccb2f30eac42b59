"""A round is one save at one node of the control tree: reports of its ranks come in, one report goes up.

Pure: no sockets, no clock, no files. What it means that a report says ``done`` or ``plan`` is decided at the root.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ckpt_tool.engine.save.wire import Message
from ckpt_tool.records import dataclass, field

__all__ = ["PlanEntry", "Report", "Round"]


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """One rank's structure, unknown so far."""

    key: str
    """Its fingerprint."""
    names: str
    """Digest of its names, which travel once however many ranks have them."""
    boxes: bytes


@dataclass(slots=True)
class Report:
    """What a part of the tree says of a save."""

    done: list[dict[str, Any]] = field(default_factory=list)
    """One for each rank whose files are durable."""
    plans: dict[int, PlanEntry] = field(default_factory=dict)
    """Ranks that wait to hear what they are to write."""
    names: dict[str, bytes] = field(default_factory=dict)
    """Encoded names by digest."""
    error: dict[str, Any] | None = None
    """Why the save cannot succeed; it makes the rest meaningless."""

    def merge(self, other: Report) -> None:
        """Take in what another part says."""
        self.done += other.done
        self.plans |= other.plans
        self.names |= other.names
        self.error = self.error or other.error

    def to_message(self, number: int) -> Message:
        """As it goes up."""
        blobs = [*self.names.values(), *(plan.boxes for plan in self.plans.values())]
        fields = {
            "save": number,
            "done": self.done,
            "plans": [[rank, plan.key, plan.names, len(plan.boxes)] for rank, plan in self.plans.items()],
            "names": [[digest, len(data)] for digest, data in self.names.items()],
            "error": self.error,
        }
        return Message("report", fields, b"".join(blobs))

    @classmethod
    def from_message(cls, message: Message) -> Report:
        """What ``to_message`` gave."""
        fields, body, at = message.fields, bytes(message.body), 0
        report = cls(fields["done"], error=fields["error"])
        for digest, nbytes in fields["names"]:
            report.names[digest] = body[at : at + nbytes]
            at += nbytes
        for rank, key, names, nbytes in fields["plans"]:
            report.plans[rank] = PlanEntry(key, names, body[at : at + nbytes])
            at += nbytes
        return report


class Round:
    """The state of one save at a node: which of its sources (itself and its children) have reported."""

    def __init__(self, sources: Iterable[int]) -> None:
        self._reports: dict[int, Report | None] = dict.fromkeys(sources)

    @property
    def waiting(self) -> list[int]:
        """Sources that have not reported."""
        return [source for source, report in self._reports.items() if report is None]

    def told_by(self, source: int) -> set[int]:
        """Ranks of whose unknown structure a source has told."""
        report = self._reports[source]
        return set() if report is None else set(report.plans)

    def add(self, source: int, report: Report) -> Report | None:
        """Take a report in; returns the joint one once all are there, or at once if something failed."""
        self._reports[source] = report
        if report.error is not None:
            return Report(error=report.error)
        if self.waiting:
            return None
        joint = Report()
        for each in self._reports.values():
            joint.merge(each or Report())
        return joint

    def reopen(self, ranks: Iterable[int]) -> None:
        """Sources that told of these planning ranks; they will report once more, of all ranks that they speak for."""
        wanted = set(ranks)
        for source, report in self._reports.items():
            if report is not None and wanted & report.plans.keys():
                self._reports[source] = None
