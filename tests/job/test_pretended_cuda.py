"""What a CUDA device would be told: by saves, by loads, and by collectives of a group that has one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

import ckpt_tool
from ckpt_tool.api.job.saver import Saver
from ckpt_tool.engine.distributed_group import Group, _device_of
from ckpt_tool.errors import StorageError
from tests.job import workers
from tests.job.pretended_cuda import OnDevice, OnOther, on_device, pretended_cuda
from tests.job.test_save_alone import save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture
def saver() -> Iterator[Saver]:
    """To be closed within the block that pretends, for what it unpins then."""
    made = Saver()
    yield made
    made.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_save_from_two_devices(tmp_path: Path, saver: Saver, overlap: bool) -> None:
    """What training has told its devices before the call is in a save; what it does once that is staged is not."""
    whole = torch.randn(30, 20)
    wave = torch.complex(whole, whole + 1)
    host = {
        "first": whole.clone(), "second": whole.t().clone(), "host": whole.clone(), "turned": wave.conj(),
        "fp8": whole.to(torch.float8_e4m3fn), "gaps": whole.clone()[:, ::2],
    }  # fmt: skip
    number_of = {"first": 0, "second": 1, "fp8": 0, "turned": 0, "gaps": 0}
    state = {name: on_device(tensor, number_of[name]) if name in number_of else tensor for name, tensor in host.items()}
    with pretended_cuda() as told:
        for number in range(3):  # both arenas, and one again
            for name in ("first", "second", "gaps"):
                kernel = partial(host[name].fill_, number + 1)
                torch.cuda.current_stream(torch.device("cuda", number_of[name])).do(kernel)
            told.clear()
            handle = save(saver, state, tmp_path / str(number), overlap_staging=overlap)
            handle.wait_staged()
            for name in ("first", "second", "gaps"):
                host[name].fill_(-1)
            handle.wait()
            copies = sorted((stream is not None, n, is_async) for kind, stream, n, is_async in _copies(told))
            assert copies == [(False, 1, False), (True, 1, True), (True, 4, True)]
    for number in range(3):
        found: dict[str, Any] = {name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in host.items()}
        ckpt_tool.load(found, tmp_path / str(number))
        assert all(found[name].eq(number + 1).all() for name in ("first", "second", "gaps"))
        assert [name for name in ("host", "turned", "fp8") if bits(found[name]) != bits(host[name])] == []


@pytest.mark.parametrize("overlap", [False, True])
def test_a_save_from_another_kind_of_device(tmp_path: Path, saver: Saver, overlap: bool) -> None:
    """What training has told it before the call is in the save, whoever copies."""
    memory = torch.zeros(50)
    state = {"w": memory.as_subclass(OnOther)}
    with pretended_cuda():
        for number in range(3):
            torch.xpu.current_stream().do(partial(memory.fill_, number + 1))
            handle = save(saver, state, tmp_path / str(number), overlap_staging=overlap)
            handle.wait_staged()
            memory.fill_(-1)
            handle.wait()
    for number in range(3):
        found = torch.zeros(50)
        ckpt_tool.load({"w": found}, tmp_path / str(number))
        assert found.eq(number + 1).all()


def _copies(told: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [entry for entry in told if entry[0] == "copy"]


def test_pages_are_locked_for_all_devices(tmp_path: Path) -> None:
    """Once for each arena, and given back when the saver ends."""
    with pretended_cuda() as told:
        saver = Saver()
        for number in range(3):
            save(saver, {"w": on_device(torch.ones(9))}, tmp_path / str(number)).wait()
        saver.close()
    pins = [entry for entry in told if entry[0] == "pin"]
    assert [(nbytes > 0, flags) for _, _, nbytes, flags in pins] == [(True, 1)] * 2  # cudaHostRegisterPortable
    assert [("unpin", address) for _, address, _, _ in pins] == [entry for entry in told if entry[0] == "unpin"]


def test_pages_that_cannot_be_locked(tmp_path: Path, saver: Saver) -> None:
    """The save goes on without, and no kernel of the training is blamed for the runtime's error."""
    with pretended_cuda(pin_error=712) as told:
        save(saver, {"w": on_device(torch.ones(9))}, tmp_path / "s").wait()
        assert int(torch.zeros(1, device=torch.device("cuda", 0))) == 0
        saver.close()
    assert [entry[0] for entry in told if entry[0] in {"pin", "unpin"}] == ["pin"]
    found = torch.zeros(9)
    ckpt_tool.load({"w": found}, tmp_path / "s")
    assert found.eq(1).all()


