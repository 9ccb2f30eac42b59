"""Training states of other programs become Megatron's, moments and masters included, and Megatron's become theirs.

With ``-m peer`` real Megatron resumes from what was written: ``CKPT_PEER_MEGATRON`` names the python of an environment
with megatron-core 0.19.2 and torch 2.13.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.errors import LayoutError
from tests.formats.conformance import Truth
from tests.formats.megatron.hf_training import CONFIG, RUN, save_dcp, torch_state
from tests.formats.megatron.loading import assert_loads
from tests.formats.megatron.places import CHECKPOINTS, dense_shapes, expert_shapes, truth_from_seed

DENSE = truth_from_seed(dense_shapes(4, 128))


EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 48, "norm_topk_prob": True,
}  # fmt: skip


def config_file(folder: Path, **more: Any) -> Path:
    """The model's ``config.json``."""
    path = folder / "config.json"
    path.write_text(json.dumps({**CONFIG, **more}))
    return path


def zeros_from(truth: dict[str, Truth], start: int, rows: int) -> dict[str, Truth]:
    """The same with ``rows`` rows of the vocabulary, zeros from ``start`` on."""
    found = dict(truth)
    for fqn, one in truth.items():
        if fqn.endswith(("word_embeddings.weight", "output_layer.weight")):
            row = len(one.data) // one.shape[0]
            data = one.data[: start * row].ljust(rows * row, b"\0")
            found[fqn] = Truth(one.dtype, (rows, *one.shape[1:]), data)
    return found


def assert_holds(root: Path, truth: dict[str, Truth]) -> None:
    """All tensors of weights and their state are the truth, bit for bit."""
    with open_checkpoint(root) as checkpoint:
        found = {fqn: checkpoint.manifest.tensor(fqn) for fqn in checkpoint.manifest.tensors.fqns}
        assert truth.keys() <= found.keys()
        assert {fqn for fqn in found if "extra_state" not in fqn} == truth.keys()
        for fqn, one in truth.items():
            assert (found[fqn].dtype.name, found[fqn].shape) == (one.dtype, one.shape), fqn
            assert np.ascontiguousarray(checkpoint[fqn].numpy()).tobytes() == one.data, fqn


@pytest.mark.parametrize("to", ["megatron-dist", "megatron-legacy"])
def test_an_fsdp_checkpoint_with_its_optimizer(to: str, tmp_path: Path) -> None:
    """Weights in float32 are the masters, rounded for the model; moments are joined, stacked and padded as they are."""
    source = save_dcp(torch_state(DENSE(), weights=torch.float32), tmp_path / "fsdp")
    result = reshard(
        source, tmp_path / "out", to=to, tp=2, pp=2, dtype="bfloat16", config=config_file(tmp_path), arguments=RUN,
        durable=False,
    )  # fmt: skip
    assert (
        "39 of 39 weights have no master in the source: their masters are the weights themselves (float32), exact"
        in ("\n".join(result.notes))
    )
    assert_holds(tmp_path / "out", zeros_from(DENSE(), 100, 112))


def test_weights_without_masters_become_their_own(tmp_path: Path) -> None:
    """A job in bfloat16 alone: masters are its weights in float32, exactly."""
    source = save_dcp(torch_state(DENSE(), weights=torch.bfloat16), tmp_path / "fsdp")
    options: dict[str, Any] = {"config": config_file(tmp_path), "arguments": RUN, "durable": False}
    reshard(source, tmp_path / "out", to="megatron-dist", tp=2, **options)
    truth = zeros_from(DENSE(), 100, 112)
    for fqn, one in truth.items():
        if fqn.startswith("model."):
            rounded = torch.frombuffer(bytearray(one.data), dtype=torch.bfloat16).float().numpy().tobytes()
            master = fqn.replace("model.", "optimizer.state.param.", 1)
            truth[master] = Truth("float32", one.shape, rounded)
    assert_holds(tmp_path / "out", truth)


