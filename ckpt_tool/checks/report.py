"""A report is the result of a verification: findings in order of harm, and what they were drawn from."""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import FileRange
from ckpt_tool.records import dataclass, field
from ckpt_tool.sizes import shell_word

__all__ = ["LEVELS", "SCHEMA", "FindingGroup", "VerifyReport", "sort_findings"]

SCHEMA = "ckpt-tool/verify/1"
LEVELS = ("quick", "default", "full")
_EXAMPLES = 3
_OF_RANGES = frozenset({"crc-mismatch", "unreadable"})
_NOT_FETCHED = frozenset({"nan", "duplicate-tensor", "different-replicas", "lost-data"})
"""What another copy of the file would have too, and what follows from another finding."""
_MISSED = frozenset({"missing-file", "missing-rank-file", "missing-shard", "no-index", "unreadable-companion"})
"""Warnings about files that another copy may have."""
_OF_FILES = frozenset({
    "cut-file", "empty-file", "missing-file", "missing-metadata", "missing-rank-file", "missing-shard",
    "truncated-file", "unreadable-file", "unsafe-pickle",
})  # fmt: skip
"""About files as wholes: what else is found often comes of these."""
_FOLLOWING = frozenset({"absent-weight", "gap", "lost-data", "missing-object", "missing-tensor"})
"""What tensors and objects lack, which is what something else has done to them."""


@dataclass(frozen=True, slots=True)
class FindingGroup:
    """Findings of one kind and severity, so that thousands of them read as a line."""

    kind: str
    severity: Severity
    count: int
    n_tensors: int
    """Distinct tensors named."""
    files: tuple[tuple[str, int], ...]
    """(path, findings in it), most first; findings without a file are not in it."""
    examples: tuple[Finding, ...]
    """The first few."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What a verification found."""

    url: str
    format: str
    level: str
    """``quick``, ``default`` or ``full``."""
    findings: tuple[Finding, ...]
    """Worst first, causes before what follows from them, then by kind, then by tensor and place."""
    n_tensors: int
    n_chunks: int
    n_files: int
    checked_nbytes: int
    """Payload bytes that were read and looked at; 0 below ``full``."""
    covered_nbytes: int
    """Bytes that a recorded checksum covers and that match it."""
    seconds: float
    unproven_files: tuple[str, ...] = ()
    """At ``full``: files of which no byte has a recorded checksum, those that describe others among them."""
    parts: Mapping[str, FileRange] = field(default_factory=dict)
    """Of coded parts of files that findings are in: the bytes on the storage, length 0 for a whole file."""

    @property
    def is_ok(self) -> bool:
        """Whether no finding is an error."""
        return not any(finding.severity is Severity.ERROR for finding in self.findings)

    def to_fetch(self) -> tuple[FileRange, ...]:
        """Bytes to fetch again, a range by its first byte; length 0 is the whole file, -1 all from the offset on.

        What errors place in a file: a payload's range where its checksum is wrong, the rest of a file that was cut, and
        the whole file for all else; and files that warnings call missing.
        """
        found: dict[str, list[FileRange]] = {}
        for finding in self.findings:
            where = finding.where
            part = None if where is None else self.parts.get(where.path)
            is_meant = finding.severity is Severity.ERROR or finding.kind in _MISSED
            if not is_meant or where is None or finding.kind in _NOT_FETCHED:
                continue
            if where.path.startswith("/") or ".." in where.path.split("/"):
                continue  # whoever acts on the list writes nowhere else
            own = found.setdefault(where.path if part is None else part.path, [])
            if part is not None:
                own.append(part)
            elif finding.kind in _OF_RANGES:
                own.append(where)
            elif finding.kind == "truncated-file" and where.offset:
                own.append(FileRange(where.path, where.offset, -1))
            else:
                own.append(FileRange(where.path, 0, 0))
        stars = [path for path in found if "*" in path]
        for star in stars:  # what is not known of a name, unless it is
            if len(fnmatch.filter(found, star)) > 1:
                del found[star]
        return tuple(each for path in sorted(found) for each in _merged(found[path]))

    @property
    def next_commands(self) -> tuple[str, ...]:
        """What to type next where something is lost: for what to fetch again, and for keeping what is whole."""
        if self.is_ok:
            return ()
        verify = f"ckpt verify {shell_word(self.url)}"
        level = "" if self.level == "default" else f" --{self.level}"
        to_fetch = self.to_fetch()
        is_lost = any(each.kind in _FOLLOWING for each in self.findings if each.severity is Severity.ERROR)
        fetch = (f"{verify}{level} --plan-fetch",) if to_fetch else ()
        return (*fetch, f"{verify} --salvage OUT") if to_fetch or is_lost else ()

    @property
    def counts(self) -> dict[str, int]:
        """Number of findings by severity: ``error``, ``warning``, ``info``."""
        found = Counter(finding.severity for finding in self.findings)
        return {severity.name.lower(): found[severity] for severity in sorted(Severity, reverse=True)}

    def groups(self) -> tuple[FindingGroup, ...]:
        """Findings of equal severity and kind put together, in the order of ``findings``."""
        grouped: dict[tuple[Severity, str], list[Finding]] = {}
        for finding in self.findings:
            grouped.setdefault((finding.severity, finding.kind), []).append(finding)
        return tuple(_group(kind, severity, members) for (severity, kind), members in grouped.items())

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-able values.

        Schema ``ckpt-tool/verify/1``: ``schema url format level ok seconds``, ``counts {error warning info}``,
        ``totals {tensors chunks files checked_nbytes covered_nbytes}``, ``groups[] {kind severity count tensors
        files[] {path count}}`` and ``findings[] {kind severity message fqn file offset length}``, the last four null
        where they do not apply; ``unproven_files[]`` have no byte with a recorded checksum; ``next[]`` are commands for
        what is lost. Later versions only add keys.
        """
        return {
            "schema": SCHEMA,
            "url": self.url,
            "format": self.format,
            "level": self.level,
            "ok": self.is_ok,
            "seconds": round(self.seconds, 3),
            "counts": self.counts,
            "totals": {
                "tensors": self.n_tensors,
                "chunks": self.n_chunks,
                "files": self.n_files,
                "checked_nbytes": self.checked_nbytes,
                "covered_nbytes": self.covered_nbytes,
            },
            "groups": [
                {
                    "kind": group.kind,
                    "severity": group.severity.name.lower(),
                    "count": group.count,
                    "tensors": group.n_tensors,
                    "files": [{"path": path, "count": count} for path, count in group.files],
                }
                for group in self.groups()
            ],
            "findings": [_finding_json(finding) for finding in self.findings],
            "unproven_files": list(self.unproven_files),
            "next": list(self.next_commands),
        }


def sort_findings(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Worst first, then causes, then by kind, tensor, file and byte; what two checks say of one file is kept once."""
    kept: dict[tuple[str, str | None, str | None, int], Finding] = {}
    for finding in findings:
        if finding.kind not in _TOLD_WITH_PLACE or finding.where is not None:
            kept.setdefault(_identity(finding), finding)
    return tuple(sorted(kept.values(), key=_order))