def test_a_copy_that_fails(tmp_path: Path, saver: Saver) -> None:
    """The call raises when no other copy goes into the arena any more, and the next save works."""
    state = {"a": on_device(torch.ones(5)), "b": on_device(torch.ones(5), 1)}
    with pretended_cuda() as told:
        works = torch._foreach_copy_

        def fails(targets: Any, sources: Any, non_blocking: bool = False) -> None:
            works(targets, sources, non_blocking)
            if sources[0].device.index == 1:
                raise RuntimeError("CUDA out of memory")

        with patch.object(torch, "_foreach_copy_", fails), pytest.raises(RuntimeError, match="out of memory"):
            save(saver, state, tmp_path / "bad")
        assert {entry[1] for entry in told if entry[0] == "reached"} == {stream for _, stream, _, _ in _copies(told)}
        save(saver, state, tmp_path / "good").wait()
    assert not (tmp_path / "bad").exists()


@pytest.mark.parametrize("locks_pages", [True, False])
def test_a_load_into_devices(tmp_path: Path, locks_pages: bool) -> None:
    """Elements arrive in any strides and types; what lies between is not touched."""
    whole = torch.arange(48.0).reshape(6, 8)
    saved = {"a": whole, "b": whole.to(torch.bfloat16), "c": whole.clone(), "d": whole.long()}
    save_file(saved, tmp_path / "m.safetensors")
    base = on_device(torch.full((8, 12), -1.0))
    state = {
        "a": base[:, ::2].t(), "b": on_device(torch.zeros(6, 8, dtype=torch.bfloat16)),
        "c": on_device(torch.zeros(6, 8, dtype=torch.float16), 1), "d": on_device(torch.zeros(6, 8, dtype=torch.int64)),
    }  # fmt: skip
    with pretended_cuda(locks_pages=locks_pages) as told:
        report = ckpt_tool.load(state, tmp_path / "m.safetensors", cast=True, memory_budget_bytes=64 << 10)
    assert report.n_tensors == 4
    assert ("pinned",) in told  # what is read comes to pages that a device takes it from
    assert state["a"].cpu().equal(whole)
    assert base.cpu()[:, 1::2].eq(-1).all()
    assert state["b"].cpu().equal(whole.to(torch.bfloat16))
    assert state["c"].cpu().equal(whole.half())
    assert state["d"].cpu().equal(whole.long())


@pytest.mark.parametrize("n_workers", [1, 3])
@pytest.mark.parametrize("is_strided", [True, False])
@pytest.mark.parametrize("kind", [OnDevice, OnOther])
def test_a_load_between_what_training_does(tmp_path: Path, n_workers: int, is_strided: bool, kind: type[Any]) -> None:
    """What training had told its stream before comes first, and all elements are there when the call returns."""
    whole = torch.arange(5_000_000.0).reshape(2500, 2000)
    save_file({"w": whole}, tmp_path / "m.safetensors")
    memory = torch.zeros(2000, 2500) if is_strided else torch.zeros(2500, 2000)
    state = (memory.t() if is_strided else memory).as_subclass(kind)
    with pretended_cuda():
        stream = getattr(torch, state.device.type).current_stream(state.device)
        stream.do(partial(memory.fill_, -1))
        ckpt_tool.load({"w": state}, tmp_path / "m.safetensors", n_workers=n_workers)
        assert state.cpu().equal(whole)
        stream.synchronize()
        assert state.cpu().equal(whole)


TRANSPORTS = {"cuda:nccl": "cuda", "cpu:gloo,cuda:nccl": "cpu"}
"""What a group is joined by, and where its small collectives go."""


