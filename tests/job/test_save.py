"""Saving in a job: every layout bit for bit, read by torch's own loader and by this one in jobs of other sizes.

``CKPT_JOB_SAVING`` and ``CKPT_JOB_LOADING`` set other numbers of ranks; ``make test-job`` goes through all up to four.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

import ckpt_tool
from tests.job import save_jobs
from tests.ranks import start_ranks

pytestmark = pytest.mark.dist

SAVING = tuple(map(int, os.environ.get("CKPT_JOB_SAVING", "4").split(",")))
LOADING = int(os.environ.get("CKPT_JOB_LOADING", "3"))


def told(folder: Path, job: str, size: int) -> list[dict[str, Any]]:
    """What each rank of a job said: of one that ``saved`` or ``loaded``."""
    return [json.loads((folder / f"{job}-{size}.{rank}.json").read_text(encoding="utf-8")) for rank in range(size)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where jobs of several sizes have saved, and another one has loaded."""
    found = tmp_path_factory.mktemp("saves")
    for size in SAVING:
        start_ranks(save_jobs.save_all, (size, str(found / f"rendezvous-{size}"), str(found)), size)
    start_ranks(save_jobs.load_all, (LOADING, str(found / "rendezvous"), str(found)), LOADING)
    return found


@pytest.mark.parametrize("size", SAVING)
@pytest.mark.parametrize("name", save_jobs.MODELS)
def test_training_goes_on(folder: Path, name: str, size: int) -> None:
    """A model that is loaded again in a job of the same size has the losses of the one that went on, to the bit."""
    for rank in told(folder, "saved", size):
        assert rank["resumed"][name] == rank["losses"][name]


def test_bits_are_those_of_the_truth(folder: Path) -> None:
    """What is loaded in another layout by another number of ranks is what was there when `save` returned."""
    for rank in told(folder, "loaded", LOADING):
        assert {name: wrong for name, wrong in rank.items() if wrong} == {}
        assert len(rank) == len(SAVING) * (4 * len(save_jobs.LAYOUTS) + len(save_jobs.MODELS) + 6)


@pytest.mark.parametrize("size", SAVING)
@pytest.mark.parametrize("layout", [*save_jobs.LAYOUTS, *save_jobs.MODELS])
def test_verified(folder: Path, layout: str, size: int) -> None:
    """Every checksum of every item is right, and every element is there once."""
    report = ckpt_tool.verify(folder / str(size) / layout, level="full")
    assert [finding.message for finding in report.findings] == []


@pytest.mark.parametrize("size", SAVING)
def test_collectives(folder: Path, size: int) -> None:
    """Only the first save of a job makes collectives, also where the structure changes later."""
    for rank in told(folder, "saved", size):
        first, *later = rank["collectives"]
        assert first <= 5
        assert later == [0] * len(later)
        assert not rank["planned"]


@pytest.mark.parametrize("size", SAVING)
@pytest.mark.parametrize("layout", ["replicas", "plain", "hsdp"])
def test_replicas_are_written_once_in_equal_shares(folder: Path, layout: str, size: int) -> None:
    """Together the ranks write each byte once, about as much each as the largest tensor allows."""
    written = [rank["written"][layout] for rank in told(folder, "saved", size)]
    tensors = save_jobs.truth().values()
    assert sum(written) == sum(tensor.nbytes for tensor in tensors)
    assert max(written) <= sum(written) / size + max(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("size", SAVING)
@pytest.mark.parametrize("name", ["few", "few again"])
def test_large_replicas_are_cut(folder: Path, name: str, size: int) -> None:
    """No rank writes 5 % more than the mean, each byte is written once, and digests are those of whole tensors."""
    written = [rank["written"][name] for rank in told(folder, "saved", size)]
    tensors = save_jobs.few()
    assert sum(written) == sum(tensor.nbytes for tensor in tensors.values())
    assert max(written) <= 1.05 * sum(written) / size
    manifest = f"{folder / str(size) / name}.digests.json"
    save_file({f"model.{key}": tensor.contiguous() for key, tensor in tensors.items()}, folder / "few.safetensors")
    for place in (folder / str(size) / name, folder / "few.safetensors"):
        report = ckpt_tool.verify(place, level="full", manifest=manifest)
        assert report.is_ok, [finding.message for finding in report.findings]
        assert any("3 of 3 recorded tensors are here" in finding.message for finding in report.findings)
