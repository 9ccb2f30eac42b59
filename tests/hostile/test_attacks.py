"""Files made to harm whoever opens them: nothing in them runs, nothing outside is read, the answer says what it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]

# Strange, and nothing wrong with them: a name that means nothing here, nesting, repetition, names of members.
HARMLESS = {
    "torch.storage._get_dtype_from_pickle_storage_type", "deep nesting", "billion laughs", "self-reference",
    "path traversal", "deflate bomb", "calls functools.partial",
}  # fmt: skip
PARTLY = {"index, parent", "index, absolute", "index, in and out", "zip64 record elsewhere"}
SAID = {
    "os.system": "neither imported nor called",
    "eval": "neither imported nor called",
    "getattr chain": "reaches a module that can run code through another",
    "INST": "neither imported nor called",
    "OBJ": "neither imported nor called",
    "NEWOBJ_EX": "subprocess.Popen",
    "memo bomb": "memo index 2,147,483,647",
    "huge LONG4": "2,147,483,647 bytes is claimed",
    "persistent id of text": "names no storage",
    "zip64 mismatch, size": "the end records differ",
    "zip64 mismatch, offset": "the end records differ",
    "zip64 mismatch, members": "no ZIP64 record here",
    "zip64 record elsewhere": "",
    "calls builtins.getattr": "missing 1 required positional argument",
    "calls functools.partial": "",
    "calls torch.serialization.os.system": "reaches a module that can run code through another",
    "a call in what follows the end": "bytes follow the pickle",
    "overlapping members": "ends at byte",
    "duplicate names": "the name of another",
    "overlap": "before 'a' ends",
    "duplicate keys": "'a' is listed twice",
    "NaN": "which is not JSON",
    "header of 2**63": "expected the length of a JSON header",
    "link": "is a link out of the checkpoint's folder",
    "DCP item, parent": "leaves the",
    "DCP item, absolute": "",
}
UNSAID = {"os.system, .metadata", "os.system, bare", "os.system, torch-checkpointing"}


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each attack brought about, by its name."""
    folder = tmp_path_factory.mktemp("attacks")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])}
    argv = [sys.executable, "-m", "tests.hostile.attacks", str(folder)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=environment, cwd=REPOSITORY)
    assert (done.returncode, done.stderr) == (0, "")
    assert not list(folder.rglob("ckpt-was-here"))
    assert not (REPOSITORY / "ckpt-was-here").exists()
    return {row["name"]: row["results"] for row in map(json.loads, done.stdout.splitlines())}


def test_nothing_runs_and_all_is_answered(attacked: dict[str, dict[str, Any]]) -> None:
    """A documented status and no trace of a program, whatever the attack and the command."""
    assert len(attacked) > 120
    bad = {
        (name, command): result
        for name, results in attacked.items()
        for command, result in results.items()
        if result["status"] not in (0, 1, 2, 3, 4) or result["ran"] or "Traceback" in result["text"]
    }
    assert bad == {}


def test_what_is_hostile_is_refused(attacked: dict[str, dict[str, Any]]) -> None:
    """Verification is content with none of them but the few that harm nobody."""
    statuses = {name: results["verify --full"]["status"] for name, results in attacked.items()}
    assert {name for name, status in statuses.items() if status == 0} == HARMLESS
    assert {name for name, status in statuses.items() if status == 1} == PARTLY


def test_it_is_called_what_it_is(attacked: dict[str, dict[str, Any]]) -> None:
    """The message names the trick."""
    for name, results in attacked.items():
        is_call = name.startswith(("os.system", "calls ", "a call in "))
        said = SAID.get(name, SAID["os.system"] if is_call else "")
        if name not in UNSAID:
            assert said in results["verify --full"]["text"], name
            assert said in results["inspect"]["text"] or results["inspect"]["status"] == 0, name


def test_nothing_outside_is_read(attacked: dict[str, dict[str, Any]]) -> None:
    """Names of files that lead out of the folder, or links, lead nowhere."""
    for name, results in attacked.items():
        if name.startswith(("index, ", "DCP item, ", "link")):
            assert "root:" not in results["verify --salvage"]["text"]
            assert results["verify --full"]["status"] in (1, 3), name
