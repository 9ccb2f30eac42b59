"""torch reads the DCP checkpoints that the tool wrote from real ones: by one process, and by jobs of 1, 2 and 4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

from tests.consumers.jobs import WORLD_SIZES, Load, run
from tests.consumers.written import LAYOUTS, Written, bits, leaves, restored
from tests.ranks import start_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:torch.distributed is unavailable"),
]
NESTED = "torch/dcp_fsdp2_4r_fp32"
DIMS: dict[str, dict[int, tuple[int, ...]]] = {  # none of them is how the checkpoint was written
    NESTED: {1: (0,), 2: (1,), 4: (0,)},
    "torch/dcp_fsdp2_tp_2x2": {1: (0,), 2: (0,), 4: (1, 0)},
    "torch/hf_sharded": {1: (0,), 2: (1,), 4: (0, 1)},
    "torch/verl_4r_bf16": {1: (0,), 2: (1,), 4: (0,)},
    "deepspeed/accelerate_fsdp2": {1: (0,), 2: (1,), 4: (0, 0)},
    "deepspeed/torchtitan_dp2tp2": {1: (0,), 2: (0,), 4: (1,)},
}
FROM_DCP = sorted(set(LAYOUTS) - {"torch/hf_sharded", "torch/verl_4r_bf16"})


def tensors_by_name(state: Any, written: Written) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Bits of the tensors that the truth has, under their dotted names."""
    found = {".".join(map(str, path)): leaf for path, leaf in leaves(state).items()}
    return {fqn: found[fqn] for fqn in written.tensors}


@pytest.mark.parametrize("name", LAYOUTS)
def test_metadata(dcp_checkpoints: dict[str, Written], name: str) -> None:
    """``FileSystemReader.read_metadata`` gives every tensor its global size, dtype and boxes that fill it."""
    written = dcp_checkpoints[name]
    entries = FileSystemReader(written.root).read_metadata().state_dict_metadata
    for fqn, (dtype, shape, _) in written.tensors.items():
        entry = entries[fqn]
        assert (entry.properties.dtype, tuple(entry.size)) == (getattr(torch, dtype), shape)
        assert sum(chunk.sizes.numel() for chunk in entry.chunks) == entry.size.numel()


@pytest.mark.parametrize("name", LAYOUTS)
def test_converted_to_one_file(dcp_checkpoints: dict[str, Written], name: str, tmp_path: Path) -> None:
    """``dcp_to_torch_save`` makes one nested dict of it that has every tensor bit for bit."""
    written = dcp_checkpoints[name]
    assert tensors_by_name(restored(written.root, tmp_path), written) == dict(written.tensors)


@pytest.mark.parametrize("name", FROM_DCP)
def test_nothing_else_changed(dcp_checkpoints: dict[str, Written], name: str, tmp_path: Path) -> None:
    """The nested dicts of original and copy are equal: keys, tensors, param_groups, schedulers, steps, everything."""
    written = dcp_checkpoints[name]
    folders = sorted(path.parent for path in Path(written.case.url).rglob(".metadata"))
    original = {key: value for at, f in enumerate(folders) for key, value in restored(f, tmp_path / str(at)).items()}
    expected = leaves(original)
    of_ranks = {path for path in expected if path[0] == "dataloader" and path[1] in {"dp_rank_0", "dp_rank_1"}}
    assert leaves(restored(written.root, tmp_path / "copy")) == {k: v for k, v in expected.items() if k not in of_ranks}
    assert bool(of_ranks) == (name == "deepspeed/torchtitan_dp2tp2")  # left behind by --rank-state drop


def test_a_flat_state_of_some_keys(dcp_checkpoints: dict[str, Written]) -> None:
    """A process without a job loads only what it names: two flat keys, one of them an object."""
    written = dcp_checkpoints[NESTED]
    state: dict[str, Any] = {"model.lm_head.weight": torch.zeros(97, 24), "optim.param_groups.0.lr": None}
    dcp.load(state, checkpoint_id=written.root, no_dist=True)
    assert bits(state["model.lm_head.weight"]) == written.tensors["model.lm_head.weight"]
    assert state["optim.param_groups.0.lr"] == 0.0025


@pytest.fixture(scope="session")
def jobs(dcp_checkpoints: dict[str, Written], tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """What jobs of each number of processes loaded; one start of four processes for all of them."""
    folder = tmp_path_factory.mktemp("jobs")
    loads = [Load(name, str(dcp_checkpoints[name].root), DIMS[name]) for name in LAYOUTS]
    start_ranks(run, (str(folder / "rendezvous"), loads, str(dcp_checkpoints[NESTED].root), str(folder)), 4)
    return {n: torch.load(folder / f"{n}.pt", weights_only=False) for n in WORLD_SIZES}


@pytest.mark.dist
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_jobs_load_it(
    jobs: dict[int, Any], dcp_checkpoints: dict[str, Written], name: str, world_size: int, tmp_path: Path
) -> None:
    """``dcp.load`` into plain tensors, or DTensors cut along other dimensions, gives every tensor and every object."""
    written, loaded = dcp_checkpoints[name], jobs[world_size][name]
    assert tensors_by_name(loaded, written) == dict(written.tensors)
    assert leaves(loaded) == leaves(restored(written.root, tmp_path))


@pytest.mark.dist
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_training_resumes(jobs: dict[int, Any], dcp_checkpoints: dict[str, Written], world_size: int) -> None:
    """An FSDP2 model and its AdamW, resumed the way a training script does it, have all weights, moments and rates."""
    resumed, expected = jobs[world_size]["model"], dcp_checkpoints[NESTED].tensors
    loaded = {f"model.{fqn}": bits(value) for fqn, value in resumed["model"].items()}
    for fqn, state in resumed["state"].items():
        loaded |= {f"optim.state.{fqn}.{name}": bits(value) for name, value in state.items()}
    assert loaded == {fqn: tensor for fqn, tensor in expected.items() if fqn.startswith(("model.", "optim."))}
    rates = {key: resumed["hyperparameters"][key] for key in ("lr", "betas", "eps", "weight_decay")}
    assert rates == {"lr": 0.0025, "betas": (0.9, 0.999), "eps": 1e-08, "weight_decay": 0.01}
