"""Saving from a CUDA device: copies to pinned memory on a stream of their own. One GPU and one rank are enough."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ckpt_tool
from ckpt_tool.api.job.saver import Saver
from tests.job.test_save_alone import save

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


def test_every_kind_of_memory(tmp_path: Path) -> None:
    """Bits come from a device whatever they mean and however they lie."""
    whole = torch.randn(30, 20, device="cuda")
    state = {
        "conjugated": torch.complex(whole, whole).conj(), "fp8": whole.to(torch.float8_e4m3fn), "gaps": whole[:, ::2],
        "expanded": whole[:1].expand(3, 20), "empty": whole[:0], "scalar": whole[0, 0], "bool": whole > 0,
    }  # fmt: skip
    ckpt_tool.save(state, tmp_path / "s", async_=False)
    found = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in state.items()}
    ckpt_tool.load(found, tmp_path / "s")
    for name, tensor in state.items():
        expected = tensor.cpu().resolve_conj().contiguous()
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)), name


def test_a_runtime_that_locks_no_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The save goes on, and the error that the runtime keeps is blamed on no kernel of the training."""
    runtime = torch.cuda.cudart()

    class Refusing:
        """Asks for what the runtime refuses: no memory of this process."""

        def cudaHostRegister(self, _: int, nbytes: int, flags: int) -> int:  # noqa: N802 - CUDA's name
            return int(runtime.cudaHostRegister(0, nbytes, flags))

    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "cudart", Refusing)
        saver = Saver()
        state = {"w": torch.ones(1000, device="cuda")}
        handle = save(saver, state, tmp_path / "s")
        state["w"] += 1  # no error of another
        torch.cuda.synchronize()
        handle.wait()
        saver.close()
    found = {"w": torch.zeros(1000)}
    ckpt_tool.load(found, tmp_path / "s")
    assert found["w"].eq(1).all()


def test_devices_side_by_side(tmp_path: Path) -> None:
    """Tensors of the host and of a device in one state."""
    state = {"gpu": torch.arange(1000, device="cuda"), "cpu": torch.arange(1000.0)}
    ckpt_tool.save(state, tmp_path / "s", async_=False)
    found = {"gpu": torch.zeros(1000, dtype=torch.int64, device="cuda"), "cpu": torch.zeros(1000)}
    ckpt_tool.load(found, tmp_path / "s")
    assert torch.equal(found["gpu"], state["gpu"])
    assert torch.equal(found["cpu"], state["cpu"])
