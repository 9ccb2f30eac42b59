"""Megatron-FSDP's checkpoints (``fsdp_dtensor``) and ``torch_dist``, both ways, on one processor (R64)."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.api.inspect import inspect
from ckpt_tool.errors import LayoutError, UsageError
from ckpt_tool.geometry.box import Box
from tests.formats.conformance import FIXTURES, Truth
from tests.formats.megatron.places import CHECKPOINTS, dense_shapes, expert_shapes, truth_from_seed

DENSE, EXPERTS = dense_shapes(4, 112), expert_shapes(2, 104, 4)
GROUP = {
    "is_expert_parallel": False, "default_config": True, "lr_mult": 1.0, "is_decoupled_lr": False, "max_lr": 1e-3,
    "min_lr": 1e-5, "lr": 5e-4, "betas": (0.9, 0.95), "eps": 1e-8, "step": 10,
}  # fmt: skip
MOMENTS = ("exp_avg", "exp_avg_sq")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable):UserWarning")


def parts(key: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
    """What Megatron-FSDP has of a tensor of ``torch_dist``, by the module's name: layers, experts, halves apart."""
    if key.startswith("decoder.layers."):
        rest = key.removeprefix("decoder.layers.")
        found: dict[str, torch.Tensor] = {}
        for number, layer in enumerate(value):
            experts = enumerate(layer) if "experts.experts" in rest else [(None, layer)]
            for expert, one in experts:
                name = f"decoder.layers.{number}.{rest}"
                if expert is not None:
                    name = name.replace("experts.experts.", "experts.") + str(expert)
                if "linear_fc1.weight" in name:
                    found[f"{name}_w"], found[f"{name}_v"] = one.chunk(2)
                else:
                    found[name] = one
        return found
    return {key: value}


