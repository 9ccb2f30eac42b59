"""What fails on one rank is raised on all of them, soon, and says where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.job import failing_loads, faults, workers

pytestmark = pytest.mark.dist

SECONDS = 20.0
CHANGED = "rank 0 of 4: has changed while it was read: what was read is no one checkpoint"


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four ranks raised."""
    folder = tmp_path_factory.mktemp("failures")
    workers.start(failing_loads.failures, 4, folder)
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(4)]


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("read none", "StorageError", "model-00001.safetensors: rank 2 of 4: the disk is gone"),
        ("read shared-memory", "StorageError", "model-00001.safetensors: rank 2 of 4: the disk is gone"),
        ("read all-to-all", "StorageError", "model-00001.safetensors: rank 2 of 4: the disk is gone"),
        ("read by the first", "StorageError", "model-00001.safetensors: rank 0 of 4: the disk is gone"),
        ("changed none", "StorageError", CHANGED),
        ("changed shared-memory", "StorageError", CHANGED),
        ("changed all-to-all", "StorageError", CHANGED),
        ("changed again", "StorageError", CHANGED),
        ("no segment", "StorageError", "rank 1 of 4: cannot create"),
        ("no mapping", "StorageError", "rank 3 of 4: cannot of_process"),
        ("bug", "CkptError", "rank 1 of 4: ZeroDivisionError: oops"),
        ("shape", "LayoutError", "1 shape\n  shape: buf_i64: expected [4], got [3]"),
        ("dtype", "LayoutError", "1 dtype\n  dtype: buf_i64: expected float32, got int64"),
        ("missing", "LayoutError", "2 missing\n  missing: mine: not in the checkpoint\n  missing: also: not"),
        ("unexpected", "LayoutError", "1 unexpected\n  unexpected: buf_i64: not in the state"),
        ("nowhere", "NotFound", "rank 0 of 4: no such file or folder"),
        ("no tensor", "Unsupported", "w: rank 3 of 4: a meta tensor has no memory"),
    ],
)
def test_raised_on_every_rank(told: list[dict[str, Any]], fault: str, kind: str, words: str) -> None:
    """Every rank raises the same error, with the rank that it befell, within seconds."""
    for rank in told:
        assert rank[fault]["kind"] == kind
        assert words in rank[fault]["text"]
        assert rank[fault]["text"] == told[0][fault]["text"]
        assert rank[fault]["seconds"] < SECONDS


def test_not_strict(told: list[dict[str, Any]]) -> None:
    """With strict=False what is missing is listed, and nothing is raised."""
    assert [rank["not strict"] for rank in told] == [{"missing": ["mine"], "unexpected": []}] * 4


@pytest.mark.parametrize("struck", [0, 2])
@pytest.mark.parametrize("way", workers.EXCHANGES)
@pytest.mark.parametrize("stage", [stage for stage in faults.STAGES if stage != "state"])
def test_a_rank_that_is_killed(tmp_path: Path, stage: str, way: str, struck: int) -> None:
    """Whichever rank is killed at whichever stage, the others raise at once, and say which it was."""
    told = faults.run(stage, way, tmp_path, size=3, struck=struck, seconds=0, timeout_s=SECONDS)
    assert told[struck] is None
    for rank in {0, 1, 2} - {struck}:
        assert told[rank]["kind"] == "StorageError"
        assert f"rank {rank} of 3 cannot go on: rank {struck} has ended" in told[rank]["text"]
        assert told[rank]["seconds"] < SECONDS


def test_a_rank_that_is_killed_before_it_has_said_anything(tmp_path: Path) -> None:
    """Nobody knows its process by then, but it is the one that does not answer the roll."""
    told = faults.run("state", "none", tmp_path, size=3, struck=1, seconds=0, timeout_s=SECONDS)
    for rank in (0, 2):
        assert f"rank {rank} of 3 cannot go on: rank 1 did not answer (" in told[rank]["text"]
        assert told[rank]["seconds"] < SECONDS


def test_a_rank_that_stands_still(tmp_path: Path) -> None:
    """A rank that does not answer in time is named by all others; it raises as well when it comes back."""
    told = faults.run("reading", "shared-memory", tmp_path, size=3, struck=2, seconds=8, timeout_s=3)
    for rank in (0, 1):
        assert told[rank]["kind"] == "StorageError"
        assert f"rank {rank} of 3 cannot go on: rank 2 did not answer (" in told[rank]["text"]
        assert told[rank]["seconds"] < SECONDS
    assert "rank 2 of 3 cannot go on: rank 0 " in told[2]["text"]


def test_a_slow_rank(tmp_path: Path) -> None:
    """A rank that is late, but not too late, holds nobody up for good."""
    told = faults.run("reading", "shared-memory", tmp_path, size=3, struck=1, seconds=2, timeout_s=SECONDS)
    assert [rank["kind"] for rank in told] == [None] * 3
