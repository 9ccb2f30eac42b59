"""The legacy reader on checkpoints of real Megatron 0.19: tensor, pipeline and virtual pipeline parallelism."""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.trust.verify import verify
from ckpt_tool.errors import FormatError, NotFound
from ckpt_tool.formats.base import Source
from ckpt_tool.formats.megatron.rank_reader import READER
from ckpt_tool.storage.memory import MemoryStore
from ckpt_tool.storage.open import open_store
from tests.formats.conformance import Case, ReaderTests, Truth, source_of, stored_bytes
from tests.formats.megatron.build import legacy_files
from tests.formats.megatron.places import (
    CHECKPOINTS,
    dense_shapes,
    expert_shapes,
    extra_folders,
    extra_truth,
    truth_from_seed,
)
from tests.formats.megatron.run import Run

RANDOM_STATES = ("rng_state.*", "optimizer.*.state.common_step")
DENSE = truth_from_seed(dense_shapes(4, 112))
DENSE_TP1 = truth_from_seed(dense_shapes(4, 104))
EXPERTS = truth_from_seed(expert_shapes(2, 104, 4))
EXPERTS_TP2 = truth_from_seed(expert_shapes(2, 112, 4))


def case(name: str, truth: Callable[[], Mapping[str, Truth]], *, n_files: int) -> Case:
    """A checkpoint of ``n_files`` files: three requests for each and one for the tracker."""
    return Case(name, CHECKPOINTS / name / "ckpt", truth, RANDOM_STATES, 3 * n_files + 1, max_resolve_requests=16)


CASES = (
    case("legacy_t2p2", DENSE, n_files=8),
    case("legacy_vpp_p2v2", DENSE_TP1, n_files=4),
    case("legacy_uneven_p2", DENSE_TP1, n_files=4),
    case("legacy_moe_e2", EXPERTS, n_files=4),
    case("legacy_nodist_t2", DENSE, n_files=2),
    case("legacy_etp1_t2e2", EXPERTS_TP2, n_files=4),
    case("legacy_nodist_etp1_t2e2", EXPERTS_TP2, n_files=2),
    *(
        Case(folder.name, folder / "ckpt", extra_truth(folder), RANDOM_STATES, max_read_requests=200)
        for folder in extra_folders("ckpt/iter_*/mp_rank_*/model_optim_rng.pt")
    ),
)


class TestMegatronLegacy(ReaderTests):
    """The contract of readers."""

    reader = READER
    reader_import = "ckpt_tool.formats.megatron.rank_reader:READER"
    cases = CASES


def source_at(name: str) -> Source:
    """A checkpoint on disk."""
    return Source(*open_store(CHECKPOINTS / name / "ckpt"))


def test_names_and_shapes_are_those_of_distributed_checkpoints() -> None:
    """Per-rank files read into the same tensors as ``torch_dist`` does: names, types, shapes, stacked layers."""
    with (
        open_checkpoint(CHECKPOINTS / "legacy_t2p2/ckpt") as ranks,
        open_checkpoint(CHECKPOINTS / "td_full_t2p2d2/ckpt") as distributed,
    ):
        one, other = (
            {m.fqn: (m.dtype.name, m.shape, m.section, m.path) for m in checkpoint.manifest.tensors}
            for checkpoint in (ranks, distributed)
        )
    assert {fqn: found for fqn, found in one.items() if not fqn.startswith("rng_state")} == other


def test_layers_of_virtual_stages_are_numbered_globally() -> None:
    """Layer 0 of a stage's chunks becomes its global number: chunks run over all stages in turn (R62)."""
    manifest = READER.read(source_at("legacy_vpp_p2v2"))
    assert manifest.info["layer_stages"] == [[0, 2], [1, 3]]
    number = manifest.tensor_id("model.decoder.layers.mlp.linear_fc2.weight")
    rows = manifest.chunks.rows_of(number)
    assert sorted(zip(manifest.chunks.rank[rows].tolist(), manifest.chunks.offsets[rows, 0].tolist(), strict=True)) == [
        (0, 0), (0, 2), (1, 1), (1, 3),
    ]  # fmt: skip


def test_modules_objects_have_the_keys_of_distributed_checkpoints() -> None:
    """``_extra_state`` of a layer is called as the piece of a stacked object that it is elsewhere."""
    manifest = READER.read(source_at("legacy_t2p2"))
    names = {blob.fqn for blob in manifest.blobs}
    assert {f"model.decoder.layers.mlp.linear_fc2._extra_state/shard_{n}_4" for n in range(4)} <= names
    assert {"args", "iteration", "opt_param_scheduler.num_steps"} <= names


