"""What older versions of mcore load, and random states that are made anew."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.errors import LayoutError, UsageError
from ckpt_tool.formats._pickle.nodes import Global
from ckpt_tool.formats.megatron.dist_reader import READER
from ckpt_tool.formats.megatron.fresh_rng import fresh_random_state, fresh_random_states
from ckpt_tool.formats.megatron.target_dialect import dialect_of
from ckpt_tool.formats.megatron.target_grid import TargetGrid
from ckpt_tool.storage.open import open_store
from tests.formats.conformance import all_rows, assemble, source_of
from tests.formats.megatron.places import CHECKPOINTS, dense_shapes, expert_shapes, padded_for, truth_from_seed
from tests.formats.megatron.test_rank_writer import loaded

DENSE = truth_from_seed(dense_shapes(4, 112))
EXPERTS = truth_from_seed(expert_shapes(2, 104, 4))
CASES: tuple[tuple[str, str, dict[str, int], str], ...] = (
    ("0.12", "td_dpr_t2p2d2", {"tp": 4, "dp": 2}, "fully_sharded_model_space"),
    ("0.12.3", "moe_seq_e2", {"dp": 4, "ep": 4}, "fully_sharded_model_space"),
    ("0.14", "td_full_t2p2d2", {}, "fully_sharded_model_space"),
    ("0.16.1", "legacy_t2p2", {"pp": 2}, "fully_reshardable"),
)


@pytest.mark.parametrize(("version", "name", "mesh", "form"), CASES, ids=[version for version, *_ in CASES])
def test_other_versions_have_the_same_truth(
    version: str, name: str, mesh: dict[str, int], form: str, tmp_path: Path
) -> None:
    """Flattened or not, with ``common.pt`` or not: weights, masters and moments read back are the truth."""
    options: dict[str, Any] = {**mesh, "mcore_version": version, "durable": False}
    reshard(CHECKPOINTS / name / "ckpt", tmp_path / "out", to="megatron-dist", **options)
    store, _ = open_store(tmp_path / "out")
    source = source_of(store)
    manifest = READER.read(source)
    chunks = READER.resolve(source, manifest, all_rows(manifest))
    truth = EXPERTS() if "moe" in name else padded_for(dict(DENSE()), mesh.get("tp", 1))
    found = {m.fqn for m in manifest.tensors if m.section == "model" or m.fqn.startswith("optimizer.state.")}
    assert found == set(truth)
    assert {fqn: assemble(store, manifest, chunks, fqn) for fqn in found} == truth
    assert manifest.info["optimizer_form"] == form
    assert manifest.info["common_state"] == "common.pt"
    assert manifest.info["metadata_json"]["common_backend"] == "torch"


def test_flattened_state_is_what_mcore_0_12_reads(tmp_path: Path) -> None:
    """Shapes, chunks and the tensors inside of items have one more dimension; original shapes stand in mcore_data."""
    options: dict[str, Any] = {"tp": 2, "mcore_version": "0.12", "durable": False}
    reshard(CHECKPOINTS / "td_full_t2p2d2/ckpt", tmp_path / "out", to="megatron-dist", **options)
    folder = tmp_path / "out/iter_0000010"
    metadata = dcp.FileSystemReader(folder).read_metadata()
    key = "optimizer.state.fp32_param.decoder.layers.mlp.linear_fc1.weight"
    entry = metadata.state_dict_metadata[key]
    assert tuple(entry.size) == (4, 4, 1, 24 * 32)
    shape = metadata.mcore_data[key]["nd_reformulated_orig_global_shape"]
    assert shape == (4, 96, 32)
    index = next(i for i in metadata.storage_data if i.fqn == key)
    place = metadata.storage_data[index]
    with (folder / place.relative_path).open("rb") as file:
        file.seek(place.offset)
        (tmp_path / "item.pt").write_bytes(file.read(place.length))
    assert torch.load(tmp_path / "item.pt").shape == (1, 1, 1, 24 * 32)
    common = loaded(folder / "common.pt")
    assert common["optimizer"]["param_state_sharding_type"] == "fully_sharded_model_space"
    assert "content_metadata" not in common
    assert common["args"].ckpt_fully_parallel_save is True
    assert not hasattr(common["args"], "attention_backend")
    pickle.loads((folder / ".metadata").read_bytes())


def test_versions_are_checked() -> None:
    """What is no version, or none that is known, is refused."""
    assert dialect_of(None) == dialect_of("0.19") == dialect_of("0.20.0rc1")
    for text in ("twelve", "0.7"):
        with pytest.raises(UsageError):
            dialect_of(text)


def test_fresh_random_states_are_those_of_the_libraries() -> None:
    """Python's, numpy's and torch's own generators, seeded alike, have the same states."""
    found = fresh_random_state(1234, stage=2, tensor_rank=1)
    random.seed(1434)
    assert found["random_rng_state"] == random.getstate()
    generator = torch.Generator().manual_seed(1434)
    assert found["torch_rng_state"] == generator.get_state().numpy().tobytes()
    state: Any = np.random.RandomState(1434).get_state()
    assert [np.asarray(one).tolist() for one in found["np_rng_state"]] == [np.asarray(one).tolist() for one in state]
    tracker = found["rng_tracker_states"]["model-parallel-rng"]
    assert np.frombuffer(tracker, dtype=np.int64).tolist() == [1434 + 2718 + 1, 0]


