"""Saving from a CUDA device: copies to pinned memory on a stream of their own. One GPU and one rank are enough."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ckpt_tool

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    """A device, which the marker promises."""
    torch.cuda.init()
    yield
    torch.cuda.synchronize()


@pytest.mark.parametrize("overlap", [False, True])
def test_state_that_is_still_being_computed(tmp_path: Path, overlap: bool) -> None:
    """What the stream of the training had been told before the call is in the save, what it is told after is not."""
    state = {"w": torch.zeros(4_000_000, device="cuda"), "t": torch.randn(300, 200, device="cuda").t()}
    for number in range(4):  # both arenas, each before and after it is known
        expected = state["t"].cpu()
        for _ in range(100):
            state["w"] += 1
        handle = ckpt_tool.save(state, tmp_path / str(number), overlap_staging=overlap)
        handle.wait_staged()
        state["w"] += 0.5
        state["w"] -= 0.5
        handle.wait()
        found = {"w": torch.zeros(4_000_000), "t": torch.zeros(200, 300)}
        ckpt_tool.load(found, tmp_path / str(number))
        assert found["w"].unique().tolist() == [100.0 * (number + 1)]
        assert torch.equal(found["t"], expected)


def test_devices_side_by_side(tmp_path: Path) -> None:
    """Tensors of the host and of a device in one state."""
    state = {"gpu": torch.arange(1000, device="cuda"), "cpu": torch.arange(1000.0)}
    ckpt_tool.save(state, tmp_path / "s", async_=False)
    found = {"gpu": torch.zeros(1000, dtype=torch.int64, device="cuda"), "cpu": torch.zeros(1000)}
    ckpt_tool.load(found, tmp_path / "s")
    assert torch.equal(found["gpu"], state["gpu"])
    assert torch.equal(found["cpu"], state["cpu"])
