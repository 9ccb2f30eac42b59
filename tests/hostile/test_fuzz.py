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
from tests.hostile.spread import all_shares

REPOSITORY = Path(__file__).parents[2]
SEED, N = 20, 500


def test_damaged_files(tmp_path: Path) -> None:
    """No traceback, no undocumented status, nothing slow or large, nothing run, no damage that is called whole."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])}
    argv = [sys.executable, "-m", "tests.hostile.fuzz", str(SEED), str(N)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=environment, cwd=REPOSITORY)
    assert [json.loads(line) for line in done.stdout.splitlines()] == []
    assert done.stderr.splitlines()[-1].startswith(f"{N} of {N} mutated files (")
    assert done.returncode == 0


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
    found: list[dict[str, Any]] = []
    assert fuzz.run(1, range(8), ("torch/dcp_zstd",), found.append) > 0
    assert any(line["what"].startswith(said) for line in found)


def test_the_fuzzer_sees_what_is_called_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A verification that is content with everything is found out."""
    monkeypatch.setattr(fuzz, "verify", lambda *args, **kwargs: _Fine())
    monkeypatch.setattr(fuzz, "COMMANDS", ("whole",))
    found: list[dict[str, Any]] = []
    assert fuzz.run(3, range(60), ("torch/verl_2d",), found.append) > 0
    assert found[0]["what"].startswith("called whole")


_SHARE = """
import json, os, signal, sys, time
for number in range(int(sys.argv[1]), 8, int(sys.argv[2])):
    told = {"number": number, "fixture": "a", "file": str(number), "command": "ls"}
    print(json.dumps(told), flush=True)
    if number == 2:
        os.kill(os.getpid(), signal.SIGSEGV)
    if number == 5:
        time.sleep(600)
    print(json.dumps({**told, "answer": "status 0", "seconds": number / 8, "peak_bytes": number << 20}), flush=True)
"""


def test_a_process_that_dies_or_hangs_is_a_finding() -> None:
    """The other trials are made nevertheless, each once, and the counts say so."""
    found: list[str] = []
    tally = all_shares(
        8, 2, lambda *numbers: [sys.executable, "-c", _SHARE, *map(str, numbers)], found.append, hangs_s=2
    )
    said = {line["number"]: line["what"] for line in map(json.loads, found)}
    assert said[2].startswith("the process died with SIGSEGV")
    assert said[5].startswith("the process died with SIGKILL")
    assert tally.answers == {"status 0": 6, "SIGSEGV": 1, "SIGKILL": 1}
    assert str(tally).startswith("8 of 8 mutated files (8 files of 1 fixtures), 2 findings; ")
    assert "longest call 0.9 s (7, 'ls' of a/7); peak memory 7 MiB" in str(tally)
