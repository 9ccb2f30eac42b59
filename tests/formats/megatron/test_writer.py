"""The torch_dist writer: every form that is read comes out as one that any grid loads, bit for bit.

With ``-m peer`` real Megatron resumes from what was written: ``CKPT_PEER_MEGATRON`` names the python of an environment
with megatron-core 0.19.2 and torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.convert.conversion import ConversionResult
from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.errors import LayoutError, UsageError
from ckpt_tool.formats.base import PlacingWriter
from ckpt_tool.formats.megatron.dist_reader import READER
from ckpt_tool.formats.megatron.dist_writer import WRITER
from ckpt_tool.storage.open import open_store
from tests.formats.conformance import FIXTURES, Truth, all_rows, assemble, source_of, stored_bytes_of
from tests.formats.megatron.loading import assert_loads, save
from tests.formats.megatron.places import (
    CHECKPOINTS,
    by_layer,
    dense_shapes,
    expert_shapes,
    padded_for,
    truth_from_seed,
)

DENSE = truth_from_seed(dense_shapes(4, 112))
DENSE_TP1 = truth_from_seed(dense_shapes(4, 104))
SINGLE = by_layer(truth_from_seed(dense_shapes(4, 128)))
EXPERTS = truth_from_seed(expert_shapes(2, 104, 4))
EXPERTS_TP2 = truth_from_seed(expert_shapes(2, 112, 4))
TruthOf = Callable[[], Mapping[str, Truth]]
Mesh = dict[str, int]

TP4_DP2: Mesh = {"tp": 4, "dp": 2}
PP2: Mesh = {"pp": 2}
PREDICTING = "--extra=--mtp-num-layers=1"
ROUND_TRIPS: tuple[tuple[str, TruthOf, Mesh], ...] = (
    ("td_full_t2p2d2", DENSE, {"tp": 4, "pp": 1, "dp": 1}),
    ("td_full_t4p1", SINGLE, {"tp": 2}),
    ("td_dpr_t2p2d2", DENSE, TP4_DP2),
    ("td_nodist_t2", DENSE, PP2),
    ("old012_fsms_t2p1d2", DENSE, PP2),
    ("old012_fsms_t1d3", DENSE_TP1, {"tp": 2}),
    ("dpr_vpp_p2", DENSE_TP1, {}),
    ("dpr_uneven_p2", DENSE_TP1, {"tp": 2}),
    ("td_dpzero_t2p2", DENSE, {"tp": 1, "pp": 4}),
    ("moe_seq_e2", EXPERTS, {}),
    ("moe_dpr_e2", EXPERTS, {"dp": 4, "ep": 4}),
    ("dpr_etp1_t2e2", EXPERTS_TP2, {"tp": 2}),
    ("legacy_nodist_etp1_t2e2", EXPERTS_TP2, {"tp": 4, "ep": 2, "etp": 2}),
    ("td_dpzero_moe_e2", EXPERTS, {"tp": 2}),
    ("old012_zarr_t2p1d1", DENSE, {"tp": 2}),
    ("legacy_t2p2", DENSE, {"tp": 2, "pp": 2}),
    ("legacy_vpp_p2v2", DENSE_TP1, {"tp": 2}),
    ("legacy_uneven_p2", DENSE_TP1, {}),
    ("legacy_nodist_t2", DENSE, PP2),
    ("legacy_moe_e2", EXPERTS, {"dp": 2, "ep": 2}),
)


def written(name: str, target: Path, **options: Any) -> ConversionResult:
    """A bundled checkpoint, written for a mesh."""
    return reshard(CHECKPOINTS / name / "ckpt", target, to="megatron-dist", durable=False, **options)


def common_of(root: Path) -> dict[str, Any]:
    """Values of the common state, by name."""
    with open_checkpoint(root) as checkpoint:
        return {blob.fqn: blob.value for blob in checkpoint.load_blobs() if blob.where is None}


def args_of(root: Path) -> dict[str, Any]:
    """The run's arguments."""
    found: dict[str, Any] = common_of(root)["args"].state
    return found


def n_objects(root: Path, prefix: str) -> int:
    """How many objects in pieces have keys that begin so."""
    with open_checkpoint(root) as checkpoint:
        return sum(blob.fqn.startswith(prefix) and "/shard_" in blob.fqn for blob in checkpoint.manifest.blobs)