# These are about a whole file: the structure and a reader may both see them, name different tensors, and call them
# differently.
_FILE_KINDS = {
    "missing-file": "missing-file",
    "empty-file": "truncated-file",
    "truncated-file": "truncated-file",
    "cut-file": "truncated-file",
    "stray-file": "stray-file",
    "unknown-file": "stray-file",
}
# These are about one tensor in one file.
_TENSOR_KINDS = frozenset({"item-mismatch", "different-replicas"})
# The full level judges from all bytes what a reader judges from the first ones.
_TIED_KINDS = frozenset({"tied-stored-twice", "tied-but-different"})
# Readers sum these up without a place; the structure tells them pair by pair.
_TOLD_WITH_PLACE = frozenset({"tied-tensors", "overlapping-views"})


def _identity(finding: Finding) -> tuple[str, str | None, str | None, int]:
    path = finding.where.path if finding.where else None
    if finding.kind in _FILE_KINDS and path is not None:
        return _FILE_KINDS[finding.kind], None, path, 0
    if finding.kind in _TIED_KINDS:
        return "tied", finding.fqn, None, 0
    if finding.kind in _TENSOR_KINDS and path is not None:
        return finding.kind, finding.fqn, path, finding.where.offset if finding.where else -1
    return finding.kind, finding.message, path, finding.where.offset if finding.where else -1


def _order(finding: Finding) -> tuple[int, int, str, str, str, int]:
    where = finding.where
    return (
        -finding.severity,
        (finding.kind in _FOLLOWING) - (finding.kind in _OF_FILES),
        finding.kind,
        finding.fqn or "",
        where.path if where else "",
        where.offset if where else -1,
    )


def _group(kind: str, severity: Severity, members: list[Finding]) -> FindingGroup:
    files = Counter(finding.where.path for finding in members if finding.where is not None)
    return FindingGroup(
        kind=kind,
        severity=severity,
        count=len(members),
        n_tensors=len({finding.fqn for finding in members if finding.fqn is not None}),
        files=tuple(files.most_common()),
        examples=tuple(members[:_EXAMPLES]),
    )


def _finding_json(finding: Finding) -> dict[str, Any]:
    where = finding.where
    return {
        "kind": finding.kind,
        "severity": finding.severity.name.lower(),
        "message": finding.message,
        "fqn": finding.fqn,
        "file": where.path if where else None,
        "offset": where.offset if where else None,
        "length": where.length if where else None,
    }


def _merged(ranges: Iterable[FileRange]) -> Iterator[FileRange]:
    """Ranges of one file that touch put together; the whole file alone where it is among them."""
    ordered = sorted(ranges, key=lambda each: (each.length != 0, each.offset))
    if ordered[0].length == 0:
        yield ordered[0]
        return
    pending = ordered[0]
    for each in ordered[1:]:
        if pending.length < 0:
            break
        if each.offset > pending.end:
            yield pending
            pending = each
        else:
            end = max(pending.end, each.end)
            pending = FileRange(each.path, pending.offset, -1 if each.length < 0 else end - pending.offset)
    yield pending
