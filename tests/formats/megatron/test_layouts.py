"""Layouts that no fixture has, built by hand: uneven stages, tied embeddings, experts, both orders of registration."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_tool.api.trust.verify import verify
from ckpt_tool.errors import FormatError, LayoutError
from ckpt_tool.formats.base import Reader
from ckpt_tool.formats.megatron.dist_reader import READER as DIST
from ckpt_tool.formats.megatron.rank_reader import READER as RANKS
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.storage.memory import MemoryStore
from tests.formats.conformance import Truth, all_rows, assemble, source_of
from tests.formats.megatron.build import (
    DistWriter,
    add_buckets,
    add_gathered,
    add_weights,
    common_state,
    legacy_files,
)
from tests.formats.megatron.run import SLOTS, Run

EVEN = (((0,),), ((1,),))
UNEVEN = (((0, 1, 2),), ((3, 4),))
VIRTUAL = (((0,), (2,)), ((1,), (3, 4)))
RUNS = {
    "one-rank": Run(),
    "dp3": Run(dp=3),
    "tp2-pp2-uneven-dp3": Run(tp=2, dp=3, layers=UNEVEN),
    "tp4-buckets": Run(tp=4, dp=2, bucket_numel=300),
    "tp2-pp2-buckets-te": Run(tp=2, dp=2, layers=UNEVEN, bucket_numel=500, order="transformer_engine"),
    "pp2-vpp2-uneven": Run(dp=2, layers=VIRTUAL),
    "pp2-tied": Run(dp=2, layers=EVEN, is_tied=True),
    "tp2-pp2-tied-buckets": Run(tp=2, dp=1, layers=UNEVEN, is_tied=True, bucket_numel=400),
    "pp2-predicting": Run(dp=2, layers=EVEN, n_predicting=1),
    "experts-ep2-predicting-twice": Run(tp=2, dp=2, ep=2, n_experts=4, layers=UNEVEN, n_predicting=2),
    "experts-ep1": Run(dp=2, n_experts=4),
    "experts-ep2": Run(dp=2, ep=2, n_experts=4),
    "first-layer-dense-pp2": Run(tp=2, dp=2, ep=2, n_experts=4, n_dense=1, layers=UNEVEN),
    "experts-ep2-tp2-pp2": Run(tp=2, dp=2, ep=2, n_experts=4, layers=EVEN),
}
every_run = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)


def dist_files(run: Run, add_state: Callable[[DistWriter], None], **changes: object) -> dict[str, bytes]:
    """A ``torch_dist`` checkpoint of a run, its arguments changed."""
    writer = DistWriter(run)
    add_weights(writer)
    add_state(writer)
    writer.add_object("common_state/shard_0_1", common_state(run, **changes))
    return writer.files()


def tensors_of(reader: Reader, files: Mapping[str, bytes]) -> tuple[Manifest, dict[str, Truth]]:
    """The manifest, and every tensor assembled."""
    store = MemoryStore(files)
    manifest = reader.read(source_of(store))
    chunks = reader.resolve(source_of(store), manifest, all_rows(manifest))
    return manifest, {fqn: assemble(store, manifest, chunks, fqn) for fqn in manifest.tensors.fqns}


def changed_model(run: Run, change: Callable[[dict[str, Any]], None]) -> dict[str, bytes]:
    """Per-rank files with every model's state dict changed."""
    files = {path: data for path, data in legacy_files(run).items() if path.endswith("model_optim_rng.pt")}
    for path, data in files.items():
        root = torch.load(io.BytesIO(data), weights_only=False)
        change(root)
        stream = io.BytesIO()
        torch.save(root, stream)
        files[path] = stream.getvalue()
    return files


@every_run
def test_buckets_become_tensors(run: Run) -> None:
    """``dp_reshardable`` state of any layout reads as state in the shape of the weights, bit for bit (R51)."""
    manifest, tensors = tensors_of(DIST, dist_files(run, add_buckets))
    assert manifest.info.get("optimizer_undecoded") is None
    assert tensors == run.truth()