@pytest.mark.parametrize(("name", "truth", "mesh"), ROUND_TRIPS, ids=[name for name, _, _ in ROUND_TRIPS])
def test_every_form_comes_out_bit_for_bit(name: str, truth: TruthOf, mesh: Mesh, tmp_path: Path) -> None:
    """Weights, fp32 masters and both moments of each source, read back, are the truth; and the checkpoint is sound."""
    written(name, tmp_path / "out", **mesh)
    store, _ = open_store(tmp_path / "out")
    source = source_of(store)
    manifest = READER.read(source)
    chunks = READER.resolve(source, manifest, all_rows(manifest))
    # Arguments of mcore 0.12's own tests say nothing of the vocabulary: it keeps its rows.
    expected = truth() if "fsms" in name else padded_for(dict(truth()), mesh.get("tp", 1))
    found = {m.fqn for m in manifest.tensors if m.section == "model" or m.fqn.startswith("optimizer.state.")}
    assert found == set(expected)
    assert {fqn: assemble(store, manifest, chunks, fqn) for fqn in found} == expected
    assert [f for f in READER.check(source, manifest) if f.severity.name == "ERROR"] == []
    form = "not distributed" if "nodist" in name else "fully_reshardable"
    assert manifest.info["optimizer_form"] == form


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ["td_dpr_t2p2d2", "td_nodist_t2", "legacy_t2p2"])
def test_torch_loads_every_tensor(name: str, tmp_path: Path) -> None:
    """``torch.distributed.checkpoint`` itself reads each tensor under its key: the master's slot is ``param``.

    Without the distributed optimizer it is ``fp32_param``.
    """
    written(name, tmp_path / "out", **TP4_DP2)
    folder = tmp_path / "out/iter_0000010"
    entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    master = "fp32_param" if "nodist" in name else "param"
    keys = {
        fqn: fqn.removeprefix("model.").replace("optimizer.state.param.", f"optimizer.state.{master}.")
        for fqn in DENSE()
    }
    assert set(state) == set(keys.values())
    raw = {fqn: state[key].view(torch.uint8).numpy().tobytes() for fqn, key in keys.items()}
    assert raw == {fqn: one.data for fqn, one in padded_for(dict(DENSE()), 4).items()}


def test_ranks_find_their_parts_apart(tmp_path: Path) -> None:
    """Layers are apart, and the parts of tensor-parallel ranks; gate and up are cut one by one."""
    written("td_dpr_t2p2d2", tmp_path / "out", **TP4_DP2)
    with open_checkpoint(tmp_path / "out") as checkpoint:
        manifest = checkpoint.manifest
    sizes = {}
    for fqn in ("linear_qkv.weight", "linear_proj.weight", "linear_qkv.layer_norm_weight"):
        number = manifest.tensor_id(f"model.decoder.layers.self_attention.{fqn}")
        rows = manifest.chunks.rows_of(number)
        sizes[fqn] = (len(rows), manifest.chunks.sizes[rows[0], : manifest.tensors.ndim[number]].tolist())
    number = manifest.tensor_id("optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight")
    rows = manifest.chunks.rows_of(number)
    sizes["linear_fc1"] = (len(rows), manifest.chunks.sizes[rows[0]].tolist())
    assert sizes == {
        "linear_qkv.weight": (16, [1, 16, 32]),
        "linear_proj.weight": (16, [1, 32, 8]),
        "linear_qkv.layer_norm_weight": (4, [1, 32]),
        "linear_fc1": (32, [1, 12, 32]),
    }
    payload = np.bincount(manifest.chunks.rank, weights=manifest.chunks.length)
    assert len(payload) == 8
    assert payload.max() / payload.min() < 1.1


def test_arguments_are_those_of_the_target(tmp_path: Path) -> None:
    """Parallel sizes, padded vocabulary and the saving process are the target's; everything else is kept."""
    source = args_of(CHECKPOINTS / "td_dpr_t2p2d2/ckpt")
    written("td_dpr_t2p2d2", tmp_path / "out", tp=4, dp=2)
    target = args_of(tmp_path / "out")
    changed = {name: value for name, value in target.items() if repr(source.get(name)) != repr(value)}
    assert changed == {
        "tensor_model_parallel_size": 4,
        "pipeline_model_parallel_size": 1,
        "transformer_pipeline_model_parallel_size": 1,
        "expert_tensor_parallel_size": 4,
        "tensor_parallel_num_weight_shards": 4,
        "expert_tensor_parallel_num_weight_shards": 4,
        "dist_ckpt_optim_fully_reshardable": True,
        "no_save_rng": True,
        "padded_vocab_size": 128,
    }
    assert set(target) == set(source)