@pytest.fixture(scope="module")
def exchanged(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of a job saw, by transport."""
    folder = tmp_path_factory.mktemp("exchanges")
    save_file(_kinds(), folder / "kinds.safetensors")
    workers.start(exchanging, 2, folder)
    return [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


def _kinds() -> dict[str, torch.Tensor]:
    """Tensors of many widths and odd sizes, so that their pieces begin anywhere."""
    numbers = torch.arange(4099)
    return {
        "bytes": numbers[:777].to(torch.uint8), "halves": numbers.half(),
        "turned": numbers[:1200].reshape(30, 40).double(), "cast": numbers.float(), "step": torch.tensor(7.0),
        "flags": numbers % 3 == 0, "fp8": numbers[:91].to(torch.float8_e4m3fn),
    }  # fmt: skip


@pytest.mark.dist
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_an_exchange_carries(exchanged: list[dict[str, Any]], transport: str) -> None:
    """Bytes for a device go through it and stay there, whatever else the group goes through; what waits is pinned."""
    for rank in exchanged:
        found = rank[transport]
        assert found["device"] == TRANSPORTS[transport]
        assert found["different"] == {way: [] for way in [*workers.EXCHANGES, "auto"]}
        assert found["n_pinned"] >= 2
        assert set(found["carriers"]) == {"cuda"}
        assert "through an all-to-all" in found["why"]


@pytest.mark.dist
def test_states_that_are_on_no_device(exchanged: list[dict[str, Any]]) -> None:
    """They go through host memory where the group reaches that, also when other ranks have a device."""
    for rank in exchanged:
        assert {name: found["of_host"] for name, found in rank.items()} == {
            transport: [[kind], [kind]] for transport, kind in TRANSPORTS.items()
        }


def exchanging(rank: int, size: int, rendezvous: str, out: str) -> None:
    """One rank of a job whose group has a device, alone or beside host memory."""
    with workers.joined(rank, size, rendezvous), pretended_cuda() as told:
        found = {}
        for transport in TRANSPORTS:
            told.clear()
            with patch.object(dist, "get_backend_config", lambda _=None, transport=transport: transport):
                found[transport] = _exchanged(rank, size, f"{out}/kinds.safetensors") | {
                    "n_pinned": told.count(("pinned",))
                }
        Path(f"{out}/{rank}.json").write_text(json.dumps(found), encoding="utf-8")
        dist.barrier()


def _exchanged(rank: int, size: int, path: str) -> dict[str, Any]:
    group = Group(timeout_s=60)
    assert group.largest([float(rank)]) == [float(size - 1)]
    assert group.share(lambda: b"told") == b"told"
    truth, different, why = _kinds(), {}, ""
    carriers: list[str] = []
    with _carriers(carriers):
        ways: list[Any] = [*workers.EXCHANGES, "auto"]
        for way in ways:
            state = _zeros(truth)
            report = ckpt_tool.load(state, path, exchange=way, cast=True, memory_budget_bytes=256 << 10)
            why = report.why
            different[way] = [name for name, each in truth.items() if bits(state[name]) != bits(_as_loaded(name, each))]
    of_host = []
    for is_there in (False, rank == 0):
        kinds: list[str] = []
        with _carriers(kinds):
            host = {name: torch.zeros_like(tensor) for name, tensor in truth.items()}
            ckpt_tool.load(_zeros(truth) if is_there else host, path, exchange="all-to-all", cast=True)
        of_host.append(sorted(set(kinds)))
    return {
        "device": group.device.type, "different": different, "why": why, "carriers": carriers, "of_host": of_host
    }  # fmt: skip


def _zeros(truth: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state on a device, but for a counter; one tensor lies otherwise there, and one is of another type."""
    state: dict[str, torch.Tensor] = {name: on_device(torch.zeros_like(tensor)) for name, tensor in truth.items()}
    state["turned"] = on_device(torch.zeros(40, 30, dtype=torch.float64)).t()
    state["cast"] = on_device(torch.zeros(4099, dtype=torch.bfloat16))
    state["step"] = torch.zeros(())
    return state


def _as_loaded(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16) if name == "cast" else tensor


@contextmanager
def _carriers(kinds: list[str]) -> Iterator[None]:
    """Notes where each all-to-all receives."""
    real = Group.all_to_all

    def carry(self: Group, received: torch.Tensor, *others: Any) -> None:
        kinds.append(received.device.type)
        real(self, received, *others)

    with patch.object(Group, "all_to_all", carry):
        yield


@pytest.mark.dist
def test_a_rank_that_ends_while_a_device_waits(tmp_path: Path) -> None:
    """Who waits for a collective of a device looks whether the others of its host are there, and names who is not."""
    workers.start(waiting, 2, tmp_path)
    took, text = json.loads((tmp_path / "0.json").read_text(encoding="utf-8"))
    assert text == "rank 0 of 2 cannot go on: rank 1 has ended"
    assert took < 30


def waiting(rank: int, size: int, rendezvous: str, out: str) -> None:
    """The first rank waits for what never comes."""
    with workers.joined(rank, size, rendezvous), pretended_cuda():
        group = Group(timeout_s=60)
        if rank == 0:
            group.watch(lambda: [1])
            begun = time.monotonic()
            with pytest.raises(StorageError) as raised:
                group._wait(SimpleNamespace(is_completed=lambda: False))
            found = (time.monotonic() - begun, raised.value.message)
            Path(f"{out}/0.json").write_text(json.dumps(found), encoding="utf-8")


@pytest.mark.parametrize(
    ("config", "bound", "expected"),
    [
        ("cpu:gloo,cuda:gloo", None, "cpu"), ("cpu:gloo,cuda:nccl", "cuda:3", "cpu"), ("cuda:nccl", "cuda:3", "cuda:3"),
        ("cuda:nccl", None, "cuda:0"), ("xpu:xccl", None, "xpu:1"),
    ],
)  # fmt: skip
def test_the_device_of_a_group(config: str, bound: str | None, expected: str) -> None:
    """Host memory where it goes through that, else what the group is bound to, or this thread's current device."""
    group = SimpleNamespace(bound_device_id=None if bound is None else torch.device(bound))
    with (
        pretended_cuda(), patch.object(dist, "get_backend_config", lambda _: config),
        patch.object(torch.xpu, "current_device", lambda: 1),
    ):  # fmt: skip
        assert _device_of(group) == torch.device(expected)


def bits(tensor: torch.Tensor) -> bytes:
    """Bytes of the elements, in order."""
    host = tensor.cpu() if isinstance(tensor, OnDevice) else tensor
    found: bytes = host.resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return found
