"""Experts that AutoEP has placed, made by hand as DeepSpeed 0.19.8 saves them; real ones in ``tests/consumers``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.api.trust.verify import verify
from ckpt_tool.errors import FormatError, Unsupported
from ckpt_tool.formats.deepspeed.reader import READER
from ckpt_tool.formats.deepspeed.universal import READER as UNIVERSAL
from ckpt_tool.storage.memory import MemoryStore
from tests.formats.conformance import Truth, all_rows, assemble, source_of
from tests.formats.deepspeed.made import FOLDER, model_state, numbered, saved, stage2_optim, states_of, with_latest

PREFIX, WORLD, EP, LOCAL = "layers.0.mlp.experts", 4, 2, 3
DENSE = {"norm": numbered(5), "router": numbered(EP * LOCAL, 5, start=50)}
SHAPES = {"w1": (3, 4), "w2": (4, 3), "w3": (3, 4)}
EXPERTS = {
    f"{PREFIX}.{name}.{number}": numbered(*shape, start=100 * number + 1000 * row)
    for row, (name, shape) in enumerate(SHAPES.items())
    for number in range(EP * LOCAL)
}
WEIGHTS = {**DENSE, **EXPERTS}
PACKED = [f"{PREFIX}.{name}" for name in SHAPES]
PLACED = {"version": 1, "num_experts": 6, "ep_size": 2, "ranks": [
    {"rank": 0, "experts": [0, 1, 2]}, {"rank": 1, "experts": [3, 4, 5]},
]}  # fmt: skip
LAYER: dict[str, Any] = {
    "expert_key_prefix": PREFIX, "num_experts": EP * LOCAL, "num_local_experts": LOCAL, "ep_size": EP,
    "checkpoint_format": "per_expert_files", "expert_placement": PLACED,
}  # fmt: skip


def packed(tensors: Mapping[str, torch.Tensor], ep: int) -> dict[str, torch.Tensor]:
    """The tensors that an expert-parallel rank has of all of its experts."""
    mine = range(ep * LOCAL, (ep + 1) * LOCAL)
    return {name: torch.stack([tensors[f"{name}.{number}"] for number in mine]) for name in PACKED}


def optimizer(rank: int, *, paddings: bool) -> dict[str, Any]:
    """The file of a data-parallel rank: its parts of what all ranks share, and of what those with its experts do."""
    states = states_of(WEIGHTS)
    own = {state: packed(tensors, rank % EP) for state, tensors in states.items()}
    dense = stage2_optim(states, [list(DENSE)], WORLD, rank)["optimizer_state_dict"]
    experts = stage2_optim(own, [PACKED], WORLD // EP, rank // EP)["optimizer_state_dict"]
    both = {**dense}
    for key in ("single_partition_of_fp32_groups", "group_paddings", "partition_count"):
        both[key] = [*dense[key], *experts[key]]
    both["base_optimizer_state"] = {
        "state": {number: one["base_optimizer_state"]["state"][0] for number, one in enumerate((dense, experts))},
        "param_groups": [{"lr": 0.5, "params": [0]}, {"lr": 0.5, "params": [1]}],
    }
    if paddings:
        both["param_alignment_paddings"] = [[0, 0], [0, 0, 0]]
    return {"optimizer_state_dict": both, "ds_version": "0.19.8"}


def files(layer: Mapping[str, Any] = LAYER, *, paddings: bool = False, **more: Any) -> dict[str, bytes]:
    """A checkpoint of four ranks, two of which share the same experts."""
    model = model_state(DENSE, [list(DENSE)], dp_world_size=WORLD, ds_autoep_layers=[layer], **more)
    model["param_shapes"].append({name: torch.Size((LOCAL, *SHAPES[name[-2:]])) for name in PACKED})
    found = {"mp_rank_00_model_states.pt": model}
    for number in range(EP * LOCAL):
        own = {f"{name}.{number}": EXPERTS[f"{name}.{number}"] for name in PACKED}
        found[f"layer_0_expert_{number}_mp_rank_00_model_states.pt"] = own
    for rank in range(WORLD):
        found[f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = optimizer(rank, paddings=paddings)
    return {FOLDER + name: saved(value) for name, value in found.items()}


@pytest.mark.parametrize("paddings", [False, True])
def test_every_expert_is_a_parameter(paddings: bool) -> None:
    """Weights, masters and moments of each, out of the tensors that ranks have of several."""
    store = MemoryStore(with_latest(files(paddings=paddings)))
    source = source_of(store)
    manifest = READER.read(source)
    chunks = READER.resolve(source, manifest, all_rows(manifest))
    expected = {f"module.{name}": tensor for name, tensor in WEIGHTS.items()}
    for state, tensors in states_of(WEIGHTS).items():
        expected |= {f"optimizer.state.{name}.{state}": tensor for name, tensor in tensors.items()}
    found = {fqn: assemble(store, manifest, chunks, fqn) for fqn in manifest.tensors.fqns if fqn[-5:] != ".step"}
    assert found == {
        fqn: Truth("float32", tuple(tensor.shape), tensor.numpy().tobytes()) for fqn, tensor in expected.items()
    }


def test_it_goes_on_as_dcp(tmp_path: Path) -> None:
    """It is whole, and can be written as anything but DeepSpeed's own: that is refused from a copy too."""
    for name, data in with_latest(files()).items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    assert verify(tmp_path / "source", level="full").is_ok
    reshard(tmp_path / "source", tmp_path / "dcp", to="dcp", mesh="dp=2", durable=False)
    for source in ("source", "dcp"):
        for to in ("deepspeed", "deepspeed-universal"):
            with pytest.raises(Unsupported, match="AutoEP has placed are read, and not written"):
                reshard(tmp_path / source, tmp_path / "out", to=to, zero_stage=1 if to == "deepspeed" else None)


