"""A save that fails raises on every rank, once, with the rank and the cause; what was saved before stays as it was.

In every format that ranks write together. ``CKPT_JOB_FAULTS=1`` has a rank die at every stage in every format
(``make test-job``); without it each format has a stage of its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt_tool
from tests.job import save_faults, workers
from tests.ranks import ranks_context

pytestmark = pytest.mark.dist

SIZE = save_faults.SIZE
SOON_S = 20.0
EVERY = list(product(save_faults.FORMATS, save_faults.STAGES))
IS_WHOLE = bool(os.environ.get("CKPT_JOB_FAULTS"))
LOST = EVERY if IS_WHOLE else list(zip(save_faults.FORMATS, save_faults.STAGES, strict=True))
DEAD = save_faults.FORMATS if IS_WHOLE else ("dcp", "megatron")


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of a job raised, by format."""
    folder = tmp_path_factory.mktemp("faults")
    workers.start(save_faults.faults, SIZE, folder)
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(SIZE)]


@pytest.fixture(params=save_faults.FORMATS)
def told(everything: list[dict[str, Any]], request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each rank raised in one format."""
    return [rank[request.param] for rank in everything]


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("disk full", "StorageError", "rank 1 of 3: no room: the file needs"),
        ("storage error", "StorageError", "rank 1 of 3: "),
        ("shapes", "LayoutError", "w: rank 0 has float32[2], rank 2 float32[3]"),
        ("places", "LayoutError", "ranks save to different places: rank 0 to"),
        ("kept", "TargetExists", "is there already"),
        ("slow", "StorageError", "no word from rank 1 within 1 s"),
        ("writer killed", "StorageError", "rank 2 of 3"),
    ],
)
def test_raised_on_every_rank(told: list[dict[str, Any]], fault: str, kind: str, words: str) -> None:
    """Every rank raises the same, soon, and the next save works."""
    for rank in told:
        assert rank[fault]["kind"] == kind
        assert words in rank[fault]["text"]
        assert rank[fault]["seconds"] < SOON_S
        assert rank[f"after {fault}"]["kind"] is None


def test_a_state_that_cannot_be_saved(told: list[dict[str, Any]]) -> None:
    """The rank that has it raises in `save`, the others when they wait."""
    texts = [rank["no memory"]["text"] for rank in told]
    assert "w: a meta tensor has no memory" in texts[2]
    assert all("w: rank 2 of 3: a meta tensor has no memory" in text for text in texts[:2])
    assert {rank["no memory"]["kind"] for rank in told} == {"Unsupported"}
    assert {rank["after no memory"]["kind"] for rank in told} == {None}


def test_saves_do_not_overtake(told: list[dict[str, Any]]) -> None:
    """With two saves under way a third one waits, and gives up in its time; the two end in their order."""
    for rank in told:
        assert rank["pending"] == [False, False]
        assert rank["third"]["kind"] == "StorageError"
        assert "before the last one is still being written" in rank["third"]["text"]
        assert rank["first is done"]


def test_nothing_is_left(told: list[dict[str, Any]]) -> None:
    """Failed saves leave no folder behind once all processes have given up."""
    steps = ["step-1", "step-5", "step-6"]
    assert told[0]["steps"] == sorted([*steps, *(f"{step}.digests.json" for step in steps)])


def started(job: Callable[..., None], folder: Path, *args: str) -> list[int | None]:
    """Exit codes of the two processes of a job."""
    context = ranks_context()
    given = (2, str(folder / "rendezvous"), str(folder / "run"), *args)
    processes = [context.Process(target=job, args=(rank, *given)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)
    return [process.exitcode for process in processes]


def loaded(url: Path | str) -> float:
    """The one value of a saved state."""
    state = {"model": {"w": torch.zeros(300, 400)}, "value": 0.0}
    ckpt_tool.load(state, url)
    assert isinstance(state["model"], dict)
    values = state["model"]["w"].unique().tolist()
    assert values == [state["value"]]
    return float(values[0])


@pytest.mark.parametrize(("name", "stage"), LOST)
def test_a_rank_that_dies(tmp_path: Path, name: str, stage: str) -> None:
    """The others raise soon, and say which; the checkpoint before is whole, and nothing else is one.

    Once all its bytes are durable, and it has said so, a save may do without the rank: then it is whole, also where the
    one that waits hears of the rank's end before it hears of the commit, and raises.
    """
    assert started(save_faults.lost_rank, tmp_path, name, stage) == [0, -9]
    told = json.loads((tmp_path / "run.0.json").read_text(encoding="utf-8"))
    is_saved = stage == "written" and told["kind"] is None
    assert is_saved or (told["kind"], "rank 1 of 2 has gone" in told["text"]) == ("StorageError", True)
    assert told["seconds"] < SOON_S
    whole = [step.path for step in ckpt_tool.ls(tmp_path / "run").steps if step.is_complete]
    expected = ["step-1", "step-2"] if is_saved or (stage == "written" and len(whole) == 2) else ["step-1"]
    assert sorted(whole) == expected
    assert [loaded(tmp_path / "run" / path) for path in expected] == [1.0, 2.0][: len(expected)]


@pytest.mark.parametrize("name", DEAD)
def test_a_job_that_dies(tmp_path: Path, name: str) -> None:
    """What it leaves is listed as incomplete; `clean` removes it when told to, and so does the next save there."""
    run = tmp_path / "run"
    assert started(save_faults.lost_job, tmp_path, name) == [-9, -9]
    (left,) = [step for step in ckpt_tool.ls(run).steps if not step.is_complete]
    assert left.step == 2
    assert left.path.startswith("step-2.")
    assert left.path.endswith(".partial")
    assert loaded(run / "step-1") == 1.0
    found = ckpt_tool.clean(run)
    assert ([entry.path for entry in found.leftovers], found.removed) == ([left.path], False)
    copy = run / left.path.replace("step-2", "step-9")
    os.rename(run / left.path, copy)
    assert ckpt_tool.clean(run, dry_run=False).removed
    assert not copy.exists()
    os.makedirs(run / left.path)
    state = {"model": {"w": torch.full((300, 400), 4.0)}, "value": 4.0}
    ckpt_tool.save(state, run / "step-2", async_=False)
    assert sorted(os.listdir(run)) == ["step-1", "step-1.digests.json", "step-2", "step-2.digests.json"]
    assert loaded(run / "step-2") == 4.0
