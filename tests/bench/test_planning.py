"""Planning for the largest jobs, beside torch's planners: processor seconds and peak memory, each in its own process.

What is planned is in ``layouts``; what is timed in ``plan_job``. ``CKPT_BENCH_ROUNDS`` sets the measured rounds (3).
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.bench.measure import Figure, report

pytestmark = pytest.mark.bench

ROUNDS = int(os.environ.get("CKPT_BENCH_ROUNDS", "3"))
HERE = Path(__file__).parent
DCP = "torch DCP, 1,024 x 500"
OURS = "the same boxes, ours"
JOBS = {"405b": "405B, 8,960 ranks", "moe": "2T MoE, 99,840 ranks"}


def planned(*argv: str) -> dict[str, float]:
    """What ``plan_job`` prints."""
    done = subprocess.run(
        [sys.executable, str(HERE / "plan_job.py"), *argv], check=True, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def figure(name: str, rounds: list[dict[str, float]], key: str = "all_s") -> Figure:
    """Rounds as one line of a table."""
    seconds = [found[key] for found in rounds]
    return Figure(name, min(seconds), statistics.median(seconds), max(seconds), max(f["peak_mb"] for f in rounds))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A checkpoint of each job: real metadata, sparse data."""
    base = tmp_path_factory.mktemp("jobs")
    paths = {model: str(base / model) for model in JOBS}
    for model, path in paths.items():
        print(f"\n{JOBS[model]}: {planned('write', model, path)}")
    yield paths
    shutil.rmtree(base)


def test_planning_against_torch(folders: dict[str, str]) -> None:
    """405B in 1 s and 1 GB, 100,000 ranks in 30 s and 4 GB, one rank in 0.3 s, and a hundredth of DCP's seconds."""
    rounds: dict[str, list[dict[str, float]]] = {}
    for _ in range(ROUNDS):
        for model, name in JOBS.items():
            rounds.setdefault(f"{name}: folder to plan", []).append(planned("plan", model, folders[model]))
            rounds.setdefault(f"{name}: one rank", []).append(planned("rank", model, folders[model]))
        rounds.setdefault(OURS, []).append(planned("ours", "1024", "500"))
    rounds[DCP] = [planned("dcp", "1024", "500")]  # half a minute, and a ratio of a hundred needs no second look
    figures = {name: figure(name, found) for name, found in rounds.items()}
    report("planning: processor seconds, from a folder with a sidecar", list(figures.values()), peer=DCP)
    for name, found in rounds.items():
        print(f"{name}: {found[-1]}")
    large, largest = (figures[f"{name}: folder to plan"] for name in JOBS.values())
    assert (large.min_s <= 1, large.peak_mb <= 1000) == (True, True)
    assert (largest.min_s <= 30, largest.peak_mb <= 4000) == (True, True)
    assert figures[f"{JOBS['405b']}: one rank"].min_s <= 0.3
    assert figures[DCP].min_s >= 100 * figures[OURS].min_s
    assert all(found["balance_of_64"] <= 1.05 for name, one in rounds.items() if "plan" in name for found in one)


def test_growth() -> None:
    """Seconds grow as chunks do: FSDP2 of 405B in bf16, from 256 to 4,096 ranks (a million chunks for each 1,000)."""
    found = [planned("fsdp", str(ranks)) for ranks in (256, 512, 1024, 2048, 4096)]
    chunks, seconds = (np.log([one[key] for one in found]) for key in ("n_chunks", "all_s"))
    exponent = float(np.polyfit(chunks, seconds, 1)[0])
    report(
        "planning-growth: FSDP2 of 405B, to half as many ranks",
        [figure(f"{one['n_chunks']:,.0f} chunks", [one]) for one in found],
        peer=f"{found[0]['n_chunks']:,.0f} chunks",
    )
    print(f"exponent {exponent:.2f}")
    assert exponent <= 1.1


def test_the_most_chunks() -> None:
    """FSDP2 of 405B on 16,384 ranks, to half as many: 17 million chunks in 4 GB."""
    found = planned("fsdp", "16384")
    name = f"{found['n_chunks']:,.0f} chunks"
    report("planning-most-chunks: FSDP2 of 405B", [figure(name, [found])], peer=name)
    assert found["peak_mb"] <= 4000