def test_its_universal_form() -> None:
    """There a tensor has the experts of all ranks, and no rank's own are missed."""
    step = FOLDER.replace("/", "_universal/")
    found = {f"{step}mp_rank_00_model_states.pt": files()[f"{FOLDER}mp_rank_00_model_states.pt"]}
    states = states_of(WEIGHTS)
    expected: dict[str, torch.Tensor] = {}
    for state, tensors in states.items():
        whole = {name: torch.cat([packed(tensors, ep)[name] for ep in range(EP)]) for name in PACKED}
        whole |= {name: tensors[name] for name in DENSE}
        expected |= {f"optimizer.state.{name}.{state}": tensor for name, tensor in whole.items()}
        for name, tensor in whole.items():
            found[f"{step}zero/{name}/{state}.pt"] = saved({"param": tensor})
    store = MemoryStore({**found, "latest_universal": step[:-1].encode()})
    manifest = UNIVERSAL.read(source_of(store))
    chunks = UNIVERSAL.resolve(source_of(store), manifest, all_rows(manifest))
    assert {fqn: assemble(store, manifest, chunks, fqn).data for fqn in expected} == {
        fqn: tensor.numpy().tobytes() for fqn, tensor in expected.items()
    }
    assert assemble(store, manifest, chunks, f"module.{PACKED[0]}").shape == (EP * LOCAL, 3, 4)
    assert not any("absent" in note for note in manifest.notes)


@pytest.mark.parametrize(
    ("layer", "more", "error", "message"),
    [
        ({"checkpoint_format": "zero3_partitioned"}, {}, Unsupported, "saved as 'zero3_partitioned'"),
        ({}, {"folding": {"version": 1}}, Unsupported, "on tensor-parallel ranks"),
        (
            {"expert_placement": {"ranks": [{"rank": 0, "experts": [1, 0, 2]}]}},
            {},
            Unsupported,
            "in another order than that of their numbers",
        ),
        ({"expert_placement": 7}, {}, Unsupported, "in another order"),
        (
            {"num_local_experts": 2, "expert_placement": None},
            {},
            FormatError,
            r"has shape \[3, 3, 4\], and 2 experts are on a rank",
        ),
        ({"num_local_experts": "x"}, {}, FormatError, "'x' experts on each of 2 ranks"),
        ({"ep_size": -1}, {}, FormatError, "on each of -1 ranks"),
    ],
)
def test_what_is_not_read(layer: dict[str, Any], more: dict[str, Any], error: type[Exception], message: str) -> None:
    """Each with what it is."""
    with pytest.raises(error, match=message):
        READER.read(source_of(MemoryStore(with_latest(files({**LAYER, **layer}, **more)))))


@pytest.mark.parametrize("value", [7, [7]])
def test_records_that_are_none(value: object) -> None:
    """Another thing where the list of layers should be."""
    with pytest.raises(FormatError, match="ds_autoep_layers: expected"):
        READER.read(source_of(MemoryStore(with_latest(files() | broken(value)))))


def broken(value: object) -> dict[str, bytes]:
    """A model state with another record."""
    model = model_state(DENSE, [list(DENSE)], dp_world_size=WORLD, ds_autoep_layers=value)
    return {f"{FOLDER}mp_rank_00_model_states.pt": saved(model)}