def hand_made(shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """The state dict that Megatron-FSDP saves: masters as weights, moments and hyperparameters by parameter."""
    truth = truth_from_seed(shapes)()
    model: dict[str, Any] = {}
    state: dict[str, Any] = {}
    meta: dict[str, Any] = {}
    for key in shapes:
        values = {slot: tensor_of(truth[f"optimizer.state.{slot}.{key}"]) for slot in ("param", *MOMENTS)}
        own = {slot: parts(key, value) for slot, value in values.items()}
        for name, master in own["param"].items():
            model[f"module.{name}"] = master.clone()
            parameter = f"module.module.module.{name}"
            state[parameter] = {slot: own[slot][name].clone() for slot in MOMENTS}
            decays = master.ndim > 1
            meta[parameter] = {**GROUP, "wd_mult": float(decays), "weight_decay": 0.1 * decays}
    args = argparse.Namespace(
        num_layers=max(shape[0] for key, shape in shapes.items() if key.startswith("decoder.layers.")), bf16=True,
        tensor_model_parallel_size=1, pipeline_model_parallel_size=1, transformer_impl="transformer_engine",
        swiglu=True, num_experts=4 if any("experts" in key for key in shapes) else None,
        untie_embeddings_and_output_weights=True, make_vocab_size_divisible_by=8, vocab_size=100,
    )  # fmt: skip
    return {
        "model": model, "optimizer": {"state": state, "param_to_group_meta": meta}, "args": args, "iteration": 10,
        "checkpoint_version": 3.0, "rng_state": {"(0, 0)": [{"torch_rng_state": torch.zeros(4, dtype=torch.uint8)}]},
    }  # fmt: skip


def tensor_of(truth: Truth) -> torch.Tensor:
    """A float32 tensor."""
    return torch.from_numpy(np.frombuffer(truth.data, np.float32).reshape(truth.shape).copy())


def contents(root: Path) -> dict[str, Truth]:
    """Weights and their state, as they are read back."""
    with open_checkpoint(root) as checkpoint:
        names = [
            meta.fqn
            for meta in checkpoint.manifest.tensors
            if meta.path[0] == "model" or meta.path[:2] == ("optimizer", "state")
        ]
        metas = {fqn: checkpoint.manifest.tensor(fqn) for fqn in names}
        arrays = checkpoint.read([(fqn, Box.whole(meta.shape)) for fqn, meta in metas.items()])
        return {
            fqn: Truth(metas[fqn].dtype.name, metas[fqn].shape, np.ascontiguousarray(array).tobytes())
            for fqn, array in zip(names, arrays, strict=True)
        }


@pytest.mark.parametrize("shapes", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_fsdp_dtensor_becomes_torch_dist(shapes: dict[str, tuple[int, ...]], tmp_path: Path) -> None:
    """What torch saves of such a state dict comes out as Megatron's own files have it, bit for bit."""
    dcp.save(hand_made(shapes), checkpoint_id=tmp_path / "iter_0000010", no_dist=True)
    options: dict[str, Any] = {"arguments": {"padded_vocab_size": shapes["output_layer.weight"][0]}, "durable": False}
    if shapes is DENSE:
        options["arguments"]["make_vocab_size_divisible_by"] = 112
    result = reshard(tmp_path / "iter_0000010", tmp_path / "out", to="megatron-dist", **options)
    assert contents(tmp_path / "out") == truth_from_seed(shapes)()
    facts = dict(inspect(tmp_path / "iter_0000010").run_facts)
    assert facts["program"].startswith("Megatron-FSDP")
    n_layers = 2 if shapes is EXPERTS else 4
    assert facts["layers"].startswith(f"0-{n_layers - 1}, each under names of its own")
    assert facts.get("experts") == ("4, numbered 0-3 whatever rank has them" if shapes is EXPERTS else None)
    assert facts["optimizer"] == "fsdp_dtensor, by parameter"
    assert facts["reshards"].startswith("weights and optimizer to any TP")
    assert {d.fqn.partition(".")[0] for d in result.dropped} == {"rng_state"}
    with open_checkpoint(tmp_path / "out") as checkpoint:
        values = {blob.fqn: blob.value for blob in checkpoint.load_blobs()}
    assert sorted(values[f"optimizer.optimizer.param_groups.{n}.wd_mult"] for n in range(2)) == [0.0, 1.0]
    assert values["optimizer.optimizer.param_groups.0.step"] == values["iteration"] == 10


@pytest.mark.parametrize(
    ("name", "shapes"), [("td_full_t2p2d2", DENSE), ("moe_seq_e2", EXPERTS)], ids=["dense", "experts"]
)
def test_torch_dist_becomes_fsdp_dtensor(name: str, shapes: dict[str, tuple[int, ...]], tmp_path: Path) -> None:
    """Names, shapes and values are those that Megatron-FSDP saves; torch loads them; and back again nothing changed."""
    folder = tmp_path / "iter_0000010"
    reshard(CHECKPOINTS / name / "ckpt", folder, to="dcp", dp=2, names="megatron-fsdp", durable=False)
    expected = hand_made(shapes)
    listed = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    wanted = {
        **{f"model.{key}": value for key, value in expected["model"].items()},
        **{
            f"optimizer.state.{key}.{slot}": value
            for key, own in expected["optimizer"]["state"].items()
            for slot, value in own.items()
        },
    }
    assert {key for key in listed if key.startswith(("model.", "optimizer.state."))} == set(wanted)
    loaded = {key: torch.empty_like(value) for key, value in wanted.items()}
    dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    assert all(torch.equal(loaded[key], value) for key, value in wanted.items())
    described = {key.rpartition(".")[0] for key in listed if key.startswith("optimizer.param_to_group_meta.")}
    assert described == {f"optimizer.param_to_group_meta.{key}" for key in expected["optimizer"]["param_to_group_meta"]}
    reshard(folder, tmp_path / "back", to="megatron-legacy", tp=2, ep=1, durable=False)
    with open_checkpoint(tmp_path / "back") as checkpoint:
        assert checkpoint.manifest.info["optimizer_form"] == "distrib_optim"


def test_other_sources_are_refused(tmp_path: Path) -> None:
    """Such names are made of Megatron's alone, and what they are read back from must be all there."""
    with pytest.raises(UsageError, match="given to checkpoints of Megatron"):
        reshard(FIXTURES / "torch/dcp_ddp_dedup/ckpt", tmp_path / "out", to="dcp", names="megatron-fsdp")
    state = hand_made(DENSE)
    del state["model"]["module.decoder.layers.2.mlp.linear_fc1.weight_v"]
    dcp.save(state, checkpoint_id=tmp_path / "cut", no_dist=True)
    with pytest.raises(LayoutError, match="its part 'v' is missing"):
        reshard(tmp_path / "cut", tmp_path / "out", to="megatron-dist", durable=False)