@every_run
def test_gathered_state_becomes_tensors(run: Run) -> None:
    """``dp_zero_gather_scatter`` objects read the same."""
    manifest, tensors = tensors_of(DIST, dist_files(run, add_gathered))
    assert manifest.info["optimizer_form"] == "dp_zero_gather_scatter"
    assert tensors == run.truth()
    assert not any("param_state" in blob.fqn for blob in manifest.blobs)


@every_run
@pytest.mark.parametrize("shares_storage", [True, False], ids=["ddp-buffer", "own-storages"])
def test_rank_files_become_tensors(run: Run, shares_storage: bool) -> None:
    """Per-rank files of any layout read the same, whether tensors share the gradient buffer's storage or not."""
    manifest, tensors = tensors_of(RANKS, legacy_files(run, shares_storage=shares_storage))
    assert tensors == run.truth()
    assert manifest.info["layer_stages"] == [
        sorted(layer for chunk in stage for layer in chunk) for stage in run.layers
    ]
    assert list(RANKS.check(source_of(MemoryStore(legacy_files(run))), manifest)) == [] or not shares_storage


def test_stage_map_is_told() -> None:
    """Uneven stages are told by who saved a layer (R62)."""
    manifest, _ = tensors_of(DIST, dist_files(RUNS["tp2-pp2-uneven-dp3"], add_buckets))
    assert manifest.info["layer_stages"] == [[0, 1, 2], [3, 4]]


def test_bucket_size_of_rank_files_need_not_be_known() -> None:
    """The weights' places in the shared buffer tell where buckets end, also when the arguments say nothing of it."""
    run = Run(tp=2, dp=2, layers=UNEVEN, bucket_numel=500)

    def change(root: dict[str, Any]) -> None:
        del root["args"].overlap_grad_reduce
        del root["args"].ddp_bucket_size

    _, tensors = tensors_of(RANKS, {**legacy_files(run), **changed_model(run, change)})
    assert tensors == run.truth()


@pytest.mark.parametrize("bucket_numel", [500, 1000])
def test_bucket_size_that_is_needed_is_asked_for(bucket_numel: int) -> None:
    """Gathered state without that fact is decoded when one split fits the sizes, else left and the fact named (R51)."""
    run = Run(bucket_numel=bucket_numel)
    manifest, tensors = tensors_of(DIST, dist_files(run, add_gathered, overlap_grad_reduce=None))
    if bucket_numel == 500:
        assert tensors == run.truth()
        return
    assert manifest.info["optimizer_undecoded"] == (
        "2 ways to split the gradient buffer into buckets give the 1,920 elements of 15 parameters (1,576 without "
        "alignment) that are stored: the bucket size (args.ddp_bucket_size) is not known"
    )
    assert tensors == run.truth(slots=())
    assert [blob.fqn for blob in manifest.blobs if "param_state" in blob.fqn] == [
        "optimizer.distributed.dp_group_idx_0.param_state/shard_0_1"
    ]


def test_unknown_order_is_refused() -> None:
    """Buckets that no known order of registration fits stay as they are, and the note says so (R51)."""
    run = Run(tp=2, dp=2, order="local")
    broken = DistWriter(run)
    add_weights(broken)
    broken.add_object("common_state/shard_0_1", common_state(run))
    key = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.float32, torch.float32).bucket_idx_0.param"
    broken.add(key, (5000,), (0,), np.zeros(5000, dtype=np.float32), 0)
    manifest, tensors = tensors_of(DIST, broken.files())
    assert manifest.info["optimizer_undecoded"] == (
        "no known order of registration fits the buckets of group 0 (5,000 elements)"
    )
    assert tensors[key].shape == (5000,)