def test_random_states_are_emitted_for_another_grid(tmp_path: Path) -> None:
    """Distributed and per-rank targets have one for each rank of the model; torch reads them; args say so."""
    source = CHECKPOINTS / "td_full_t2p2d2/ckpt"
    options: dict[str, Any] = {"tp": 1, "pp": 4, "rank_state": "emit", "durable": False}
    reshard(source, tmp_path / "dist", to="megatron-dist", **options)
    reshard(source, tmp_path / "ranks", to="megatron-legacy", **options)
    folder = tmp_path / "dist/iter_0000010"
    metadata = dcp.FileSystemReader(folder).read_metadata()
    keys = {i.fqn: place for i, place in metadata.storage_data.items() if i.fqn.startswith("rng_state")}
    assert sorted(keys) == [f"rng_state/shard_{stage}.0_4.1" for stage in range(4)]
    place = keys["rng_state/shard_3.0_4.1"]
    with (folder / place.relative_path).open("rb") as file:
        file.seek(place.offset)
        (tmp_path / "item.pt").write_bytes(file.read(place.length))
    [[state]] = torch.load(tmp_path / "item.pt", weights_only=False)
    legacy = loaded(tmp_path / "ranks/iter_0000010/mp_rank_00_003/model_optim_rng.pt")
    [other] = legacy["rng_state"]
    for one in (state, other):
        torch.Generator().set_state(one["torch_rng_state"])
        assert torch.equal(one["torch_rng_state"], torch.Generator().manual_seed(1534).get_state())
        assert one["cuda_rng_state"].dtype == torch.uint8
    assert legacy["args"].no_save_rng is None
    with pytest.raises(UsageError, match="for targets of Megatron alone"):
        reshard(source, tmp_path / "no", to="dcp", rank_state="emit")
    with pytest.raises(LayoutError, match="do not tell the seed"):
        fresh_random_states(Global("argparse", "Namespace").stub(), TargetGrid(1, 1, 1, 1, 1), 0, 0)


@pytest.mark.peer
@pytest.mark.parametrize(
    ("name", "mesh", "run"),
    [("td_dpr_t2p2d2", {}, ""), ("td_full_t2p2d2", {"tp": 2, "pp": 2}, "--tp 2 --pp 2")],
)
def test_megatron_0_12_loads(name: str, mesh: dict[str, int], run: str, launcher: Path, tmp_path: Path) -> None:
    """``CKPT_PEER_MEGATRON_012`` names the folder of an unpacked wheel of megatron-core 0.12.3."""
    options: dict[str, Any] = {**mesh, "mcore_version": "0.12", "rank_state": "emit", "durable": False}
    reshard(CHECKPOINTS / name / "ckpt", tmp_path / "out", to="megatron-dist", **options)
    n_ranks = mesh.get("tp", 1) * mesh.get("pp", 1)
    command = [os.environ["CKPT_PEER_MEGATRON"], "launch.py", str(n_ranks), "mk_old.py", "load", str(tmp_path / "out")]
    environment = {**os.environ, "MCORE": "0.12.3", "PYTHONPATH": os.environ["CKPT_PEER_MEGATRON_012"]}
    done = subprocess.run(
        [*command, *run.split()], cwd=launcher, env=environment, capture_output=True, text=True, check=False
    )
    assert "LOAD OK" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
