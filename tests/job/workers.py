"""Processes of a training job that load checkpoints in layouts of their own; each says on a file what it got."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ckpt_tool
from ckpt_tool.api import checkpoint as checkpoint_module
from ckpt_tool.api.job import load as load_module
from ckpt_tool.api.job import load_manifest as manifest_module
from ckpt_tool.engine.distributed_group import Group
from ckpt_tool.storage.open import open_payload, open_store
from ckpt_tool.storage.store import Listing, Store
from tests.ranks import start_ranks
from tests.storage.recording import RecordingStore

FIXTURES = Path(__file__).parents[2] / "fixtures/torch"
MODEL_SCRIPT = FIXTURES / "make/common.py"
EXCHANGES: tuple[Any, ...] = ("none", "shared-memory", "all-to-all")

ROWS, COLUMNS, WHOLE = Shard(0), Shard(1), Replicate()
CASES: dict[str, tuple[str, tuple[int, ...], tuple[Placement, ...] | None]] = {
    "fsdp to fsdp": ("dcp_fsdp2_4r_fp32", (-1,), (ROWS,)),
    "fsdp to tp": ("dcp_fsdp2_4r_fp32", (-1,), (COLUMNS,)),
    "fsdp to fsdp x tp": ("dcp_fsdp2_4r_fp32", (2, -1), (ROWS, COLUMNS)),
    "fsdp to rows twice": ("dcp_fsdp2_4r_fp32", (2, -1), (ROWS, ROWS)),
    "fsdp x tp to fsdp": ("dcp_fsdp2_tp_2x2", (-1,), (ROWS,)),
    "fsdp x tp to hsdp": ("dcp_fsdp2_tp_2x2", (2, -1), (WHOLE, ROWS)),
    "fsdp x tp to replicas": ("dcp_fsdp2_tp_2x2", (-1,), (WHOLE,)),
    "hf to fsdp x tp": ("hf_sharded", (2, -1), (ROWS, COLUMNS)),
    "hf to plain": ("hf_sharded", (-1,), None),
    "verl to hsdp": ("verl_4r_bf16", (2, -1), (WHOLE, ROWS)),
}
"""Name to fixture, mesh (-1: the ranks that are left) and placements; None for plain tensors."""
UNCUT = frozenset(name for name, (_, _, cut) in CASES.items() if cut is None or COLUMNS not in cut)
"""Cases in which no box is strided in the tensor."""


def start(job: Callable[..., None], size: int, folder: Path) -> None:
    """Run ``job(rank, size, rendezvous, folder)`` in ``size`` processes."""
    start_ranks(job, (size, str(folder / f"rendezvous-{size}"), str(folder)), size)


def layouts(rank: int, world_size: int, rendezvous: str, out: str) -> None:
    """Load every case both ways, and real FSDP2 models."""
    with joined(rank, world_size, rendezvous):
        found = {name: {way: _case(name, way, world_size) for way in EXCHANGES} for name in CASES}
        found["choices"] = _choices(world_size)
        found["models"] = {name: _model(name, world_size) for name in ("fsdp2", "fsdp2 x tp")}
        found["models"]["fsdp1"] = _fsdp1_model()
        Path(f"{out}/{world_size}.{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def memory(rank: int, world_size: int, rendezvous: str, out: str) -> None:
    """How much memory a load takes beside the state, and what a second load of the same structure asks of the group."""
    with joined(rank, world_size, rendezvous):
        found = {way: _memory_of(way, f"{out}/big.safetensors") for way in EXCHANGES}
        found["replayed"] = _replayed(f"{out}/small.safetensors")
        Path(f"{out}/{rank}.json").write_text(json.dumps(found), encoding="utf-8")


def _memory_of(way: Any, path: str) -> dict[str, int]:
    """Bytes by which the process grew at most, and the largest buffers that the report tells of."""
    state = {name: torch.ones_like(tensor) for name, tensor in load_file(path).items()}
    small = {name: torch.ones_like(tensor) for name, tensor in load_file(path.replace("big", "small")).items()}
    ckpt_tool.load(small, path.replace("big", "small"), exchange=way)  # what is imported is not counted
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = _status("VmRSS")
    report = ckpt_tool.load(state, path, exchange=way, memory_budget_bytes=16 << 20)
    grown = _status("VmHWM") - before
    return {"grown": grown, "buffers": report.max_buffer_nbytes, "different": sum(map(bool, _unlike(state, path)))}


def _unlike(state: dict[str, torch.Tensor], path: str) -> list[bool]:
    return [not tensor.equal(load_file(path)[name]) for name, tensor in state.items()]


def _status(key: str) -> int:
    with open("/proc/self/status", encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


def _replayed(path: str) -> dict[str, Any]:
    """Collectives and bits of a first and a second load, and of one after the file has changed."""
    found: dict[str, Any] = {}
    for number, turn in enumerate(("first", "second", "other tensors", "changed", "again")):
        if turn == "changed" and dist.get_rank() == 0:
            time.sleep(0.01)
            save_file({name: tensor + 1 for name, tensor in load_file(path).items()}, path)
        dist.barrier()
        truth = load_file(path)
        state = {name: torch.full_like(tensor, number) for name, tensor in truth.items()}
        if turn == "other tensors" and dist.get_rank() == 1:  # on one rank only
            state = {name: torch.full(tensor.t().shape, float(number)).t() for name, tensor in truth.items()}
        calls: list[str] = []
        with _counted(calls):
            report = ckpt_tool.load(state, path, exchange="none")
        equal = all(state[name].equal(tensor) for name, tensor in truth.items())
        found[turn] = [report.is_replayed, len(calls), equal]
    return found


@contextmanager
def _counted(calls: list[str]) -> Any:
    """Notes each collective."""
    real = Group._wait

    def wait(self: Group, work: Any) -> None:
        calls.append("wait")
        real(self, work)

    Group._wait = wait  # type: ignore[method-assign]
    try:
        yield
    finally:
        Group._wait = real  # type: ignore[method-assign]


@contextmanager
def joined(rank: int, world_size: int, rendezvous: str, *, is_lost: bool = False) -> Any:
    """A gloo group of this process and its siblings; nobody waits for them at its end where one is lost."""
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.FileStore(rendezvous, world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=90))
    yield
    if not is_lost:
        dist.barrier()
        dist.destroy_process_group()


def url(fixture: str) -> str:
    """A fixture's checkpoint."""
    return str(FIXTURES / fixture / "ckpt")