def test_zero_partitions_of_a_model_with_experts(tmp_path: Path) -> None:
    """DeepSpeed's masters and moments in flat partitions of ZeRO 1: its masters are Megatron's, experts are stacked."""
    truth = truth_from_seed(expert_shapes(2, 128, 4))()
    source = save_dcp(torch_state(truth, weights=torch.float32), tmp_path / "fsdp")
    reshard(source, tmp_path / "zero", to="deepspeed", dp=3, zero_stage=1, dtype="bfloat16", durable=False)
    config = config_file(tmp_path, **EXPERTS)
    options: dict[str, Any] = {"config": config, "arguments": RUN, "durable": False}
    result = reshard(tmp_path / "zero", tmp_path / "out", to="megatron-dist", dp=2, ep=2, **options)
    assert any("masters are those of the source" in note for note in result.notes)
    assert_holds(tmp_path / "out", zeros_from(truth, 100, 104))
    with open_checkpoint(tmp_path / "out") as checkpoint:
        values = {blob.fqn: blob.value for blob in checkpoint.load_blobs()}
    groups = [
        (number, group, values[f"optimizer.{number}.optimizer.param_groups.{group}.is_expert_parallel"])
        for number in (0, 1) for group in (0, 1)
    ]  # fmt: skip
    assert groups == [(0, 0, False), (0, 1, False), (1, 0, True), (1, 1, True)]
    assert values["optimizer.0.optimizer.param_groups.0.step"] == values["iteration"] == 10


def test_what_no_optimizer_of_megatron_can_hold(tmp_path: Path) -> None:
    """Weights at different steps, or without state, are refused; state that is not Adam's is left out, and said."""
    state = torch_state(DENSE(), weights=torch.float32)
    options: dict[str, Any] = {"config": config_file(tmp_path), "arguments": RUN, "durable": False}
    norm = state["optim"]["state"]["model.norm.weight"]
    norm["step"] = torch.tensor(4.0)
    with pytest.raises(LayoutError, match=r"weights are at the steps \[4, 10\]"):
        reshard(save_dcp(state, tmp_path / "two"), tmp_path / "no", to="megatron-dist", **options)
    norm["step"] = torch.tensor(10.0)
    del norm["exp_avg_sq"]
    with pytest.raises(LayoutError, match="1 weight has no optimizer state, which Megatron asks for"):
        reshard(save_dcp(state, tmp_path / "one"), tmp_path / "no", to="megatron-dist", **options)
    del state["optim"]["state"]["model.layers.1.self_attn.k_proj.weight"]["exp_avg"]
    with pytest.raises(LayoutError, match=r"self_attn.k_proj.weight have no .*exp_avg"):
        reshard(save_dcp(state, tmp_path / "part"), tmp_path / "no", to="megatron-dist", **options)
    for own in state["optim"]["state"].values():
        own["momentum_buffer"] = own.pop("exp_avg", torch.zeros(1))
        own.pop("exp_avg_sq", None)
    result = reshard(save_dcp(state, tmp_path / "sgd"), tmp_path / "out", to="megatron-dist", **options)
    reasons = {one.fqn: one.why for one in result.dropped}
    assert reasons["optim.state.model.norm.weight.momentum_buffer"].startswith("no weight of the model")


def test_state_by_number_that_fits_no_weights(tmp_path: Path) -> None:
    """Two layers of one shape, of which only one was trained: whose numbers they are is not known, and said."""
    state = torch_state(DENSE(), weights=torch.float32)
    names = [name for group in state["optim"]["param_groups"] for name in group["params"]]
    own = {number: state["optim"]["state"][name] for number, name in enumerate(names[:-4])}
    group = {**state["optim"]["param_groups"][0], "params": list(own)}
    source = save_dcp({"model": state["model"], "optim": {"state": own, "param_groups": [group]}}, tmp_path / "ids")
    options: dict[str, Any] = {"config": config_file(tmp_path), "arguments": RUN, "durable": False}
    result = reshard(source, tmp_path / "out", to="megatron", **options)
    reasons = {one.fqn: one.why for one in result.dropped}
    assert "whose state it is, is not known: order and shape do not match" in reasons["optim.state.0.exp_avg"]


TITAN = {
    "model.embed_tokens": "tok_embeddings", "lm_head": "output", "model.norm": "norm",
    "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2", "mlp.up_proj": "feed_forward.w3",
}  # fmt: skip


