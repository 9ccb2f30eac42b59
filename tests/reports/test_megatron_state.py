"""Section D of the collected reports: optimizer state, layers and names that Megatron cannot take elsewhere.

Each as a user meets it, with the ``ckpt`` command; how the forms are read is tested in ``formats/megatron``.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt_tool.api.checkpoint import open_checkpoint
from tests.formats.conformance import Truth
from tests.formats.megatron.build import (
    DistWriter,
    add_buckets,
    add_gathered,
    add_weights,
    common_state,
    legacy_files,
    saved,
)
from tests.formats.megatron.places import CHECKPOINTS, dense_shapes, expert_shapes, padded_for, truth_from_seed
from tests.formats.megatron.run import Run
from tests.formats.megatron.test_rank_writer import loaded
from tests.reports.conftest import Ckpt

DENSE = truth_from_seed(dense_shapes(4, 112))


def contents(root: Path) -> dict[str, Truth]:
    """Weights, masters and moments."""
    with open_checkpoint(root) as checkpoint:
        return {
            meta.fqn: Truth(meta.dtype.name, meta.shape, np.ascontiguousarray(checkpoint[meta.fqn].numpy()).tobytes())
            for meta in checkpoint.manifest.tensors
            if meta.section == "model" or meta.fqn.startswith("optimizer.state.")
        }


def stored(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Files in a folder."""
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
    return folder


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_r50_flattened_ranges_get_the_shapes_of_weights(ckpt: Ckpt, tmp_path: Path) -> None:
    """R50: state that mcore up to 0.14 saved flat is rewritten without a job: the newer ones' keys and shapes."""
    source = CHECKPOINTS / "old012_fsms_t2p1d2/ckpt"
    assert "fully_sharded_model_space" in ckpt("inspect", source).text
    assert ckpt("reshard", source, tmp_path / "out", "--to", "megatron", "--tp", "2", "--no-fsync").status == 0
    metadata = dcp.FileSystemReader(tmp_path / "out/iter_0000010").read_metadata()
    shapes = {key: tuple(getattr(entry, "size", ())) for key, entry in metadata.state_dict_metadata.items()}
    for slot in ("param", "exp_avg", "exp_avg_sq"):
        for key, shape in dense_shapes(4, 112).items():
            assert shapes[f"optimizer.state.{slot}.{key}"] == shape
    assert not getattr(metadata, "mcore_data", None)
    assert contents(tmp_path / "out") == DENSE()


def test_r51_buckets_go_to_other_ranks(ckpt: Ckpt, tmp_path: Path) -> None:
    """R51: ``dp_reshardable``, Megatron's default, TP 2 to TP 1: state by parameter, as if it had been saved so."""
    source = CHECKPOINTS / "td_dpr_t2p2d2/ckpt"
    assert ckpt("reshard", source, tmp_path / "out", "--to", "megatron", "--no-fsync").status == 0
    assert contents(tmp_path / "out") == padded_for(dict(DENSE()), 1)
    assert "optimizer fully_reshardable" in ckpt("inspect", tmp_path / "out").text


def test_r51_a_fact_that_is_missing_is_named(ckpt: Ckpt, tmp_path: Path) -> None:
    """R51: sizes that several splits into buckets give: which fact is missing, and the way to the weights."""
    writer = DistWriter(Run(bucket_numel=1000))
    add_weights(writer)
    add_gathered(writer)
    writer.add_object("common_state/shard_0_1", common_state(writer.run, overlap_grad_reduce=None))
    source = stored(tmp_path / "in", writer.files())
    fact = "the bucket size (args.ddp_bucket_size) is not known"
    assert fact in ckpt("inspect", source).text
    for target in ("megatron", "megatron-legacy"):
        refused = ckpt("reshard", source, tmp_path / "out", "--to", target, "--tp", "2")
        assert (refused.status, fact in refused.err, "--include 'model.*'" in refused.err) == (3, True, True)
    done = ckpt("reshard", source, tmp_path / "out", "--to", "megatron", "--tp", "2", "--include", "model.*")
    assert done.status == 0
    assert contents(tmp_path / "out") == writer.run.truth(slots=())


