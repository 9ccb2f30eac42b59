"""What a CUDA device would be told: by saves, by loads, and by collectives of a group that has one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

import ckpt_tool
from ckpt_tool.api.job.saver import Saver
from ckpt_tool.engine.distributed_group import Group
from tests.job import workers
from tests.job.pretended_cuda import OnDevice, on_device, pretended_cuda
from tests.job.test_save_alone import save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.mark.parametrize("overlap", [False, True])
def test_a_save_from_two_devices(tmp_path: Path, overlap: bool) -> None:
    """Each device copies on a stream of its own, behind what it had been told; staged is what has been reached."""
    whole = torch.randn(30, 20)
    wave = torch.complex(whole, whole + 1)
    state = {
        "first": on_device(whole.clone()), "second": on_device(whole.t().clone(), 1), "host": whole.clone(),
        "fp8": on_device(whole.to(torch.float8_e4m3fn)), "turned": on_device(wave.conj()),
        "gaps": on_device(whole[:, ::2]),
    }  # fmt: skip
    saver = Saver()
    with pretended_cuda() as told:
        for number in range(3):  # both arenas, and one again
            handle = save(saver, state, tmp_path / str(number), overlap_staging=overlap)
            handle.wait_staged()
            told.append(("staged",))
            handle.wait()
        saver.close()
    for number in range(3):
        found: dict[str, Any] = {
            "first": torch.zeros(30, 20), "second": torch.zeros(20, 30), "host": torch.zeros(30, 20),
            "fp8": torch.zeros(30, 20, dtype=torch.float8_e4m3fn), "turned": torch.zeros_like(wave),
            "gaps": torch.zeros(30, 10),
        }  # fmt: skip
        ckpt_tool.load(found, tmp_path / str(number))
        for name, tensor in state.items():
            assert bits(found[name]) == bits(tensor), name
    pins = [entry for entry in told if entry[0] == "pin"]
    assert len(pins) == 2
    assert [("unpin", address) for _, address, _, _ in pins] == [entry for entry in told if entry[0] == "unpin"]
    ends = [at for at, entry in enumerate(told) if entry == ("staged",)]
    for begin, end in zip([0, *ends], ends, strict=False):
        check_staging([entry for entry in told[begin:end] if entry[0] not in {"pin", "staged"}])


def check_staging(told: list[tuple[Any, ...]]) -> None:
    """One save's copies, in the order in which the devices were told."""
    copies = [entry for entry in told if entry[0] == "copy"]
    assert sorted((name is not None, n, is_async) for _, name, n, is_async in copies) == [
        (False, 1, False), (True, 1, True), (True, 4, True)
    ]  # fmt: skip
    for _, stream, _, _ in copies:
        if stream is not None:
            device = stream.partition(" of ")[2]
            before = ("record", f"training of {device}")
            steps = [each for each in told if each == before or (stream in each and each[0] != "resolve")]
            assert [entry[0] for entry in steps] == ["record", "wait", "copy", "record", "reached"]
            assert steps[1] == ("wait", stream, f"training of {device}")
    kernels = [entry for entry in told if entry[0] == "resolve"]
    assert {entry[1] for entry in kernels} == {name for _, name, n, _ in copies if n == 4}


def test_a_load_into_a_device(tmp_path: Path) -> None:
    """Elements arrive by copies, in any strides and types, after what the training's stream was told before."""
    whole = torch.arange(48.0).reshape(6, 8)
    saved = {"a": whole, "b": whole.to(torch.bfloat16), "c": whole.clone(), "d": whole.long()}
    save_file(saved, tmp_path / "m.safetensors")
    base = on_device(torch.full((8, 12), -1.0))
    state = {
        "a": base[:, ::2].t(), "b": on_device(torch.zeros(6, 8, dtype=torch.bfloat16)),
        "c": on_device(torch.zeros(6, 8, dtype=torch.float16), 1), "d": on_device(torch.zeros(6, 8, dtype=torch.int64)),
    }  # fmt: skip
    with pretended_cuda() as told:
        report = ckpt_tool.load(state, tmp_path / "m.safetensors", cast=True, memory_budget_bytes=64 << 10)
    assert report.n_tensors == 4
    assert state["a"].cpu().equal(whole)
    assert base.cpu()[:, 1::2].eq(-1).all()
    assert state["b"].cpu().equal(whole.to(torch.bfloat16))
    assert state["c"].cpu().equal(whole.half())
    assert state["d"].cpu().equal(whole.long())
    assert {("synchronize", f"training of cuda:{number}") for number in range(2)} <= set(told)


@pytest.mark.dist
def test_collectives_go_through_the_device(tmp_path: Path) -> None:
    """Numbers and bytes go there and come back, and what waits in host memory is pinned."""
    workers.start(exchanging, 2, tmp_path)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8"))
        assert found["device"] == "cuda"
        assert found["different"] == {way: [] for way in workers.EXCHANGES}
        assert found["n_pinned"] >= 2


def exchanging(rank: int, size: int, rendezvous: str, out: str) -> None:
    """One rank of a job whose group has a device only."""
    with workers.joined(rank, size, rendezvous), pretended_cuda() as told:
        truth = workers.truth_of("hf_sharded")
        different = {}
        for way in workers.EXCHANGES:
            state = {name: on_device(torch.zeros_like(tensor)) for name, tensor in truth.items()}
            ckpt_tool.load(state, workers.url("hf_sharded"), exchange=way)
            different[way] = [name for name, tensor in truth.items() if bits(state[name]) != bits(tensor)]
        group = Group(timeout_s=60)
        assert group.largest([float(rank)]) == [float(size - 1)]
        assert group.share(lambda: b"told") == b"told"
        found = {"device": group.device.type, "different": different, "n_pinned": told.count(("pinned",))}
        Path(f"{out}/{rank}.json").write_text(json.dumps(found), encoding="utf-8")
        dist.barrier()


def bits(tensor: torch.Tensor) -> bytes:
    """Bytes of the elements, in order."""
    host = tensor.cpu() if isinstance(tensor, OnDevice) else tensor
    found: bytes = host.resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return found