def test_virtual_and_uneven_stages_stand_in_the_arguments(tmp_path: Path) -> None:
    """``--vpp`` and layers of the first and last stage become Megatron's own arguments."""
    written("dpr_uneven_p2", tmp_path / "vpp", pp=2, vpp=2)
    written("dpr_vpp_p2", tmp_path / "uneven", pp=2, first_stage_layers=3, last_stage_layers=1)
    names = (
        "virtual_pipeline_model_parallel_size", "num_layers_per_virtual_pipeline_stage",
        "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
    )  # fmt: skip
    assert [args_of(tmp_path / "vpp")[name] for name in names] == [2, 1, None, None]
    assert [args_of(tmp_path / "uneven")[name] for name in names] == [None, None, 3, 1]


def test_common_state_says_fully_reshardable(tmp_path: Path) -> None:
    """The loader is told the form; counters, schedule and hyperparameters of the buckets' groups are kept."""
    written("td_dpr_t2p2d2", tmp_path / "out", tp=4)
    before, after = common_of(CHECKPOINTS / "td_full_t2p2d2/ckpt"), common_of(tmp_path / "out")
    for values in (before, after):
        values.pop("args")
    assert after == before


def test_experts_optimizers_are_joined_and_parted(tmp_path: Path) -> None:
    """One optimizer without expert parallelism, two with it; groups move, and come back the same."""
    written("moe_seq_e2", tmp_path / "one")
    one = common_of(tmp_path / "one")
    groups = sorted({fqn.split(".")[3] for fqn in one if fqn.startswith("optimizer.optimizer.param_groups.")})
    assert groups == ["0", "1"]
    assert {v for fqn, v in one.items() if fqn.endswith("is_expert_parallel")} == {False}
    reshard(tmp_path / "one", tmp_path / "two", to="megatron-dist", dp=2, ep=2, durable=False)
    two = common_of(tmp_path / "two")
    before = common_of(CHECKPOINTS / "moe_seq_e2/ckpt")
    kept = {fqn: two[fqn] for fqn in before if fqn.startswith("optimizer.")}
    assert kept == {fqn: value for fqn, value in before.items() if fqn.startswith("optimizer.")}


def test_random_states_are_kept_on_the_same_grid(tmp_path: Path) -> None:
    """As many stages and tensor-parallel ranks: the objects' bytes go over as they are, and no drop is reported."""
    result = written("td_dpr_t2p2d2", tmp_path / "out", tp=2, pp=2, dp=1)
    assert [d.fqn for d in result.dropped if d.fqn.startswith("rng")] == []
    items = []
    for root in (CHECKPOINTS / "td_dpr_t2p2d2/ckpt", tmp_path / "out"):
        store, _ = open_store(root)
        blobs = READER.read(source_of(store)).blobs
        items.append({b.fqn: stored_bytes_of(store, b.where) for b in blobs if b.where and "dp_group" not in b.fqn})
    assert items[0] == items[1]
    assert sum(fqn.startswith("rng_state/") for fqn in items[0]) == 4
    assert args_of(tmp_path / "out")["no_save_rng"] is None


@pytest.mark.parametrize(("name", "mesh"), [("legacy_t2p2", {"tp": 2, "pp": 2}), ("old012_zarr_t2p1d1", {"tp": 2})])
def test_random_states_of_other_containers_become_objects(name: str, mesh: Mesh, tmp_path: Path) -> None:
    """States of per-rank files and of zarr folders load with torch as Megatron's: a list with the rank's list in it."""
    written(name, tmp_path / "out", **mesh)
    n_ranks = mesh["tp"] * mesh.get("pp", 1)
    keys = [f"rng_state/shard_{p}.{t}_{mesh.get('pp', 1)}.2" for p in range(mesh.get("pp", 1)) for t in range(2)]
    folder = tmp_path / "out/iter_0000010"
    storage = {i.fqn: s for i, s in dcp.FileSystemReader(folder).read_metadata().storage_data.items()}
    assert n_objects(tmp_path / "out", "rng_state/") == n_ranks
    for number, key in enumerate(keys):
        with (folder / storage[key].relative_path).open("rb") as file:
            file.seek(storage[key].offset)
            (tmp_path / "item.pt").write_bytes(file.read(storage[key].length))
        [[state]] = torch.load(tmp_path / "item.pt", weights_only=False)
        tracker = state["rng_tracker_states"].get("model-parallel-rng")
        assert state["torch_rng_state"].shape == (5056,)
        if tracker is not None:
            assert tracker.tolist() == [3 + number % 2] * 16