def test_r52_tails_of_zeros_are_blamed_on_parameters(ckpt: Ckpt, tmp_path: Path) -> None:
    """R52: a save that lost the ends of buckets: each parameter, how much of it is zero, and from where on."""
    writer = DistWriter(Run(layers=(((0, 1, 2, 3),),)))
    add_weights(writer)
    add_buckets(writer, zero_from={"exp_avg_sq": 2500})
    writer.add_object("common_state/shard_0_1", common_state(writer.run))
    done = ckpt("verify", stored(tmp_path / "in", writer.files()), "--full", "--json", "--limit", "0")
    findings = [finding for finding in done.json["findings"] if "zero" in finding["kind"]]
    layers = "optimizer.state.exp_avg_sq.decoder.layers."
    blamed = {finding["fqn"].removeprefix(layers) for finding in findings}
    assert blamed == {"mlp.linear_fc1.weight", "mlp.linear_fc2.weight", "self_attention.linear_qkv.weight"}
    assert all("%" in finding["message"] and "element" in finding["message"] for finding in findings), findings


def test_r53_lists_of_different_length_are_explained(ckpt: Ckpt) -> None:
    """R53: Megatron's "Cannot merge two lists" comes of rank 0's list in the common state, which is one line here."""
    shown = ckpt("inspect", CHECKPOINTS / "old012_fsms_t1d3/ckpt").text
    assert "the common state holds param_state of rank 0 only (9 entries)" in shown
    assert 'fails in Megatron with "Cannot merge two lists with different lengths"' in shown


def test_r56_each_kind_of_cut_needs_no_model(ckpt: Ckpt, tmp_path: Path) -> None:
    """R56: TP 1 to TP 4 of columns, gate and up, rows, vocabulary and norms: each rank has its part, or a copy."""
    source = CHECKPOINTS / "dpr_uneven_p2/ckpt"
    done = ckpt("reshard", source, tmp_path / "out", "--to", "megatron-legacy", "--tp", "4", "--no-fsync")
    assert done.status == 0
    truth = padded_for(truth_from_seed(dense_shapes(4, 104))(), 4)
    whole = {
        fqn: torch.frombuffer(bytearray(one.data), dtype=torch.bfloat16).view(one.shape)
        for fqn, one in truth.items() if fqn.startswith("model.")
    }  # fmt: skip
    layers = "model.decoder.layers."
    for rank in range(4):
        model = loaded(tmp_path / f"out/iter_0000010/mp_rank_{rank:02d}/model_optim_rng.pt")["model"]
        layer = {name.removeprefix("decoder.layers.2."): value for name, value in model.items()}
        gate, up = whole[f"{layers}mlp.linear_fc1.weight"][2].chunk(2)
        expected = {
            "self_attention.linear_qkv.weight": whole[f"{layers}self_attention.linear_qkv.weight"][2].chunk(4)[rank],
            "self_attention.linear_proj.weight": whole[f"{layers}self_attention.linear_proj.weight"][2].chunk(4, 1)[
                rank
            ],
            "mlp.linear_fc1.weight": torch.cat([gate.chunk(4)[rank], up.chunk(4)[rank]]),
            "mlp.linear_fc2.weight": whole[f"{layers}mlp.linear_fc2.weight"][2].chunk(4, 1)[rank],
            "input_layernorm.weight": whole[f"{layers}self_attention.linear_qkv.layer_norm_weight"][2],
            "embedding.word_embeddings.weight": whole["model.embedding.word_embeddings.weight"].chunk(4)[rank],
            "decoder.final_layernorm.weight": whole["model.decoder.final_layernorm.weight"],
        }
        assert [name for name, part in expected.items() if not torch.equal(layer[name], part)] == []


def test_r56_an_unknown_name_asks_for_a_rule(ckpt: Ckpt, tmp_path: Path) -> None:
    """R56: whether an adapter's rows or columns were cut is never guessed: the file to write is named."""
    files = legacy_files(Run(tp=2))
    source = stored(tmp_path / "in", files)
    for path in source.rglob("model_optim_rng.pt"):
        root = torch.load(path, weights_only=False)
        root["model"]["decoder.layers.0.mlp.adapter.weight"] = torch.ones(3, 2)
        root["model"]["decoder.layers.1.mlp.adapter.weight"] = torch.ones(3, 2)
        torch.save(root, path)
        path.with_name("distrib_optim.pt").unlink()
    refused = ckpt("inspect", source)
    assert (refused.status, "mlp.adapter.weight" in refused.err, "ckpt-megatron.toml" in refused.err) == (3, True, True)
    (source / "ckpt-megatron.toml").write_text('[[rule]]\nnames = ["mlp.adapter.weight"]\ncut = "row"\n')
    assert ckpt("reshard", source, tmp_path / "out", "--to", "megatron", "--no-fsync").status == 0
    assert contents(tmp_path / "out")["model.decoder.layers.mlp.adapter.weight"].shape == (2, 3, 4)


