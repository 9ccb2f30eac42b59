"""Saves and loads do the same whatever torch was told around them, and whatever little a rank has."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import ckpt_tool
from tests.job import workers

SIZE = 2
AROUND: dict[str, Any] = {
    "nothing": nullcontext,
    "device": partial(torch.device, "meta"),
    "inference": torch.inference_mode,
    "gradients": torch.enable_grad,
}
"""Blocks that training code has around its calls, as evaluations and models that are made on another device have."""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of one job has seen."""
    folder = tmp_path_factory.mktemp("surroundings")
    workers.start(_job, SIZE, folder)
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(SIZE)]


def _job(rank: int, size: int, rendezvous: str, out: str) -> None:
    with workers.joined(rank, size, rendezvous):
        found: dict[str, Any] = {}
        for turn in range(2):  # of one structure: staged by what was made ready in other modes
            for number, (name, around) in enumerate(AROUND.items()):
                found.setdefault(name, []).extend(_there_and_back(Path(f"{out}/{name}{turn}"), number, around()))
        found.update(_little(rank, Path(out)))
        Path(f"{out}/{rank}.json").write_text(json.dumps(found), encoding="utf-8")
        dist.barrier()


def _there_and_back(place: Path, number: int, around: AbstractContextManager[Any]) -> list[str]:
    """Ways of loading that did not bring what was saved."""
    different = []
    with around:
        state = {"w": torch.full((300, 40), float(number), device="cpu"), "none": torch.zeros(0, 3, device="cpu")}
        ckpt_tool.save(state, place).wait()
        for way in workers.EXCHANGES:
            got = {name: torch.full_like(tensor, -1) for name, tensor in state.items()}
            ckpt_tool.load(got, place, exchange=way)
            if not got["w"].equal(state["w"]):
                different.append(way)
    return different


def _little(rank: int, out: Path) -> dict[str, Any]:
    """States of ranks that hold nothing, and of an optimizer that has none."""
    ckpt_tool.save({"w": torch.ones(3), "n": 3} if rank == 0 else {}, out / "one").wait()
    state: dict[str, Any] = {"w": torch.zeros(3), "n": 0} if rank == 1 else {}
    ckpt_tool.load(state, out / "one")
    ckpt_tool.save({"optim": {"state": {}, "lr": 0.1}}, out / "optimizer").wait()
    optimizer: dict[str, Any] = {"optim": {"state": {}, "lr": 0.0}}
    report = ckpt_tool.load(optimizer, out / "optimizer")
    ckpt_tool.save({}, out / "none").wait()
    ckpt_tool.load({}, out / "none")
    return {
        "one": [state["w"].tolist(), state["n"]] if state else None,
        "optimizer": [optimizer, list(report.missing)],
    }


@pytest.mark.dist
@pytest.mark.parametrize("name", AROUND)
def test_modes_and_default_devices(told: list[dict[str, Any]], name: str) -> None:
    """Memory of ours is in host memory, and may be filled again in any other mode."""
    assert [rank[name] for rank in told] == [[]] * SIZE


@pytest.mark.dist
def test_ranks_that_hold_nothing(told: list[dict[str, Any]]) -> None:
    """An empty state is a state, and an empty dict in one is not missing."""
    assert [rank["one"] for rank in told] == [None, [[1.0] * 3, 3]]
    assert [rank["optimizer"] for rank in told] == [[{"optim": {"state": {}, "lr": 0.1}}, []]] * SIZE
