"""``ckpt ls`` as a person and as a job script use it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from ckpt_tool.api.runs.ls import RunListing, RunStep, Tracker
from ckpt_tool.cli.app import main
from ckpt_tool.cli.render_ls import age, run_lines
from tests.api.runs import titan
from tests.cli.synthetic import text


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two complete steps and a newer one that is not."""
    titan(tmp_path, "step-10", "step-20", "step-30")
    (tmp_path / "step-30/.metadata").unlink()
    return tmp_path


def step(number: int, *problems: str, **fields: object) -> RunStep:
    """A step of 1 KiB."""
    path = f"step-{number}"
    parts = (("", "dcp"),)
    return RunStep(path, f"run/{path}", number, parts, problems, "4 ranks", 1024, 5, 1000.0 * number, **fields)  # type: ignore[arg-type]


def test_table() -> None:
    """A line for each step, reasons below, what the tracker says, and the newest complete step."""
    tracker = Tracker("latest", "step-1", "names step-1; newer and not complete: step-3")
    found = RunListing("run", (step(1), step(2, verified="full"), step(3, "no .metadata")), (tracker,), ())
    assert text(run_lines(found, now=7200.0, width=100)).splitlines() == [
        "run  3 steps",
        "",
        "  step  state                     size  age  format  layout   path",
        "     1  complete              1.00 KiB  1 h  dcp     4 ranks  step-1",
        "     2  complete, full check  1.00 KiB  1 h  dcp     4 ranks  step-2",
        "     3  incomplete            1.00 KiB  1 h  dcp     4 ranks  step-3",
        "      - no .metadata",
        "",
        "latest names step-1; newer and not complete: step-3",
        "",
        "newest complete: run/step-2",
    ]


def test_age() -> None:
    """In the largest unit that fits."""
    assert [age(n) for n in (0, 59, 60, 3599, 3600, 86399, 86400 * 400)] == [
        "0 s", "59 s", "1 min", "59 min", "1 h", "23 h", "400 d"
    ]  # fmt: skip


def test_listed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table ends with the step to use."""
    now = time.time()
    for path in (run / "step-20").iterdir():
        os.utime(path, (now - 7300, now - 7300))
    assert main(["ls", str(run)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == f"newest complete: {run}/step-20"
    assert any("2 h" in line and "step-20" in line for line in printed)
    assert any(line.strip() == "- no .metadata: its save did not end" for line in printed)


def test_latest(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--latest`` prints a path and nothing else; nothing and status 1 where none is complete."""
    assert main(["ls", str(run), "--latest"]) == 0
    assert capsys.readouterr().out == f"{run}/step-20\n"
    for name in ("step-10", "step-20"):
        (run / name / ".metadata").unlink()
    assert main(["ls", str(run), "--latest"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == f"error: {run}: none of 3 steps is complete\n"


def test_latest_of_several_runs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where steps of several folders are listed together, the newest of them comes with a note beside it."""
    (run / "a").mkdir()
    (run / "b").mkdir()
    (run / "step-10").rename(run / "a" / "step-10")
    (run / "step-20").rename(run / "b" / "step-20")
    (run / "step-30").rename(run / "b" / "step-30")
    assert main(["ls", str(run), "--latest"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{run}/b/step-20\n"
    assert printed.err == "note: steps of 2 folders are listed together: a, b; give one for its own newest\n"
    assert main(["ls", str(run), "--latest", "--quiet"]) == 0
    assert capsys.readouterr() == (f"{run}/b/step-20\n", "")


def test_clean_of_a_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file is told from a folder that is not there."""
    for path, said in ((run / "step-20" / ".metadata", "a file, expected the folder of a run"), (run / "x", "no such")):
        assert main(["clean", str(path)]) == 3
        assert capsys.readouterr().err.startswith(f"error: {path}: {said}")


def test_latest_of_a_run_without_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job's first start finds an empty run folder: status 1 as for none complete; a table of it is status 3."""
    (tmp_path / "notes.md").write_text("x")
    assert main(["ls", str(tmp_path), "--latest"]) == 1
    assert capsys.readouterr() == ("", f"error: {tmp_path}: no step is there yet\n")
    assert main(["ls", str(tmp_path), "--latest", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["latest"] is None
    assert main(["ls", str(tmp_path)]) == 3


def test_json_and_quiet(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For programs and for scripts."""
    assert main(["ls", str(run), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["latest"]) == ("ckpt-tool/ls/1", f"{run}/step-20")
    assert [each["complete"] for each in document["steps"]] == [True, True, False]
    assert main(["ls", str(run), "--quiet"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"complete {run}/step-10", f"complete {run}/step-20", f"incomplete {run}/step-30"
    ]  # fmt: skip


def test_verify(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--verify`` says the level beside each step, and an unknown level ends with 2."""
    assert main(["ls", str(run), "--verify", "quick"]) == 0
    assert capsys.readouterr().out.count("complete, quick check") == 2
    assert main(["ls", str(run), "--verify", "deep"]) == 2