def test_r59_unequal_parts_by_a_rule_of_ones_own(ckpt: Ckpt, tmp_path: Path) -> None:
    """R59: parts of 4, 2 and 6 rows, of which each of 2 ranks has a half, are put together part by part."""
    whole = torch.arange(24.0).reshape(12, 2)
    a, b, c = whole.split([4, 2, 6])
    files = {}
    for rank, (path, data) in enumerate(legacy_files(Run(tp=2), with_optimizer=False).items()):
        root = torch.load(io.BytesIO(data), weights_only=False)
        own = torch.cat([part.chunk(2)[rank] for part in (a, b, c)])
        root["model"] |= {f"decoder.layers.{n}.self_attention.fused_proj.weight": own + 100 * n for n in (0, 1)}
        files[path] = saved(root)
    source = stored(tmp_path / "in", files)
    refused = ckpt("inspect", source)
    assert (refused.status, "fused with parts = [4, 2, 6]" in refused.err) == (3, True)
    rule = '[[rule]]\nnames = ["self_attention.fused_proj.weight"]\ncut = "fused"\nparts = '
    (source / "ckpt-megatron.toml").write_text(f"{rule}[5, 7]")
    refused = ckpt("inspect", source)
    assert (refused.status, "fused_proj.weight: 6 rows are no parts of 5 : 7" in refused.err) == (3, True)
    (source / "ckpt-megatron.toml").write_text(f"{rule}[4, 2, 6]")
    assert ckpt("reshard", source, tmp_path / "out", "--to", "megatron", "--no-fsync").status == 0
    with open_checkpoint(tmp_path / "out") as found:
        fused = found["model.decoder.layers.self_attention.fused_proj.weight"].torch()
    assert torch.equal(fused, torch.stack([whole, whole + 100]))


def test_r62_stages_and_chunks_have_every_layer_once(ckpt: Ckpt, tmp_path: Path) -> None:
    """R62: 5 layers on 2 stages of 2 chunks: who has which is shown; layers that are missing are an error."""
    run = Run(layers=(((0, 1), (3,)), ((2,), (4,))))
    source = stored(tmp_path / "in", legacy_files(run))
    shown = ckpt("inspect", source).text
    assert "layers stage 0: chunk 0: 0-1, chunk 1: 3; stage 1: chunk 0: 2, chunk 1: 4" in shown
    refused = ckpt("inspect", stored(tmp_path / "fewer", legacy_files(run, num_layers=6)))
    assert (refused.status, "5 layers in 2 stages, the run's arguments say 6" in refused.err) == (3, True)
    meshes = {"one": (), "uneven": ("--pp", "2", "--first-stage-layers", "3", "--last-stage-layers", "2")}
    weights = ("--to", "megatron-legacy", "--include", "model.*", "--no-fsync")
    for name, mesh in meshes.items():
        done = ckpt("reshard", source, tmp_path / name, *weights, *mesh)
        assert done.status == 0, done.err
        source = tmp_path / name
        assert contents(source) == run.truth(slots=())
    assert "layers stage 0: 0-2; stage 1: 3-4" in ckpt("inspect", source).text


def test_r62_chunks_without_layers(ckpt: Ckpt, tmp_path: Path) -> None:
    """R62: a layout of one's own (pipeline_model_parallel_layout), with chunks that have no layer."""
    run = Run(layers=(((0,), (3, 4), ()), ((1, 2), (), (5,))))
    source = stored(tmp_path / "in", legacy_files(run, with_optimizer=False))
    shown = "stage 0: chunk 0: 0, chunk 1: 3-4, chunk 2: none; stage 1: chunk 0: 1-2, chunk 1: none, chunk 2: 5"
    assert shown in ckpt("inspect", source).text
    assert contents(source) == run.truth(slots=())


