"""Damaged files get an answer, in time and within memory, and nothing in them runs; ``make fuzz`` tries 10,000."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.hostile import fuzz

REPOSITORY = Path(__file__).parents[2]
SEED, N = 20, 500


def test_damaged_files(tmp_path: Path) -> None:
    """No traceback, no undocumented status, nothing slow or large, nothing run, no damage that is called whole."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])}
    argv = [sys.executable, "-m", "tests.hostile.fuzz", str(SEED), str(N)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=environment, cwd=REPOSITORY)
    assert [json.loads(line) for line in done.stdout.splitlines()] == []
    assert (done.returncode, done.stderr) == (0, "")


def _fails(*args: Any, **kwargs: Any) -> int:
    raise KeyError("no answer")


def _odd(*args: Any, **kwargs: Any) -> int:
    return 7


def _runs(*args: Any, **kwargs: Any) -> int:
    os.system("true")
    return 0


class _Fine:
    """A report that finds nothing."""

    is_ok = True
    findings = ()


@pytest.mark.parametrize(("fake", "said"), [(_fails, "a traceback"), (_odd, "status 7"), (_runs, "ran os.system")])
def test_the_fuzzer_sees_what_it_looks_for(fake: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug of each kind, put in on purpose, is reported."""
    monkeypatch.setattr(fuzz, "main", fake)
    found: list[str] = []
    assert fuzz.run(1, 8, ("torch/dcp_zstd",), found.append) > 0
    assert any(json.loads(line)["what"].startswith(said) for line in found)


def test_the_fuzzer_sees_what_is_called_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verification that is content with everything is found out."""
    monkeypatch.setattr(fuzz, "verify", lambda *args, **kwargs: _Fine())
    monkeypatch.setattr(fuzz, "COMMANDS", ("whole",))
    found: list[str] = []
    assert fuzz.run(3, 60, ("torch/verl_2d",), found.append) > 0
    assert json.loads(found[0])["what"].startswith("called whole")