def test_unknown_weight_keeps_buckets_as_they_are() -> None:
    """A parameter whose place in the order is not known is named."""
    run = Run()
    writer = DistWriter(run)
    add_weights(writer)
    add_buckets(writer)
    writer.add("decoder.layers.mlp.adapter.weight", (2, 3), (0, 0), np.zeros((2, 3), dtype=np.float32), 0)
    writer.add_object("common_state/shard_0_1", common_state(run))
    manifest, _ = tensors_of(DIST, writer.files())
    assert manifest.info["optimizer_undecoded"] == (
        "the order in which 'mlp.adapter.weight' is registered is not known"
    )


def test_prefix_of_wrappers_is_left_out() -> None:
    """Keys that all begin with ``module.`` (NeMo) read under the names of Megatron-LM, below ``weights`` too."""
    run = Run()
    writer = DistWriter(run)
    for key, shape in run.shapes().items():
        writer.add(f"module.{key}", shape, (0,) * len(shape), run.values("model", key), 0)
        for slot in SLOTS:
            state = run.values(slot, key)
            writer.add(f"optimizer.state.{slot}.module.{key}", shape, (0,) * len(shape), np.asarray(state), 0)
    files = {f"weights/{path}": data for path, data in writer.files().items()}
    manifest, tensors = tensors_of(DIST, files)
    assert tensors == run.truth()
    assert (manifest.info["key_prefix"], manifest.info["folder"]) == ("module.", "weights")


def test_layers_that_differ_keep_names_of_their_own() -> None:
    """Per-rank files whose layers differ in their tensors are not stacked, as mcore does not then."""
    run = Run()

    def change(root: dict[str, Any]) -> None:
        root["model"]["decoder.layers.1.self_attention.q_layernorm.weight"] = torch.ones(3)

    manifest = RANKS.read(source_of(MemoryStore(changed_model(run, change))))
    assert "model.decoder.layers.1.self_attention.q_layernorm.weight" in manifest.tensors.fqns
    assert "model.decoder.layers.0.mlp.linear_fc1.weight" in manifest.tensors.fqns


def test_unknown_weight_asks_for_a_rule() -> None:
    """A weight that no rule knows, cut over ranks, is an error that asks for a rule; with one it reads (R56)."""

    def add(root: dict[str, Any]) -> None:
        model = root["model"]
        model["decoder.layers.0.mlp.adapter.weight"] = torch.ones(3, 2)
        model["decoder.layers.1.mlp.adapter.weight"] = torch.ones(3, 2)

    files = changed_model(Run(tp=2), add)
    with pytest.raises(LayoutError, match=r"no rule says how 'mlp\.adapter\.weight'") as caught:
        RANKS.read(source_of(MemoryStore(files)))
    assert "ckpt-megatron.toml" in str(caught.value.hint)
    rule = b'[[rule]]\nnames = ["mlp.adapter.weight"]\ncut = "column"\n'
    manifest = RANKS.read(source_of(MemoryStore({**files, "ckpt-megatron.toml": rule})))
    assert manifest.tensor("model.decoder.layers.mlp.adapter.weight").shape == (2, 6, 2)
    with pytest.raises(FormatError, match="cut 'diagonal', expected one of"):
        RANKS.read(source_of(MemoryStore({**files, "ckpt-megatron.toml": rule.replace(b"column", b"diagonal")})))


def test_differing_replicas_are_found() -> None:
    """A norm that differs between tensor-parallel ranks is an error that names box and ranks."""

    def change(root: dict[str, Any]) -> None:
        model, args = root["model"], root["args"]
        if args.rank == 1:
            model["decoder.final_layernorm.weight"] = torch.full((8,), 5.0)

    store = MemoryStore(changed_model(Run(tp=2), change))
    manifest = RANKS.read(source_of(store))
    found = [f for f in RANKS.check(source_of(store), manifest) if f.kind == "different-replicas"]
    assert [f.fqn for f in found] == ["model.decoder.final_layernorm.weight"]
    assert "rank 0 and rank 1" in found[0].message