def truth_of(fixture: str) -> dict[str, torch.Tensor]:
    """A fixture's tensors, whole."""
    return load_file(FIXTURES / fixture / "truth.safetensors")


def plain(fixture: str) -> dict[str, torch.Tensor]:
    """A state of plain zeros for a fixture."""
    return {name: torch.zeros_like(tensor) for name, tensor in truth_of(fixture).items()}


def cut_of(tensor: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...] | None) -> torch.Tensor:
    """What torch itself gives this rank; a dimension that a tensor does not have is not cut."""
    if placements is None:
        return tensor
    fitting = [Replicate() if isinstance(p, Shard) and p.dim >= tensor.ndim else p for p in placements]
    return distribute_tensor(tensor, mesh, fitting, src_data_rank=None)


def bits_of(tensor: torch.Tensor) -> bytes:
    """Elements of a local tensor, in order."""
    held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    bits: bytes = held.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return bits


def _case(name: str, way: Any, world_size: int) -> dict[str, Any]:
    fixture, shape, placements = CASES[name]
    sizes = (world_size,) if shape == (-1,) or world_size == 1 else (2, world_size // 2)
    placements = placements[: len(sizes)] if placements is not None else None
    mesh = init_device_mesh("cpu", sizes)
    truth = truth_of(fixture)
    state = {fqn: cut_of(torch.zeros_like(tensor), mesh, placements) for fqn, tensor in truth.items()}
    expected = {fqn: bits_of(cut_of(tensor, mesh, placements)) for fqn, tensor in truth.items()}
    with _recorded() as stores:
        report = ckpt_tool.load(state, url(fixture), exchange=way, memory_budget_bytes=1 << 20)
    return {
        "different": [fqn for fqn, bits in expected.items() if bits_of(state[fqn]) != bits],
        "needed": sum(len(bits) for bits in expected.values()),
        "distinct": sum(tensor.nbytes for tensor in truth.values()),
        "recorded": sum(store.nbytes for store in stores),
        "report": asdict(report),
    }


def _choices(world_size: int) -> dict[str, Any]:
    """What ``auto`` does on storage that gives a rank 1 MB a second: (way, why, whether the bits are right)."""
    truth = truth_of("hf_sharded")
    mesh = init_device_mesh("cpu", (world_size,))
    found: dict[str, Any] = {}
    for name, placements in {"replicas": None, "rows": (ROWS,)}.items():
        state = {fqn: cut_of(torch.zeros_like(tensor), mesh, placements) for fqn, tensor in truth.items()}
        with slow_storage():
            report = ckpt_tool.load(state, url("hf_sharded"))
        equal = all(bits_of(state[fqn]) == bits_of(cut_of(tensor, mesh, placements)) for fqn, tensor in truth.items())
        found[name] = [report.exchange, report.why, equal]
    return found


def _model(name: str, world_size: int) -> dict[str, Any]:
    """A model as a training script builds it, filled from a checkpoint of another layout, against the truth."""
    common = _model_script()
    model = common.make_model(torch.float32, seed=999)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    if name == "fsdp2 x tp" and world_size > 1:
        both = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
        mesh = both["dp"]
        for layer in model.model.layers:
            plan = {
                **{f"self_attn.{part}_proj": ColwiseParallel() for part in "qkv"},
                "self_attn.o_proj": RowwiseParallel(),
                **{f"mlp.{part}_proj": ColwiseParallel() for part in ("gate", "up")},
                "mlp.down_proj": RowwiseParallel(),
            }
            parallelize_module(layer, both["tp"], plan)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    ckpt_tool.load({"model": model}, url("dcp_fsdp2_4r_fp32"))
    truth = truth_of("dcp_fsdp2_4r_fp32")
    state = model.state_dict()
    full = {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in state.items()}
    kinds = {type(p).__name__ for value in state.values() if isinstance(value, DTensor) for p in value.placements}
    return {
        "different": [key for key, value in full.items() if bits_of(value) != bits_of(truth[f"model.{key}"])],
        "n_tensors": len(full),
        "placements": sorted(kinds),
    }


def _fsdp1_model() -> dict[str, Any]:
    """The sharded state dict of FSDP1, shard by shard against the truth."""
    model = FullyShardedDataParallel(
        _model_script().make_model(torch.float32, seed=999), use_orig_params=True, device_id=torch.device("cpu")
    )
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = model.state_dict()
    ckpt_tool.load({"model": state}, url("dcp_fsdp2_4r_fp32"))
    truth = truth_of("dcp_fsdp2_4r_fp32")
    different = []
    for key, value in state.items():
        whole = truth[f"model.{key}"]
        shards = value.local_shards() if isinstance(value, ShardedTensor) else []
        parts = [(shard.tensor, shard.metadata.shard_offsets, shard.metadata.shard_sizes) for shard in shards]
        if not isinstance(value, ShardedTensor):
            parts = [(value, [0] * whole.ndim, list(whole.shape))]
        for tensor, offsets, sizes in parts:
            index = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            if bits_of(tensor) != bits_of(whole[index]):
                different.append(key)
    return {
        "different": different,
        "n_tensors": len(state),
        "placements": sorted({type(value).__name__ for value in state.values()}),
    }


def _model_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fixture_model", MODEL_SCRIPT)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(MODEL_SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["fixture_model"] = module
    spec.loader.exec_module(module)
    return module


@contextmanager
def _recorded() -> Any:
    """Stores of payload opened meanwhile; the metadata must be opened by the first rank alone."""
    stores: list[RecordingStore] = []

    def recording(url: str | os.PathLike[str]) -> Store:
        stores.append(RecordingStore(open_payload(url)))
        return stores[-1]

    def refuse(url: str | os.PathLike[str]) -> tuple[Store, Listing]:
        raise AssertionError(f"a rank that is not the first opened {os.fspath(url)}")

    load_module.open_payload = recording  # type: ignore[attr-defined,assignment]
    if dist.get_rank():
        checkpoint_module.open_store = manifest_module.open_store = refuse  # type: ignore[attr-defined,assignment]
    try:
        yield stores
    finally:
        load_module.open_payload = open_payload  # type: ignore[attr-defined]
        checkpoint_module.open_store = manifest_module.open_store = open_store  # type: ignore[attr-defined]


class _SlowStore(RecordingStore):
    """Storage of 1 MB a second."""

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        time.sleep(buffer.nbytes * 1e-6)
        super().read_into(path, offset, buffer)


def slow_storage() -> AbstractContextManager[Any]:
    """Payload is read from storage of 1 MB a second."""
    slow: AbstractContextManager[Any] = store_of(_SlowStore)
    return slow


@contextmanager
def store_of(kind: type[RecordingStore]) -> Any:
    """Payload is read through a store of this class."""
    load_module.open_payload = lambda url: kind(open_payload(url))  # type: ignore[attr-defined,assignment,misc]
    try:
        yield
    finally:
        load_module.open_payload = open_payload  # type: ignore[attr-defined]