def test_missing_rank_folder_is_named() -> None:
    """A rank whose folder is missing is an error that names it, never a smaller model."""
    files = stored_bytes(CHECKPOINTS / "legacy_t2p2/ckpt")
    kept = {path: data for path, data in files.items() if "mp_rank_01_001" not in path}
    with pytest.raises(NotFound, match=r"1 of 4 rank folders is missing.* rank 1 of stage 1"):
        READER.read(source_of(MemoryStore(kept)))


def test_missing_optimizer_file_is_named() -> None:
    """A rank without optimizer state, where others have it, is an error; what the others have is read."""
    files = stored_bytes(CHECKPOINTS / "legacy_t2p2/ckpt")
    kept = {path: data for path, data in files.items() if path != "iter_0000010/mp_rank_00_001/distrib_optim.pt"}
    manifest = READER.read(source_of(MemoryStore(kept)))
    assert manifest.info["missing_files"] == ["iter_0000010/mp_rank_00_001/distrib_optim.pt"]
    whole = READER.read(source_of(MemoryStore(files)))
    of_model = [sum(fqn.startswith("model.") for fqn in each.tensors.fqns) for each in (manifest, whole)]
    assert of_model[0] == of_model[1]
    assert len(manifest.chunks) < len(whole.chunks)


def test_weights_alone_are_read() -> None:
    """Without any ``distrib_optim.pt`` the weights are read, and no optimizer is claimed."""
    files = stored_bytes(CHECKPOINTS / "legacy_t2p2/ckpt")
    kept = {path: data for path, data in files.items() if not path.endswith("distrib_optim.pt")}
    manifest = READER.read(source_of(MemoryStore(kept)))
    assert "optimizer_form" not in manifest.info
    assert sum(meta.section == "model" for meta in manifest.tensors) == 9


def test_file_of_another_rank_does_not_pass() -> None:
    """A rank's file in another one's folder is an error that names both, not a wrong model."""
    files = stored_bytes(CHECKPOINTS / "legacy_t2p2/ckpt")
    for name in ("model_optim_rng.pt", "distrib_optim.pt"):
        files[f"iter_0000010/mp_rank_00_001/{name}"] = files[f"iter_0000010/mp_rank_00_000/{name}"]
    with pytest.raises(FormatError, match=r"holds rank 0 of 8: stage 0.* the folder is of stage 1") as caught:
        READER.read(source_of(MemoryStore(files)))
    assert caught.value.where == "iter_0000010/mp_rank_00_001"


def test_overwritten_parts_of_experts_are_no_model() -> None:
    """More tensor-parallel ranks of experts than of the rest share a folder: the last one's parts are all there are."""
    files = legacy_files(Run(dp=2, n_experts=4), expert_tensor_parallel_size=2)
    with pytest.raises(
        FormatError, match=r"experts of 2 tensor-parallel ranks, the rest of 1: .* wrote it last"
    ) as caught:
        READER.read(source_of(MemoryStore(files)))
    assert (caught.value.where, "torch_dist" in str(caught.value.hint)) == ("mp_rank_00", True)


def test_gated_experts_in_one_tensor_share_no_bytes(tmp_path: Path) -> None:
    """Mcore's old GroupedMLP on 2 tensor-parallel ranks: gate and up lie between one another's elements, transposed."""
    first, second = torch.rand(4, 12, 8), torch.rand(4, 8, 6)
    args = Run(tp=2, dp=2, ep=2, n_experts=4, layers=(((0,),),)).args(moe_grouped_gemm=True)
    for rank, (expert_rank, tensor_rank) in enumerate(itertools.product(range(2), range(2))):
        own = slice(2 * expert_rank, 2 * expert_rank + 2)
        gate, up = (half.chunk(2, 1)[tensor_rank] for half in first[own].chunk(2, 1))
        model = {
            "decoder.layers.0.mlp.experts.weight1": torch.cat([gate, up], 1).mT.contiguous().view(8, -1),
            "decoder.layers.0.mlp.experts.weight2": second[own].chunk(2, 2)[tensor_rank].mT.contiguous().view(-1, 8),
        }
        folder = tmp_path / f"mp_rank_{tensor_rank:02d}_{expert_rank:03d}"
        folder.mkdir()
        root = {"args": Namespace(**{**vars(args), "rank": rank}), "iteration": 7, "model": model}
        torch.save(root, folder / "model_optim_rng.pt")
    assert verify(tmp_path, level="full").is_ok
    with open_checkpoint(tmp_path) as found:
        assert torch.equal(found["model.decoder.layers.mlp.experts.experts.linear_fc1.weight"].torch()[0], first)
        assert torch.equal(found["model.decoder.layers.mlp.experts.experts.linear_fc2.weight"].torch()[0], second)