def test_layers_that_are_missing_are_counted() -> None:
    """Fewer layers than the run had, as when stages were dropped (R62), is an error with both numbers."""

    def change(root: dict[str, Any]) -> None:
        root["args"].num_layers = 80

    with pytest.raises(FormatError, match="the files hold 5 layers in 2 stages, the run's arguments say 80"):
        RANKS.read(source_of(MemoryStore(changed_model(Run(layers=UNEVEN), change))))


def test_lone_second_number_is_told_by_arguments() -> None:
    """``mp_rank_00_001`` is a stage or an expert-parallel rank; without arguments only the ends of stages tell."""

    def change(root: dict[str, Any]) -> None:
        root.pop("args")

    with pytest.raises(LayoutError, match="a pipeline stage or an expert-parallel rank"):
        RANKS.read(source_of(MemoryStore(changed_model(Run(n_experts=4, ep=2, dp=2), change))))
    stages = RANKS.read(source_of(MemoryStore(changed_model(Run(layers=EVEN), change))))
    assert stages.info["layer_stages"] == [list(stage[0]) for stage in EVEN]


def test_fused_experts_are_taken_apart() -> None:
    """GroupedMLP's fused, transposed weights read as experts of their own (strided, nothing is copied)."""
    run = Run(n_experts=4, ep=2, dp=2)

    def change(root: dict[str, Any]) -> None:
        model = root["model"]
        for layer in range(2):
            for part, (rows, columns) in (("linear_fc1", (8, 40)), ("linear_fc2", (20, 8))):
                names = [f"decoder.layers.{layer}.mlp.experts.local_experts.{e}.{part}.weight" for e in range(2)]
                stacked = torch.stack([model.pop(name).T for name in names])
                fused = stacked.reshape(rows, -1) if part == "linear_fc1" else stacked.reshape(-1, columns)
                model[f"decoder.layers.{layer}.mlp.experts.weight{part[-1]}"] = fused.contiguous()

    _, tensors = tensors_of(RANKS, changed_model(run, change))
    assert tensors == {fqn: truth for fqn, truth in run.truth().items() if fqn.startswith("model.")}
    assert np.prod(tensors["model.decoder.layers.mlp.experts.experts.linear_fc1.weight"].shape) == 2 * 4 * 40 * 8


def whole_state_files(run: Run, change: Callable[[dict[str, Any]], None] = lambda root: None) -> dict[str, bytes]:
    """Per-rank files of a run without the distributed optimizer: torch's own state in the model files."""

    def add(root: dict[str, Any]) -> None:
        rank = root["args"].rank
        stage, tensor = rank // (run.tp * run.dp), rank % run.tp
        parts = run.parts(stage, 0, 0, tensor)
        decaying = [p for p in parts if len(p.of(run.values("model", p.key)).shape) > 1]
        groups = [decaying, [p for p in parts if p not in decaying]]
        states: dict[int, Any] = {}
        masters, saved_groups = [], []
        for group, wd_mult in zip(groups, (1.0, 0.0), strict=True):
            numbers = range(len(states), len(states) + len(group))
            saved_groups.append({"wd_mult": wd_mult, "lr": 0.5, "params": list(numbers)})
            tensors = {slot: [torch.from_numpy(p.of(run.values(slot, p.key))) for p in group] for slot in SLOTS}
            masters.append(tensors["param"])
            for number, index in zip(numbers, range(len(group)), strict=True):
                states[number] = {
                    "step": torch.tensor(7.0), **{slot: tensors[slot][index] for slot in ("exp_avg", "exp_avg_sq")},
                }  # fmt: skip
        root["optimizer"] = {
            "optimizer": {"state": states, "param_groups": saved_groups}, "fp32_from_fp16_params": masters,
        }  # fmt: skip
        change(root)

    return changed_model(run, add)