def test_r62_files_in_each_others_place(ckpt: Ckpt, tmp_path: Path) -> None:
    """R62: chunks that are missing, and stages whose files were swapped, are errors where no rank is recorded too."""

    def changed(path: str, root: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        del root["args"].rank
        stage = {"_001": "_002", "_002": "_001"}.get(path.split("/", maxsplit=1)[0][-4:], "_000")
        return path.replace(path.split("/", maxsplit=1)[0][-4:], stage), root

    run = Run(layers=(((0,),), ((1,),), ((2,),)))
    files = {
        p: torch.load(io.BytesIO(d), weights_only=False) for p, d in legacy_files(run, with_optimizer=False).items()
    }
    swapped = {path: saved(root) for path, root in map(changed, files, files.values())}
    refused = ckpt("verify", stored(tmp_path / "swapped", swapped))
    said = "decoder.final_* is on stage 1, expected on stage 2 of 3: files stand in each other's place"
    assert (refused.status, said in refused.err) == (3, True)
    virtual = legacy_files(Run(layers=(((0,), (2,)), ((1,), (3,)))), with_optimizer=False, num_layers=None)
    fewer = {path: torch.load(io.BytesIO(data), weights_only=False) for path, data in virtual.items()}
    for root in fewer.values():
        del root["model1"]
    refused = ckpt("verify", stored(tmp_path / "fewer", {path: saved(root) for path, root in fewer.items()}))
    assert (refused.status, "ranks have 1 model chunk, the run's arguments say 2" in refused.err) == (3, True)


def _without_args(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """The same files as a converter writes them: weights, and nothing of a run."""
    found = {}
    for path, data in files.items():
        root = torch.load(io.BytesIO(data), weights_only=False)
        found[path] = saved({key: value for key, value in root.items() if key != "args"})
    return found


def test_r62_stages_without_args_of_a_run(ckpt: Ckpt, tmp_path: Path) -> None:
    """R62: the ends of the model tell stages where no args do; one stage less, and nothing tells any more."""
    run = Run(layers=(((0, 1),), ((2,),), ((3, 4),)))
    files = _without_args(legacy_files(run, with_optimizer=False))
    source = stored(tmp_path / "in", files)
    shown = ckpt("inspect", source).text
    assert "layers stage 0: 0-1; stage 1: 2; stage 2: 3-4" in shown
    assert "no args of the run: second numbers of rank folders are taken for stages" in shown
    assert "no args of the run: 1 tensor-parallel rank is here, taken for all there were" in shown
    assert contents(source) == run.truth(slots=())
    fewer = {path: data for path, data in files.items() if not path.split("/")[0].endswith("_002")}
    refused = ckpt("verify", stored(tmp_path / "fewer", fewer))
    assert (refused.status, "if folders of other ranks are missing, copy them too" in refused.err) == (3, True)


def test_r61_experts_without_args_of_a_run(ckpt: Ckpt, tmp_path: Path) -> None:
    """R61: ranks of experts look like one whole model each, so that half of them would pass for all."""
    by_experts = _without_args(legacy_files(Run(dp=2, ep=2, n_experts=4), with_optimizer=False))
    half = {path: data for path, data in by_experts.items() if path.startswith("mp_rank_00_000")}
    assert len(by_experts) == 2 * len(half) == 2
    for name, files in {"all": by_experts, "half": half}.items():
        refused = ckpt("verify", stored(tmp_path / name, files))
        assert (refused.status, "a pipeline stage or an expert-parallel rank" in refused.err) == (3, True)


def test_r56_a_model_saved_with_its_wrappers(ckpt: Ckpt, tmp_path: Path) -> None:
    """Beside R56: ``module.module.decoder`` ..., as the state dict of what Megatron wraps a model in has it."""
    run = Run(layers=(((0, 1),),))
    files = {}
    for path, data in legacy_files(run, with_optimizer=False).items():
        root = torch.load(io.BytesIO(data), weights_only=False)
        root["model"] = {f"module.module.{name}": tensor for name, tensor in root["model"].items()}
        files[path] = saved(root)
    source = stored(tmp_path / "in", files)
    assert ckpt("verify", source, "--full").status == 0
    assert contents(source) == run.truth(slots=())


def test_r62_virtual_stages_come_and_go(ckpt: Ckpt, tmp_path: Path) -> None:
    """R62: 2 stages of 2 chunks, to 1 stage, and back: no layer starts from random values."""
    source, truth = CHECKPOINTS / "legacy_vpp_p2v2/ckpt", truth_from_seed(dense_shapes(4, 104))()
    for name, mesh in {"one": (), "virtual": ("--pp", "2", "--vpp", "2")}.items():
        done = ckpt("reshard", source, tmp_path / name, "--to", "megatron-legacy", *mesh, "--no-fsync")
        assert done.status == 0, done.err
        source = tmp_path / name
        assert contents(source) == truth
    assert "stage 0: chunk 0: 0, chunk 1: 2; stage 1: chunk 0: 1, chunk 1: 3" in ckpt("inspect", source).text


def test_r64_fsdp_dtensor_and_torch_dist_on_one_processor(ckpt: Ckpt, tmp_path: Path) -> None:
    """R64: to Megatron-FSDP's names, experts with global numbers, and back to two stages: nothing has changed."""
    source = CHECKPOINTS / "moe_seq_e2/ckpt"
    to_fsdp = ("--to", "dcp", "--names", "megatron-fsdp", "--dp", "2", "--no-fsync")
    assert ckpt("reshard", source, tmp_path / "iter_0000010", *to_fsdp).status == 0
    assert "Megatron-FSDP (fsdp_dtensor)" in ckpt("inspect", tmp_path / "iter_0000010").text
    back = ckpt("reshard", tmp_path / "iter_0000010", tmp_path / "out", "--to", "megatron", "--pp", "2", "--no-fsync")
    assert back.status == 0, back.err
    truth = truth_from_seed(expert_shapes(2, 104, 4))()
    found = contents(tmp_path / "out")
    assert {fqn: one for fqn, one in found.items() if "extra_state" not in fqn}.keys() == truth.keys()
    state = [fqn for fqn in truth if fqn.startswith("optimizer.")]
    assert {fqn: found[fqn] for fqn in state} == {fqn: truth[fqn] for fqn in state}


def test_random_states_inside_objects_are_said_to_be_left(ckpt: Ckpt, tmp_path: Path) -> None:
    """An export of everything to a format of tensors alone goes through, and says what objects with tensors it left."""
    done = ckpt("export", CHECKPOINTS / "td_full_t2p2d2/ckpt", tmp_path / "out", "--all", "--names", "source")
    assert (done.status, "an object with 5 tensors inside: rng_state/shard_0.0_2.2" in done.text) == (0, True)


def test_r79_norms_that_ranks_hold_differently(ckpt: Ckpt, tmp_path: Path) -> None:
    """As R79 for Megatron's files: what tensor-parallel ranks should have alike is compared before one is taken."""
    files = legacy_files(Run(tp=2, layers=(((0, 1),),)), with_optimizer=False)
    root = torch.load(io.BytesIO(files["mp_rank_01/model_optim_rng.pt"]), weights_only=False)
    root["model"]["decoder.layers.1.input_layernorm.weight"] += 1
    source = stored(tmp_path / "in", {**files, "mp_rank_01/model_optim_rng.pt": saved(root)})
    for words in (["export", source, tmp_path / "out"], ["reshard", source, tmp_path / "out", "--to", "megatron"]):
        refused = ckpt(*words)
        assert (refused.status, "layer_norm_weight' [1:2, 0:8]: 2 ranks hold it" in refused.err) == (3, True)
        assert ("--unequal first" in refused.err, "concat" in refused.err) == (True, False)
    words = ["reshard", source, tmp_path / "out", "--to", "megatron-legacy", "--unequal", "first", "--no-fsync"]
    assert ckpt(*words).status == 0
    assert contents(tmp_path / "out") == Run(layers=(((0, 1),),)).truth(slots=())


def test_files_of_two_saves(ckpt: Ckpt, tmp_path: Path) -> None:
    """Beside R68: a rank's file of another iteration, or of a run of other sizes: an error, and said on converting."""
    files = legacy_files(Run(tp=2, layers=(((0, 1),),)), with_optimizer=False)
    name = "mp_rank_01/model_optim_rng.pt"
    root = torch.load(io.BytesIO(files[name]), weights_only=False)
    source = stored(tmp_path / "later", {**files, name: saved({**root, "iteration": 8})})
    said = "iteration is 7 on ranks 0; 8 on ranks 1: files of several saves are mixed"
    checked = ckpt("verify", source)
    assert (checked.status, f"error mixed-steps {said}" in checked.text) == (1, True)
    done = ckpt("reshard", source, tmp_path / "out", "--to", "megatron", "--no-fsync")
    assert (done.status, f"note: {said}" in done.text) == (0, True)
    root["args"].hidden_size = 16
    source = stored(tmp_path / "wider", {**files, name: saved({**root, "optimizer": {"param_groups": [{"step": 9}]}})})
    assert ckpt("verify", source).status == 0  # the first rank says nothing of either
    root["args"].num_layers = 3
    checked = ckpt("verify", stored(tmp_path / "other", {**files, name: saved(root)}), "--strict")
    assert (checked.status, "args.num_layers is 2 on ranks 0; 3 on ranks 1" in checked.text) == (1, True)
