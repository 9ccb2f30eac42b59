"""What a load costs beside its bytes: memory within its budget, and no second planning of what was planned before."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.job import workers

pytestmark = pytest.mark.dist

BUDGET = 16 << 20
SLACK = 12 << 20
"""Plans, stacks of threads, and what gloo holds."""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    folder = tmp_path_factory.mktemp("memory")
    torch.manual_seed(0)
    save_file({f"w{i}": torch.randn(2048, 2048) for i in range(8)}, folder / "big.safetensors")
    save_file({f"w{i}": torch.randn(64, 32) for i in range(8)}, folder / "small.safetensors")
    workers.start(workers.memory, 2, folder)
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


@pytest.mark.parametrize("way", workers.EXCHANGES)
def test_memory_stays_within_the_budget(told: list[dict[str, Any]], way: str) -> None:
    """134 MB of replicated state are loaded within 16 MiB of buffers."""
    for rank in told:
        assert rank[way]["different"] == 0
        assert rank[way]["buffers"] <= BUDGET
        assert rank[way]["grown"] <= BUDGET + SLACK


def test_a_second_load_plans_nothing(told: list[dict[str, Any]]) -> None:
    """The same structure again costs three collectives; a structure or a file that has changed is planned anew."""
    for rank in told:
        turns = rank["replayed"]
        assert {turn: (is_replayed, equal) for turn, (is_replayed, _, equal) in turns.items()} == {
            "first": (False, True), "second": (True, True), "other tensors": (False, True), "changed": (False, True),
            "again": (True, True),
        }  # fmt: skip
        assert turns["second"][1] == turns["again"][1] == 3