def test_random_states_of_another_grid_are_dropped_and_reported(tmp_path: Path) -> None:
    """Megatron starts afresh: states are left out, each named, and the arguments say that there are none."""
    result = written("legacy_t2p2", tmp_path / "out", tp=4)
    assert sum(d.fqn.startswith("rng_state") for d in result.dropped) > 4
    assert n_objects(tmp_path / "out", "rng_state") == 0
    assert args_of(tmp_path / "out")["no_save_rng"] is True
    with pytest.raises(UsageError, match="2 stages x 2 tensor-parallel ranks; the target has 1 x 4"):
        written("td_dpr_t2p2d2", tmp_path / "kept", tp=4, rank_state="keep")
    written("td_dpr_t2p2d2", tmp_path / "same", tp=2, pp=2, rank_state="drop")
    assert n_objects(tmp_path / "same", "rng_state") == 0


def test_weights_alone(tmp_path: Path) -> None:
    """Without optimizer state there is no entry of it, and the arguments say so."""
    written("td_dpr_t2p2d2", tmp_path / "out", include=["model.*"])
    assert [fqn for fqn in common_of(tmp_path / "out") if fqn.startswith("optimizer")] == []
    assert args_of(tmp_path / "out")["no_save_optim"] is True


def test_what_is_not_megatrons_is_refused(tmp_path: Path) -> None:
    """A checkpoint without a run's arguments is refused with what is missing, before anything is written."""
    with pytest.raises(LayoutError, match=r"neither args of a Megatron run nor a config\.json"):
        reshard(FIXTURES / "torch/dcp_ddp_dedup/ckpt", tmp_path / "out", to="megatron-dist")
    assert not (tmp_path / "out").exists()


def test_state_that_was_not_decoded_is_refused(tmp_path: Path) -> None:
    """Buckets that no known order fits cannot be written; the message names the fact and the way to the weights."""
    source = CHECKPOINTS / "td_dpr_t2p2d2/ckpt"
    with open_checkpoint(source) as checkpoint:
        manifest = checkpoint.manifest
    bucket = manifest.tensors.record(0)
    strange = manifest.tensors.from_records(
        [*manifest.tensors, type(bucket)("optimizer.distributed.x", bucket.dtype, (3,), "optimizer", ("optimizer.x",))]
    )
    undecoded = manifest.replace(tensors=strange, info={**manifest.info, "optimizer_undecoded": "no args were saved"})
    with pytest.raises(LayoutError, match="no args were saved") as error:
        WRITER.left_out(undecoded, (), {"tp": 1}, None)
    assert error.value.hint == "write the weights alone: --include 'model.*'"


def test_writer_places_boxes_itself() -> None:
    """The contract by which the plan asks the writer instead of a family's rules."""
    assert isinstance(WRITER, PlacingWriter)


@pytest.mark.peer
@pytest.mark.parametrize(
    ("name", "mesh", "run"),
    [
        ("td_dpr_t2p2d2", {}, ""),
        ("td_dpr_t2p2d2", TP4_DP2, "--tp 4 --zero-rows-from 112"),
        ("td_dpr_t2p2d2", {"tp": 2, "pp": 2}, "--tp 2 --pp 2"),
        ("td_full_t4p1", {"tp": 2}, "--tp 2"),
        ("td_nodist_t2", {}, "--nodistopt"),
        ("td_dpzero_t2p2", PP2, "--pp 2"),
        ("dpr_uneven_p2", {"pp": 2, "vpp": 2}, "--pp 2 --vpp 1"),
        ("legacy_t2p2", {"tp": 2, "pp": 2}, "--tp 2 --pp 2"),
        ("legacy_vpp_p2v2", {}, ""),
        ("legacy_nodist_t2", PP2, "--nodistopt --pp 2"),
        ("legacy_moe_e2", {}, "--moe seq --layers 2"),
        ("moe_dpr_e2", {"dp": 4, "ep": 4}, "--moe seq --layers 2 --ep 4"),
        ("td_dpzero_moe_e2", {"tp": 2}, "--moe seq --layers 2 --tp 2 --etp 2 --zero-rows-from 104"),
        ("dpr_etp1_t2e2", {"tp": 2, "ep": 2, "etp": 1}, "--moe seq --layers 2 --tp 2 --ep 2 --etp 1"),
    ],
)
def test_megatron_resumes(name: str, mesh: Mesh, run: str, launcher: Path, tmp_path: Path) -> None:
    """``megatron.training.checkpointing.load_checkpoint`` fills model, masters, moments and step with the truth.

    Rows of the vocabulary that the target pads and the source has not are zero.
    """
    written(name, tmp_path / "out", **mesh)
    assert_loads(launcher, tmp_path / "out", mesh, run)


