"""Loading into the memory of a GPU, alone and with NCCL; one GPU and one rank suffice (``make test-cuda``)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import ckpt_tool
from ckpt_tool.engine.distributed_group import Group
from ckpt_tool.frameworks.memory import TensorMemory, memory_of

pytestmark = pytest.mark.cuda

TRUTH = {
    "f32": torch.arange(48.0).reshape(6, 8),
    "bf16": torch.arange(12.0).to(torch.bfloat16),
    "i64": torch.arange(5),
    "bool": torch.tensor([True, False, True]),
    "c64": torch.complex(torch.arange(3.0), torch.ones(3)),
    "f8": torch.arange(4.0).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(2.5),
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """One tensor of each kind."""
    torch.save(TRUTH, tmp_path / "state.pt")
    return tmp_path / "state.pt"


@pytest.fixture
def nccl(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.FileStore(str(tmp_path / "rendezvous"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def bits(tensor: torch.Tensor) -> bytes:
    """Bytes of the elements."""
    found: bytes = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return found


def test_every_type(saved: Path) -> None:
    """Bits arrive in device memory, whatever they mean."""
    state = {name: torch.zeros_like(tensor, device="cuda") for name, tensor in TRUTH.items()}
    ckpt_tool.load(state, saved)
    assert {name: bits(tensor) for name, tensor in state.items()} == {name: bits(each) for name, each in TRUTH.items()}


def test_memory_of_any_strides(saved: Path) -> None:
    """A transposed view with gaps is filled in place, what lies between is not touched, and a cast is one."""
    base = torch.full((8, 12), -1.0, device="cuda")
    half = torch.zeros(6, 8, dtype=torch.float16, device="cuda")
    ckpt_tool.load({"f32": base[:, ::2].t()}, saved, strict=False)
    ckpt_tool.load({"f32": half}, saved, strict=False, cast=True)
    assert base[:, ::2].t().cpu().equal(TRUTH["f32"])
    assert base[:, 1::2].eq(-1).all()
    assert half.cpu().equal(TRUTH["f32"].half())


@pytest.mark.parametrize("n_workers", [1, 3])
def test_a_training_with_a_stream_of_its_own(tmp_path: Path, n_workers: int) -> None:
    """What it had told the stream comes first, and what it tells next finds all elements, strided ones too."""
    whole = torch.randn(4000, 2500)
    save_file({"w": whole}, tmp_path / "model.safetensors")
    expected = whole.cuda()
    for state in (torch.zeros(4000, 2500, device="cuda"), torch.zeros(2500, 4000, device="cuda").t()):
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(100):
                state.sub_(1)
            ckpt_tool.load({"w": state}, tmp_path / "model.safetensors", n_workers=n_workers)
            is_there = state.eq(expected).all()
        assert is_there.item()


def test_small_buffers(tmp_path: Path) -> None:
    """A tensor far larger than the budget passes through buffers of it."""
    whole = torch.randn(256, 1024)
    save_file({"w": whole}, tmp_path / "model.safetensors")
    state = {"w": torch.zeros(256, 1024, device="cuda")}
    ckpt_tool.load(state, tmp_path / "model.safetensors", memory_budget_bytes=64 << 10)
    assert state["w"].cpu().equal(whole)


@pytest.mark.parametrize("start", [0, 4, 1])
def test_bits_that_are_on_a_device_already(start: int) -> None:
    """Wherever they begin there, they go to memory of any strides; pages that loads read to are locked."""
    content = torch.zeros(200, dtype=torch.uint8, device="cuda")
    content[start : start + 192] = TRUTH["f32"].reshape(-1).view(torch.uint8).cuda()
    base = torch.full((8, 12), -1.0, device="cuda")
    memory = memory_of(base[:, ::2].t(), "w")
    assert isinstance(memory, TensorMemory)
    memory.put_tensor((slice(0, 6), slice(0, 8)), content[start : start + 192], (6, 8))
    assert base[:, ::2].t().cpu().equal(TRUTH["f32"])
    assert base[:, 1::2].eq(-1).all()
    assert torch.from_numpy(memory.buffer(1 << 20)).is_pinned()


@pytest.mark.usefixtures("nccl")
def test_collectives_of_nccl() -> None:
    """What ranks tell each other goes through device memory, and comes back as it was."""
    group = Group(timeout_s=60)
    assert group.device.type == "cuda"
    assert group._all_gather(torch.arange(4).numpy()).tolist() == [0, 1, 2, 3]
    sent, received = torch.arange(16, dtype=torch.uint8), torch.zeros(16, dtype=torch.uint8, device="cuda")
    group.all_to_all(received, sent, [16], [16])
    assert received.cpu().equal(sent)


@pytest.mark.usefixtures("nccl")
def test_a_sharded_model(tmp_path: Path) -> None:
    """FSDP2 on a mesh of one GPU."""
    mesh = init_device_mesh("cuda", (1,))
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Linear(8, 4)).cuda()
        fully_shard(model, mesh=mesh)
        models.append(model)
    dcp.save({"model": models[0].state_dict()}, checkpoint_id=tmp_path / "saved")
    ckpt_tool.load({"model": models[1]}, tmp_path / "saved")
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert isinstance(one, DTensor)
        assert isinstance(other, DTensor)
        assert one.to_local().equal(other.to_local())
