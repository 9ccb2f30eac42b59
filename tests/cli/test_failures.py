from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckpt_tool import errors
from ckpt_tool.cli.app import main

REPOSITORY = Path(__file__).parents[2]
CODES = {
    "NotFound": 3, "FormatError": 3, "UnsafePickle": 3, "Unsupported": 3, "LayoutError": 3, "CoverageError": 3,
    "IntegrityError": 3, "TargetExists": 2, "UsageError": 2, "StorageError": 4, "UnknownTensor": 3, "BadIndex": 2,
}  # fmt: skip


def raising(error: BaseException) -> object:
    """A stand-in for an api function."""

    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def test_every_class_of_error_has_a_status() -> None:
    """The table of this test names every class but the base."""
    assert sorted(CODES) == sorted(set(errors.__all__) - {"CkptError"})


@pytest.mark.parametrize(("name", "code"), CODES.items())
def test_status(name: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each class ends a command with its status; place, message and hint are on stderr."""
    error = getattr(errors, name)("is wrong", where="file:12", hint="do this")
    monkeypatch.setattr("ckpt_tool.api.trust.verify.verify", raising(error))
    assert main(["verify", "A"]) == code
    assert capsys.readouterr() == ("", "error: file:12: is wrong\nhint: do this\n")


def test_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With --json an error is one JSON object on stderr, and stdout is empty."""
    monkeypatch.setattr("ckpt_tool.api.trust.verify.verify", raising(errors.NotFound("nothing", where="run")))
    assert main(["verify", "A", "--json"]) == 3
    printed = capsys.readouterr()
    assert printed.out == ""
    assert json.loads(printed.err) == {
        "schema": "ckpt-tool/error/1",
        "error": {"kind": "not-found", "message": "nothing", "where": "run", "hint": None, "exit_code": 3},
    }


def test_a_negative_number_is_an_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    """No option begins with a digit; where an option takes a number, it gets it."""
    asked: list[tuple[object, ...]] = []

    def record(*args: object, **_: object) -> None:
        asked.append(args)
        raise errors.NotFound("nothing")

    monkeypatch.setattr("ckpt_tool.api.cat.cat", record)
    assert main(["cat", "A", "-1", "--json"]) == 3
    assert main(["cat", "A", "--memory", "-1", "w"]) == 2
    assert asked == [("A", "-1")]


def test_debug_shows_where_it_was_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """With CKPT_DEBUG set, an error raised on purpose keeps its traceback."""
    monkeypatch.setenv("CKPT_DEBUG", "1")
    monkeypatch.setattr("ckpt_tool.api.trust.verify.verify", raising(errors.NotFound("nothing")))
    with pytest.raises(errors.NotFound):
        main(["verify", "A"])


def test_a_bug_is_not_made_pretty(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that nobody raised on purpose passes with its traceback."""
    monkeypatch.setattr("ckpt_tool.api.trust.verify.verify", raising(ValueError("a bug")))
    with pytest.raises(ValueError, match="a bug"):
        main(["verify", "A"])


def test_interruption(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C ends with 130 and no traceback."""
    monkeypatch.setattr("ckpt_tool.api.trust.verify.verify", raising(KeyboardInterrupt()))
    assert main(["verify", "A"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def test_an_interrupted_run_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C while bytes move names --resume."""
    source = tmp_path / "a.safetensors"
    save_file({"w": np.zeros((4, 4), np.float32)}, source)
    monkeypatch.setattr("ckpt_tool.api.convert.conversion.Conversion.run", raising(KeyboardInterrupt()))
    assert main(["export", str(source), str(tmp_path / "out")]) == 130
    hint = "hint: the same command with --resume goes on where this one stopped"
    assert capsys.readouterr().err.splitlines()[-2:] == [hint, "interrupted"]


@pytest.mark.skipif(os.name == "nt", reason="pipes of a POSIX shell")
def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    """Output into ``head`` ends quietly, with the status of a program that got SIGPIPE."""
    source = tmp_path / "many.safetensors"
    save_file({f"layers.{'name' * 20}.{n}": np.zeros(1, np.float32) for n in range(2000)}, source)
    command = (
        f"'{sys.executable}' -m ckpt_tool inspect --flat --limit 0 '{source}' | head -n 1; echo ${{PIPESTATUS[0]}}"
    )
    run = subprocess.run(
        ["bash", "-c", command], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=True
    )
    assert (run.stdout.splitlines(), run.stderr) == ([str(source), "141"], "")


@pytest.mark.skipif(os.name == "nt", reason="redirections of a POSIX shell")
@pytest.mark.parametrize(("closed", "path", "status"), [("0", "a", 0), ("1", "a", 0), ("2", "a", 0), ("2", "b", 3)])
def test_closed_streams(closed: str, path: str, status: int, tmp_path: Path) -> None:
    """A stream that is closed, as a daemon's may be, takes nothing and changes no status."""
    save_file({"w": np.zeros(1, np.float32)}, tmp_path / "a.safetensors")
    command = f"'{sys.executable}' -m ckpt_tool inspect -q '{tmp_path}/{path}.safetensors' {closed}>&-"
    run = subprocess.run(
        ["bash", "-c", command], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
    )
    expected = "w\n" if status == 0 and closed != "1" else ""
    assert (run.returncode, run.stdout, run.stderr) == (status, expected, "")


def test_an_error_may_have_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Lists and stanzas in a message keep their lines; other control characters are shown as escapes."""
    monkeypatch.setattr("ckpt_tool.api.trust.verify.verify", raising(errors.LayoutError("no rule:\n  a\x1b[2J\n  b")))
    assert main(["verify", "A"]) == 3
    assert capsys.readouterr().err == "error: no rule:\n  a\\x1b[2J\n  b\n"


def test_a_terminal_without_such_letters(tmp_path: Path) -> None:
    """Where the output's encoding lacks a character, its escape is printed instead."""
    source = tmp_path / "a.safetensors"
    save_file({"mod\u00e8le.a": np.zeros(1, np.float32), "mod\u00e8le.b": np.zeros(2, np.float32)}, source)
    run = subprocess.run(
        [sys.executable, "-m", "ckpt_tool", "inspect", str(source)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "mod\\xe8le" in run.stdout