@pytest.mark.peer
@pytest.mark.parametrize(
    ("name", "mesh", "run"),
    [
        ("td_full_t2p2d2", {}, ""),
        ("td_dpr_t2p2d2", {"tp": 2, "pp": 2}, "--tp 2 --pp 2"),
        ("td_dpr_t2p2d2", TP4_DP2, "--tp 4 --zero-rows-from 112"),
        ("legacy_vpp_p2v2", {"pp": 4}, "--pp 4"),
        ("td_dpzero_t2p2", {"pp": 2, "vpp": 2}, "--pp 2 --vpp 1"),
        ("moe_seq_e2", {}, "--moe seq --layers 2"),
        ("moe_dpr_e2", {"dp": 4, "ep": 4}, "--moe seq --layers 2 --ep 4"),
        ("td_nodist_t2", {}, "--nodistopt"),
        ("legacy_nodist_etp1_t2e2", {"dp": 2, "ep": 2}, "--nodistopt --moe seq --layers 2 --ep 2"),
        ("legacy_etp1_t2e2", {"tp": 2, "ep": 2, "etp": 1}, "--moe seq --layers 2 --tp 2 --ep 2 --etp 1"),
    ],
)
def test_megatron_resumes_from_per_rank_files(name: str, mesh: Mesh, run: str, launcher: Path, tmp_path: Path) -> None:
    """The same from ``mp_rank_*``, optimizer state gathered in ``distrib_optim.pt``; the scripts reduce in bf16."""
    arguments = {"accumulate_allreduce_grads_in_fp32": False}
    options: dict[str, Any] = {**mesh, "arguments": arguments, "durable": False}
    reshard(CHECKPOINTS / name / "ckpt", tmp_path / "out", to="megatron-legacy", **options)
    assert_loads(launcher, tmp_path / "out", mesh, f"{run} --fmt torch --extra=--no-load-rng")


@pytest.mark.peer
def test_megatron_goes_on_with_random_states_that_were_kept(launcher: Path, tmp_path: Path) -> None:
    """Per-rank files of the same grid have the states of a distributed checkpoint: it loads them without complaint."""
    reshard(
        CHECKPOINTS / "td_nodist_t2/ckpt",
        tmp_path / "out",
        to="megatron-legacy",
        tp=2,
        rank_state="keep",
        durable=False,
    )
    assert_loads(launcher, tmp_path / "out", {"tp": 2}, "--nodistopt --tp 2 --fmt torch")


@pytest.mark.peer
@pytest.mark.parametrize("to", ["megatron-dist", "megatron-legacy"])
def test_megatron_starts_from_emitted_random_states(to: str, launcher: Path, tmp_path: Path) -> None:
    """It asks for states of its own grid, and finds those that were made for it."""
    mesh: Mesh = {"pp": 4}
    arguments = {"accumulate_allreduce_grads_in_fp32": False}
    options: dict[str, Any] = {**mesh, "arguments": arguments, "rank_state": "emit", "durable": False}
    reshard(CHECKPOINTS / "td_full_t2p2d2/ckpt", tmp_path / "out", to=to, **options)
    assert_loads(launcher, tmp_path / "out", mesh, "--pp 4" + (" --fmt torch" if to == "megatron-legacy" else ""))


@pytest.mark.peer
@pytest.mark.parametrize(
    ("saved", "to", "mesh", "run"),
    [
        (f"--fmt torch --pp 2 {PREDICTING}", "megatron-dist", {"tp": 2}, f"--tp 2 --zero-rows-from 104 {PREDICTING}"),
        (f"--sharding dp_reshardable --pp 2 {PREDICTING}", "megatron-legacy", PP2, f"--pp 2 --fmt torch {PREDICTING}"),
        ("--fmt torch --pp 2 --tied", "megatron-dist", {"tp": 2}, "--tp 2 --zero-rows-from 104 --tied"),
        ("--sharding dp_reshardable --pp 2 --tied", "megatron-legacy", PP2, "--pp 2 --fmt torch --tied"),
    ],
    ids=["predicting ahead, from ranks", "predicting ahead, to ranks", "tied, from ranks", "tied, to ranks"],
)
def test_megatron_goes_on_with_models_of_other_kinds(
    saved: str, to: str, mesh: Mesh, run: str, launcher: Path, tmp_path: Path
) -> None:
    """It saves layers for multi-token prediction, or a tied embedding, and loads what became of it."""
    save(launcher, tmp_path / "in", 2, f"{saved} --layers 2")
    arguments = {"accumulate_allreduce_grads_in_fp32": False}
    options: dict[str, Any] = {**mesh, "arguments": arguments, "durable": False}
    reshard(tmp_path / "in", tmp_path / "out", to=to, **options)
    assert_loads(launcher, tmp_path / "out", mesh, f"{run} --layers 2")