@pytest.mark.parametrize("name", ["one-rank", "tp2-pp2-uneven-dp3", "tp4-buckets"])
def test_state_by_numbers_becomes_tensors(name: str) -> None:
    """Without the distributed optimizer, numbered state is matched with the weights by groups, order and shapes."""
    run = RUNS[name]
    manifest, tensors = tensors_of(RANKS, whole_state_files(run))
    assert manifest.info["optimizer_form"] == "not distributed"
    step = tensors.pop("optimizer.optimizer.state.common_step")
    assert (step.shape, tensors) == ((), run.truth())
    assert {blob.fqn: blob.value for blob in manifest.blobs}["optimizer.optimizer.param_groups.0.lr"] == 0.5


def test_state_by_numbers_that_does_not_fit_is_left() -> None:
    """Numbers whose shapes do not fit the model keep their keys, each rank's apart, and the reason is named."""

    def change(root: dict[str, Any]) -> None:
        root["optimizer"]["optimizer"]["state"][0]["exp_avg"] = torch.zeros(3)

    manifest, tensors = tensors_of(RANKS, whole_state_files(Run(tp=2), change))
    assert "exp_avg of parameter 0 is [3], 'embedding.word_embeddings.weight' is [6, 8]" in str(
        manifest.info["optimizer_undecoded"]
    )
    assert tensors["optimizer.optimizer.state.0.exp_avg@rank1"].shape == (3,)
    assert any(
        finding.kind == "optimizer-undecoded"
        for finding in RANKS.check(source_of(MemoryStore(whole_state_files(Run(tp=2), change))), manifest)
    )


def test_grouped_experts_are_numbered_globally() -> None:
    """Transformer Engine's grouped experts, numbered in the weight's name, read as the sequential ones do."""
    run = Run(n_experts=4, ep=2, dp=2)

    def change(root: dict[str, Any]) -> None:
        pattern = re.compile(r"(.*mlp\.experts\.)local_experts\.(\d+)\.(linear_fc[12]\.weight)")
        root["model"] = {pattern.sub(r"\1\3\2", name): tensor for name, tensor in root["model"].items()}

    _, tensors = tensors_of(RANKS, {**legacy_files(run), **changed_model(run, change)})
    assert tensors == run.truth()


def test_serialised_module_state_is_kept_by_layer() -> None:
    """``_extra_state`` tensors (FP8) have any length: each layer's keeps a name of its own, weights stay stacked."""
    run = Run(tp=2, layers=EVEN)

    def change(root: dict[str, Any]) -> None:
        stage = root["args"].rank // 2
        name = "decoder.layers.0.mlp.linear_fc1._extra_state"
        root["model"][name] = torch.full((3 + stage,), root["args"].rank, dtype=torch.uint8)

    _, tensors = tensors_of(RANKS, changed_model(run, change))
    extra = {fqn: tensors.pop(fqn) for fqn in list(tensors) if "_extra_state" in fqn}
    assert tensors == run.truth(slots=())
    assert extra == {
        f"model.decoder.layers.mlp.linear_fc1._extra_state/shard_{n}_2": Truth(
            "uint8", (3 + n,), bytes([2 * n] * (3 + n))
        )
        for n in range(2)
    }


def test_zero_tails_are_blamed_on_parameters(tmp_path: Path) -> None:
    """Moments whose tails a saver left zero (R52) are found parameter by parameter, also where buckets were decoded."""
    run = Run(layers=(((0, 1, 2, 3),),))
    writer = DistWriter(run)
    add_weights(writer)
    add_buckets(writer, zero_from={"exp_avg_sq": 2500})
    writer.add_object("common_state/shard_0_1", common_state(run))
    for path, data in writer.files().items():
        (tmp_path / path).write_bytes(data)
    report = verify(tmp_path, level="full")
    blamed = {finding.fqn for finding in report.findings if "zero" in finding.kind}
    layers = "optimizer.state.exp_avg_sq.decoder.layers."
    assert blamed == {
        f"{layers}{name}.weight" for name in ("mlp.linear_fc1", "mlp.linear_fc2", "self_attention.linear_qkv")
    }