def titan(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """A tensor as torchtitan has it: rows of queries and keys in rotary pairs."""
    module = name.removesuffix(".weight")
    stem, layer, rest = module.partition("model.layers.")
    number, _, inner = rest.partition(".")
    own = f"layers.{number}.{TITAN[inner]}.weight" if layer else f"{TITAN[stem]}.weight"
    if tensor.ndim == 2 and inner in {"self_attn.q_proj", "self_attn.k_proj"}:
        tensor = tensor.view(-1, 2, 4, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
    return own, tensor.contiguous()


def test_a_run_of_torchtitan_with_its_optimizer(tmp_path: Path) -> None:
    """Rotary pairs become halves in weights and moments alike, in torchtitan's flat form of the optimizer."""
    hf = torch_state(DENSE(), weights=torch.float32)
    state = dict(titan(name, tensor) for name, tensor in hf["model"].items())
    names = {name: titan(name, tensor)[0] for name, tensor in hf["model"].items()}
    for name, own in hf["optim"]["state"].items():
        state |= {f"optimizer.state.{names[name]}.{slot}": titan(name, value)[1] for slot, value in own.items()}
    for group in hf["optim"]["param_groups"]:
        values = {key: value for key, value in group.items() if key != "params"}
        state |= {f"optimizer.param_groups.{names[n]}.{key}": v for n in group["params"] for key, v in values.items()}
    source = save_dcp(state, tmp_path / "titan")
    options: dict[str, Any] = {"config": config_file(tmp_path), "arguments": RUN, "durable": False}
    reshard(source, tmp_path / "out", to="megatron-dist", tp=2, dtype="bfloat16", **options)
    assert_holds(tmp_path / "out", zeros_from(DENSE(), 100, 112))


def model_of(shapes: Mapping[str, torch.Size]) -> torch.nn.Module:
    """Modules with parameters of these names and shapes."""
    root = torch.nn.Module()
    for name, shape in shapes.items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, torch.nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(leaf, torch.nn.Parameter(torch.zeros(shape)))
    return root


@pytest.fixture
def job(tmp_path: Path) -> Iterator[DeviceMesh]:
    """A job of one rank."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def resumed(folder: Path, expected: Mapping[str, Any], mesh: DeviceMesh, *, flat: bool = False) -> dict[str, Any]:
    """What a job of FSDP has after ``dcp.load`` and ``set_state_dict``, in the form of ``torch_state``."""
    model = model_of({name: tensor.shape for name, tensor in expected["model"].items()})
    fully_shard(model, mesh=mesh)
    of_decay = [[p for p in model.parameters() if (p.ndim > 1) == decays] for decays in (True, False)]
    optimizer = torch.optim.AdamW([{"params": params, "weight_decay": 9.0} for params in of_decay], lr=7.0)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=options)
    state = {"model": model_state, "optim": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"], options=options
    )  # fmt: skip
    weights, found = get_state_dict(model, optimizer)
    return {"model": whole(weights), "optim": whole(found)}


def whole(value: Any) -> Any:
    """The same with tensors that are sharded put together."""
    if isinstance(value, dict):
        return {key: whole(part) for key, part in value.items()}
    return value.full_tensor() if isinstance(value, DTensor) else value


def assert_equal_states(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Weights, moments, steps and groups."""
    for name, tensor in expected["model"].items():
        assert torch.equal(found["model"][name], tensor), name
        for slot, value in expected["optim"]["state"][name].items():
            assert torch.equal(found["optim"]["state"][name][slot], value), (name, slot)
    groups = [{**group, "params": sorted(group["params"])} for group in found["optim"]["param_groups"]]
    for group, own in zip(groups, expected["optim"]["param_groups"], strict=True):
        assert {key: group[key] for key in own} == {**own, "params": sorted(own["params"])}


@pytest.mark.parametrize("name", ["td_full_t2p2d2", "td_dpr_t2p2d2", "legacy_t2p2", "td_nodist_t2"])
def test_a_job_of_torch_goes_on_with_a_run_of_megatron(name: str, job: DeviceMesh, tmp_path: Path) -> None:
    """Masters as weights, moments, step, groups with and without decay, whatever form Megatron had them in."""
    options: dict[str, Any] = {"names": "hf", "family": "llama", "true_vocab": 100, "dp": 2, "durable": False}
    reshard(CHECKPOINTS / name / "ckpt", tmp_path / "out", **options)
    expected = torch_state(DENSE(), weights=torch.float32)
    for group in expected["optim"]["param_groups"]:
        group["lr"] = 0.00012580800065610593  # where the schedule of the run was
    found = resumed(tmp_path / "out", expected, job)
    assert_equal_states(found, expected)


@pytest.mark.parametrize("to", ["megatron-dist", "megatron-legacy"])
def test_a_tied_output_layer(to: str, tmp_path: Path) -> None:
    """A running model has its output layer under a second name, Megatron none, or a copy on the last stage."""
    state = torch_state(DENSE(), weights=torch.float32)
    del state["optim"]["state"]["lm_head.weight"]
    for group in state["optim"]["param_groups"]:
        group["params"] = [name for name in group["params"] if name != "lm_head.weight"]
    state["model"]["lm_head.weight"] = state["model"]["model.embed_tokens.weight"]
    source = save_dcp(state, tmp_path / "fsdp")
    config = config_file(tmp_path, tie_word_embeddings=True)
    options: dict[str, Any] = {"config": config, "arguments": RUN, "pp": 2, "durable": False}
    result = reshard(source, tmp_path / "mg", to=to, **options)
    reasons = {one.fqn: one.why for one in result.dropped}
    assert reasons["model.lm_head.weight"] == "the config says that it is tied to the embedding"
    reshard(tmp_path / "mg", tmp_path / "back", names="hf", true_vocab=100, durable=False)
    with open_checkpoint(tmp_path / "back") as checkpoint:
        for name, tensor in state["model"].items():
            assert checkpoint[f"model.{name}"].numpy().tobytes() == tensor.numpy().tobytes(), name
        assert "optim.state.lm_head.weight.exp_avg" not in checkpoint


def test_experts_and_their_moments_for_a_running_model(tmp_path: Path) -> None:
    """As transformers 5 has them in a job: experts of a layer in one tensor, and so their moments."""
    options: dict[str, Any] = {"names": "hf", "family": "qwen_moe_fused", "true_vocab": 100, "durable": False}
    reshard(CHECKPOINTS / "moe_seq_e2/ckpt", tmp_path / "out", **options)
    truth = truth_from_seed(expert_shapes(2, 104, 4))()
    key = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    with open_checkpoint(tmp_path / "out") as checkpoint:
        for layer in range(2):
            name = f"model.layers.{layer}.mlp.experts.gate_up_proj"
            names = {"param": f"model.{name}"} | {s: f"optim.state.{name}.{s}" for s in ("exp_avg", "exp_avg_sq")}
            for slot, fqn in names.items():
                one = truth[f"optimizer.state.{slot}.{key}"]
                expected = np.frombuffer(one.data, np.float32).reshape(one.shape)[layer]
                assert checkpoint[fqn].numpy().tolist() == expected.tolist()
        blobs = {blob.fqn: blob.value for blob in checkpoint.load_blobs()}
    assert blobs[f"optim.state.{name}.step"] == 10
    assert blobs["optim.param_groups.1.weight_decay"] == 0
    assert name in blobs["optim.param_groups.0.params"]


def test_a_job_that_names_each_hyperparameter_goes_on_too(job: DeviceMesh, tmp_path: Path) -> None:
    """Torchtitan's form, ``flatten_optimizer_state_dict``."""
    options: dict[str, Any] = {"names": "hf", "family": "llama", "true_vocab": 100, "durable": False}
    reshard(CHECKPOINTS / "td_full_t2p2d2/ckpt", tmp_path / "out", optim_style="fqn-flat", **options)
    expected = torch_state(DENSE(), weights=torch.float32)
    found = resumed(tmp_path / "out", expected, job, flat=True)
    for group in expected["optim"]["param_groups"]:
        group["lr"] = 0.00012580800065610593
    assert_equal_states(found, expected)


@pytest.mark.peer
@pytest.mark.parametrize(
    ("to", "mesh", "run"),
    [
        ("megatron-dist", {"tp": 2, "pp": 2}, "--tp 2 --pp 2 --zero-rows-from 100 --extra=--no-load-rng"),
        ("megatron-legacy", {"tp": 2, "pp": 2}, "--tp 2 --pp 2 --fmt torch --zero-rows-from 100 --extra=--no-load-rng"),
    ],
)
def test_megatron_resumes_a_run_of_fsdp(
    to: str, mesh: dict[str, int], run: str, launcher: Path, tmp_path: Path
) -> None:
    """``load_checkpoint`` fills model, masters, moments, step and schedule of the run that FSDP began."""
    source = save_dcp(torch_state(DENSE(), weights=torch.float32), tmp_path / "fsdp")
    options: dict[str, Any] = {**mesh, "dtype": "bfloat16", "config": config_file(tmp_path), "arguments": RUN}
    reshard(source, tmp_path / "out", to=to, durable=False, **options)
    assert_loads(launcher, tmp_path / "out", mesh, run)


@pytest.mark.peer
def test_megatron_resumes_a_run_of_deepspeed(launcher: Path, tmp_path: Path) -> None:
    """Experts of two expert-parallel ranks, out of the flat partitions of three ranks of ZeRO."""
    truth = truth_from_seed(expert_shapes(2, 128, 4))()
    source = save_dcp(torch_state(truth, weights=torch.float32), tmp_path / "fsdp")
    reshard(source, tmp_path / "zero", to="deepspeed", dp=3, zero_stage=1, dtype="bfloat16", durable=False)
    config = config_file(tmp_path, **EXPERTS)
    options: dict[str, Any] = {"config": config, "arguments": RUN, "durable": False}
    reshard(tmp_path / "zero", tmp_path / "out", to="megatron", dp=2, ep=2, **options)
    run = "--moe seq --layers 2 --ep 2 --zero-rows-from 100 --extra=--no-load-rng"
    assert_loads(launcher, tmp_path / "out", {"dp": 2}, run)
