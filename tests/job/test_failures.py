"""What fails on one rank is raised on all of them, soon, and says where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing as mp

from tests.job import workers

pytestmark = pytest.mark.dist

SECONDS = 20.0


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of four ranks raised."""
    folder = tmp_path_factory.mktemp("failures")
    mp.spawn(workers.failures, (4, str(folder / "rendezvous"), str(folder)), nprocs=4)
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(4)]


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("read none", "StorageError", "model-00001.safetensors: rank 2 of 4: the disk is gone"),
        ("read shared-memory", "StorageError", "model-00001.safetensors: rank 2 of 4: the disk is gone"),
        ("read all-to-all", "StorageError", "model-00001.safetensors: rank 2 of 4: the disk is gone"),
        ("read by the first", "StorageError", "model-00001.safetensors: rank 0 of 4: the disk is gone"),
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


@pytest.mark.parametrize("way", workers.EXCHANGES)
def test_a_rank_that_dies(tmp_path: Path, way: str) -> None:
    """When a rank is gone the other one raises, instead of waiting for ever."""
    mp.spawn(workers.lost_rank, (2, str(tmp_path / "rendezvous"), str(tmp_path), way), nprocs=2)
    told = json.loads((tmp_path / "0.json").read_text(encoding="utf-8"))
    assert told["kind"] == "StorageError"
    assert told["text"] == "rank 0 of 2 cannot go on: rank 1 has ended"
    assert told["seconds"] < SECONDS + 5
