"""Saving a job of Megatron's kind: resumed in jobs of other sizes, with the losses of the one that went on.

``CKPT_JOB_SAVING`` and ``CKPT_JOB_LOADING`` set other numbers of ranks; ``make test-job`` goes through all up to four.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import ckpt_tool
from tests.job import megatron_jobs, workers
from tests.job.test_save import LOADING, SAVING, told

pytestmark = pytest.mark.dist

SAVED = [f"{size}/{name}" for size in SAVING for name in megatron_jobs.FORMATS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where jobs of several sizes have saved, and another one has loaded."""
    found = tmp_path_factory.mktemp("megatron")
    for size in SAVING:
        workers.start(megatron_jobs.save_all, size, found)
    (found / f"rendezvous-{LOADING}").unlink(missing_ok=True)
    workers.start(megatron_jobs.load_all, LOADING, found)
    return found


@pytest.mark.parametrize("saved", SAVED)
def test_training_goes_on(folder: Path, saved: str) -> None:
    """In a job of the same size and in one of another, to the bit: weights, and the optimizer in flat ranges."""
    size, _, name = saved.partition("/")
    (losses, resumed), *others = [rank[name] for rank in told(folder, "saved", int(size))]
    assert len(set(losses)) == 3
    assert resumed == losses
    assert [losses, losses] * len(others) == [each for pair in others for each in pair]
    assert [rank[saved] for rank in told(folder, "loaded", LOADING)] == [losses] * LOADING


@pytest.mark.parametrize("saved", SAVED)
def test_verified(folder: Path, saved: str) -> None:
    """Every checksum is right, every element is there once, and the digests beside it say the same."""
    report = ckpt_tool.verify(folder / saved, level="full", manifest=f"{folder / saved}.digests.json")
    assert report.is_ok, [finding.message for finding in report.findings]


@pytest.mark.parametrize("saved", SAVED)
def test_extra_state(folder: Path, saved: str) -> None:
    """Each rank has its own objects back."""
    size = int(saved.partition("/")[0])
    for rank in range(size):
        extra = ckpt_tool.load_extra_state(folder / saved, rank, size)
        assert (extra["rank"], extra["rng"].tolist()) == ([rank], [1.0, 1.0])
