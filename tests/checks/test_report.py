"""Reports: order, groups and JSON."""

from __future__ import annotations

import json

import pytest

from ckpt_tool.api.trust.verify import verify
from ckpt_tool.checks.report import VerifyReport, sort_findings
from ckpt_tool.cli.render_findings import report_lines
from ckpt_tool.cli.text import plain
from ckpt_tool.errors import UsageError
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import FileRange


def report_of(findings: list[Finding]) -> VerifyReport:
    """A report with these findings."""
    return VerifyReport("u", "dcp", "full", sort_findings(findings), 3, 4, 2, 100, 90, 0.5)


MANY = [
    *(Finding("gap", Severity.ERROR, f"gap {i}", f"t{i % 100}") for i in range(6000)),
    *(Finding("crc-mismatch", Severity.ERROR, f"m{i}", "t", FileRange(f"f{i % 7}", i, 8)) for i in range(3997)),
    Finding("tied-tensors", Severity.INFO, "tied", "b", FileRange("f1", 0, 8)),
    Finding("mixed-steps", Severity.WARNING, "steps"),
    Finding("replicas", Severity.INFO, "two"),
]


def test_ten_thousand_findings_read_as_five_lines() -> None:
    """One group for each kind, worst first, with counts and files."""
    report = report_of(MANY)
    assert len(report.findings) == 10_000
    groups = report.groups()
    assert [(g.kind, g.severity, g.count, g.n_tensors) for g in groups] == [
        ("crc-mismatch", Severity.ERROR, 3997, 1),
        ("gap", Severity.ERROR, 6000, 100),
        ("mixed-steps", Severity.WARNING, 1, 0),
        ("replicas", Severity.INFO, 1, 0),
        ("tied-tensors", Severity.INFO, 1, 1),
    ]
    assert groups[0].files == tuple((f"f{i}", 571) for i in range(7))
    assert [len(g.examples) for g in groups] == [3, 3, 1, 1, 1]
    assert report.counts == {"error": 9997, "warning": 1, "info": 2}


def test_only_errors_make_it_not_ok() -> None:
    """Warnings are for a person to judge."""
    assert not report_of(MANY).is_ok
    assert report_of([f for f in MANY if f.severity is not Severity.ERROR]).is_ok
    assert report_of([]).is_ok


def test_what_two_checks_say_of_one_file_is_kept_once() -> None:
    """The structure and a reader see the same missing file; the first to say so is kept."""
    where = FileRange("a", 0, 0)
    first = Finding("missing-file", Severity.ERROR, "holds w", "w", where)
    again = Finding("missing-file", Severity.ERROR, "not here", None, FileRange("a", 0, 9))
    other = Finding("missing-file", Severity.ERROR, "not here", None, FileRange("b", 0, 9))
    assert sort_findings([first, again, other]) == (other, first)
    cut = Finding("cut-file", Severity.ERROR, "short", None, FileRange("c", 3, 1))
    assert sort_findings([Finding("truncated-file", Severity.ERROR, "short", "w", FileRange("c", 3, 1)), cut])[1:] == ()


def test_json() -> None:
    """The documented keys, as plain JSON."""
    report = report_of([Finding("gap", Severity.ERROR, "hole", "w"), MANY[6000]])
    found = json.loads(json.dumps(report.to_json()))
    assert found["schema"] == "ckpt-tool/verify/1"
    assert list(found) == [
        "schema",
        "url",
        "format",
        "level",
        "ok",
        "seconds",
        "counts",
        "totals",
        "groups",
        "findings",
        "unproven_files",
        "next",
    ]
    assert found["totals"] == {"tensors": 3, "chunks": 4, "files": 2, "checked_nbytes": 100, "covered_nbytes": 90}
    assert found["ok"] is False
    assert found["findings"] == [
        {
            "kind": "crc-mismatch",
            "severity": "error",
            "message": "m0",
            "fqn": "t",
            "file": "f0",
            "offset": 0,
            "length": 8,
        },
        {
            "kind": "gap",
            "severity": "error",
            "message": "hole",
            "fqn": "w",
            "file": None,
            "offset": None,
            "length": None,
        },
    ]
    assert found["groups"][0] == {
        "kind": "crc-mismatch",
        "severity": "error",
        "count": 1,
        "tensors": 1,
        "files": [{"path": "f0", "count": 1}],
    }


def test_causes_come_before_what_follows_from_them() -> None:
    """Who reads the first lines learns what happened; within one severity only."""
    place = FileRange("a", 0, 0)
    found = [
        Finding("gap", Severity.ERROR, "hole", "v"),
        Finding("lost-data", Severity.ERROR, "lost", "w", FileRange("a", 0, 8)),
        Finding("crc-mismatch", Severity.ERROR, "flipped", "u", FileRange("b", 0, 8)),
        Finding("missing-shard", Severity.WARNING, "shard"),
        Finding("unreadable-file", Severity.ERROR, "no zip", where=FileRange("c", 0, 0)),
        Finding("missing-file", Severity.ERROR, "gone", "w", place),
    ]
    assert [each.kind for each in sort_findings(found)] == [
        "missing-file", "unreadable-file", "crc-mismatch", "gap", "lost-data", "missing-shard",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("findings", "level", "commands"),
    [
        ([Finding("missing-file", Severity.ERROR, "gone", "w", FileRange("a", 0, 0))], "full",
         ["ckpt verify 'my run' --full --plan-fetch", "ckpt verify 'my run' --salvage OUT"]),
        ([Finding("gap", Severity.ERROR, "hole", "w")], "default", ["ckpt verify 'my run' --salvage OUT"]),
        ([Finding("mixed-steps", Severity.ERROR, "steps")], "default", []),
        ([Finding("missing-shard", Severity.WARNING, "gone", None, FileRange("a", 0, 0))], "default", []),
    ],
    ids=["file", "nothing-to-fetch", "nothing-lost", "warning"],
)  # fmt: skip
def test_what_to_type_next(findings: list[Finding], level: str, commands: list[str]) -> None:
    """Commands for what is lost, at the level that found it; the same in the text and in JSON."""
    report = VerifyReport("my run", "dcp", level, sort_findings(findings), 3, 4, 2, 100, 90, 0.5)
    assert report.to_json()["next"] == commands
    shown = [plain(each) for each in report_lines(report, width=120, limit=3)]
    assert [text for text in shown if text.startswith("next: ")] == [f"next: {command}" for command in commands]


def test_unknown_level() -> None:
    """A level is one of three."""
    with pytest.raises(UsageError, match="'deep' is no level of verification, expected one of quick, default, full"):
        verify("anywhere", level="deep")
