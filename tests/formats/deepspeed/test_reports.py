"""What users report of DeepSpeed checkpoints, each a small case; names are those of the collection of reports."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from ckpt_tool.errors import CkptError, FormatError, NotFound
from ckpt_tool.formats.deepspeed.reader import READER
from ckpt_tool.geometry.cover import coverage
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.storage.memory import MemoryStore
from ckpt_tool.storage.store import Store
from tests.formats.conformance import FIXTURES, all_rows, assemble, source_of, stored_bytes
from tests.formats.deepspeed.made import (
    FOLDER,
    numbered,
    saved,
    stage2,
    stage3,
    stage3_model,
    stage3_optim,
    states_of,
    with_latest,
)
from tests.storage.recording import RecordingStore

WEIGHTS = {"a": numbered(5, 3), "b": numbered(7, start=100), "c": numbered(2, 2, start=200)}
GROUPS = (("a", "b"), ("c",))
Z3 = FIXTURES / "deepspeed/ds_z3_bf16/ckpt/global_step3"


def opened(files: Mapping[str, bytes]) -> tuple[Store, Manifest]:
    """A store of ``files``, read."""
    store = MemoryStore(with_latest(files))
    return store, READER.read(source_of(store))


def values_of(files: Mapping[str, bytes], fqn: str) -> list[Any]:
    """A whole fp32 tensor."""
    store, manifest = opened(files)
    chunks = READER.resolve(source_of(store), manifest, all_rows(manifest))
    found = assemble(store, manifest, chunks, fqn)
    dtype = np.dtype("<f4") if found.dtype == "float32" else np.dtype(ml_dtypes.bfloat16)
    return list(np.frombuffer(found.data, dtype).astype(np.float32).reshape(found.shape).tolist())


def findings(files: Mapping[str, bytes]) -> list[Finding]:
    """What ``check`` says, information left out."""
    store, manifest = opened(files)
    found = READER.check(source_of(store), manifest)
    return [finding for finding in found if finding.severity is not Severity.INFO]


@pytest.mark.parametrize("make", [stage2, stage3])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_hand_made_checkpoints(make: Any, world_size: int) -> None:
    """Masters and moments of vectors that were really concatenated, padded and cut."""
    files = make(WEIGHTS, GROUPS, world_size=world_size)
    for state, tensors in states_of(WEIGHTS).items():
        for name, tensor in tensors.items():
            assert values_of(files, f"optimizer.state.{name}.{state}") == tensor.tolist()


def test_r44_enums_are_data() -> None:
    """The stage that stage 3 pickles as an enum, which torch refuses to load, is shown as 3."""
    files = stored_bytes(Z3)
    assert any(b"ZeroStageEnum" in data for data in files.values())
    assert READER.read(source_of(MemoryStore(files))).info["zero_stage"] == 3


class TestAbsentWeights:
    """R76: names without elements."""

    def test_placeholder_of_a_known_shape(self) -> None:
        """The tensor is listed with its shape and no bytes, so that nothing can be exported, and check says so."""
        files = stage2(WEIGHTS, GROUPS, module={**WEIGHTS, "b": torch.zeros(0)})
        _, manifest = opened(files)
        row = manifest.tensor_id("module.b")
        assert manifest.tensors.shape_of(row) == (7,)
        rows = manifest.chunks.rows_of(row)
        held = coverage((7,), manifest.chunks.offsets[rows], manifest.chunks.sizes[rows])
        assert held.missing_elements == 7
        assert [(f.kind, f.fqn) for f in findings(files)] == [("absent-weight", "module.b")]
        assert "weight data absent (frozen?)" in findings(files)[0].message

    def test_frozen_weights_of_stage_3(self) -> None:
        """Frozen parameters without fragments, as before fragments were saved."""
        frozen = {"f": torch.zeros(0, dtype=torch.bfloat16)}
        module = {name: torch.zeros(0) for name in WEIGHTS} | frozen
        with_shape = stage3(WEIGHTS, GROUPS, module=module, frozen_param_shapes={"f": torch.Size([8, 8])})
        assert opened(with_shape)[1].tensor("module.f").shape == (8, 8)
        for files in (with_shape, stage3(WEIGHTS, GROUPS, module=module)):
            assert [(f.kind, f.fqn) for f in findings(files)] == [("absent-weight", "module.f")]

    def test_fragments_are_joined(self) -> None:
        """With fragments the frozen parameter is whole again."""
        frozen = numbered(3, 3, start=50)
        padded = torch.cat([frozen.flatten(), torch.full((1,), -1.0)])
        files = stage3(WEIGHTS, GROUPS)
        for rank in (0, 1):
            model = stage3_model(
                WEIGHTS,
                GROUPS,
                module={**dict.fromkeys(WEIGHTS, torch.zeros(0)), "f": torch.zeros(0)},
                frozen_param_shapes={"f": torch.Size([3, 3])},
                frozen_param_fragments={"f": padded[rank * 5 : rank * 5 + 5].clone()},
            )
            files[f"{FOLDER}zero_pp_rank_{rank}_mp_rank_00_model_states.pt"] = saved(model)
        assert values_of(files, "module.f") == frozen.tolist()
        assert findings(files) == []


class TestWrongLengths:
    """R77: "consumed n numels out of m, something is wrong"."""

    def test_stages_1_and_2(self) -> None:
        """The message has what is there, what is expected, and the first parameter that runs over."""
        bigger = {**WEIGHTS, "b": numbered(11, start=100)}
        files = stage2(WEIGHTS, GROUPS)
        files[f"{FOLDER}mp_rank_00_model_states.pt"] = stage2(bigger, GROUPS)[f"{FOLDER}mp_rank_00_model_states.pt"]
        with pytest.raises(FormatError, match=r"group 0: .*= 22 elements, expected 26 .*'b' runs over"):
            opened(files)

    def test_stage_3(self) -> None:
        """The same, where each parameter is cut by itself."""
        bigger = {**WEIGHTS, "c": numbered(6, start=200)}
        models = stage3(bigger, GROUPS)
        files = {
            path: models[path] if "model_states" in path else data for path, data in stage3(WEIGHTS, GROUPS).items()
        }
        with pytest.raises(FormatError, match=r"hold 14 elements, expected 15 of 3 parameters; 'c' runs over"):
            opened(files)

    def test_more_than_expected(self) -> None:
        """Elements that no parameter accounts for are no padding at stage 3, and a mistake of the reader's else."""
        smaller = {**WEIGHTS, "c": numbered(2, start=200)}
        models = stage3(smaller, GROUPS)
        files = {
            path: models[path] if "model_states" in path else data for path, data in stage3(WEIGHTS, GROUPS).items()
        }
        with pytest.raises(FormatError, match=r"hold 14 elements, expected 13"):
            opened(files)


# ------------------------------------------------------------------------------------------- R79: tensor parallelism

NORM, COLUMN, ROW = "norm.weight", "up.weight", "down.weight"
SHARDS = (
    {NORM: numbered(4), COLUMN: numbered(6, 4, start=10)[:3], ROW: numbered(4, 6, start=50)[:, :2]},
    {NORM: numbered(4), COLUMN: numbered(6, 4, start=10)[3:], ROW: numbered(4, 6, start=50)[:, 2:]},
)
RULES = {
    "universal_checkpoint_version": 0.2,
    "tp_replicated_parameter_patterns": [r".*norm\.weight"],
    "parameter_with_row_parallelism_patterns": [r".*down\.weight"],
}
TP = (tuple(SHARDS[0]),)


def tensor_parallel(second: Mapping[str, torch.Tensor] = SHARDS[1], **more: Any) -> dict[str, bytes]:
    """ZeRO-1 on two tensor-parallel ranks with two data-parallel ones each."""
    fields = {"mp_world_size": 2, **more}
    return {**stage2(SHARDS[0], TP, **fields), **stage2(second, TP, mp=1, **fields)}


class TestTensorParallel:
    """R79: universal checkpoints need to know how shards join."""

    @pytest.mark.parametrize("place", ["in the checkpoint", "beside the files", "beside latest"])
    def test_rules_join_shards(self, place: str) -> None:
        """By the record in the checkpoint, or by a file of the user's: weights, masters and moments."""
        files = tensor_parallel(**({"universal_checkpoint_info": RULES} if place == "in the checkpoint" else {}))
        if place != "in the checkpoint":
            folder = FOLDER if place == "beside the files" else ""
            files[f"{folder}universal_checkpoint_info.json"] = json.dumps(RULES).encode()
        whole = {NORM: numbered(4), COLUMN: numbered(6, 4, start=10), ROW: numbered(4, 6, start=50)}
        for name, tensor in whole.items():
            assert values_of(files, f"module.{name}") == tensor.tolist()
        for state, tensors in states_of(whole).items():
            for name, tensor in tensors.items():
                assert values_of(files, f"optimizer.state.{name}.{state}") == tensor.tolist()
        assert findings(files) == []

    def test_without_rules_shards_keep_their_names(self) -> None:
        """Nothing is joined by guessing; the note says what to do, and check which shards are equal."""
        store, manifest = opened(tensor_parallel())
        assert manifest.tensor("module.up.weight@tp1").shape == (3, 4)
        assert (
            values_of(tensor_parallel(), "optimizer.state.down.weight@tp1.exp_avg")
            == ((SHARDS[1][ROW] + 0.25) * 3).tolist()
        )
        assert any("universal_checkpoint_info.json" in note for note in manifest.notes)
        (found,) = findings(tensor_parallel())
        assert (found.kind, found.severity) == ("rules-needed", Severity.WARNING)
        assert "module.norm.weight" in found.message
        assert "module.up.weight" not in found.message
        del store

    def test_replicas_are_compared(self) -> None:
        """A norm that is said to be replicated and is not: its weight and all its states are named."""
        other = {**SHARDS[1], NORM: numbered(4, start=1)}
        found = findings(tensor_parallel(other, universal_checkpoint_info=RULES))
        assert {f.kind for f in found} == {"different-replicas"}
        assert {f.fqn for f in found} == {
            "module.norm.weight",
            *(f"optimizer.state.norm.weight.{state}" for state in ("fp32", "exp_avg", "exp_avg_sq")),
        }

    def test_averaged_copies_may_differ(self) -> None:
        """What the trainer averages is a warning, and the first copy is taken."""
        rules = {**RULES, "parameter_to_average_patterns": [r".*norm"], "tp_replicated_parameter_patterns": []}
        other = {**SHARDS[1], NORM: numbered(4, start=1)}
        files = tensor_parallel(other, universal_checkpoint_info=rules)
        assert {f.severity for f in findings(files)} == {Severity.WARNING}
        assert values_of(files, "module.norm.weight") == [0.0, 1.0, 2.0, 3.0]

    def test_padding_of_the_vocabulary_is_nobodys(self) -> None:
        """Rows behind ``original_vocab_size`` belong to no tensor."""
        rules = {**RULES, "vocabulary_parameter_patterns": [r".*up"], "original_vocab_size": 5}
        files = tensor_parallel(universal_checkpoint_info=rules)
        assert values_of(files, "module.up.weight") == numbered(6, 4, start=10)[:5].tolist()
        assert (
            values_of(files, "optimizer.state.up.weight.exp_avg")
            == ((numbered(6, 4, start=10)[:5] + 0.25) * 3).tolist()
        )

    def test_a_missing_shard(self) -> None:
        """Without all model states the shape of a joined tensor is not known, which is said."""
        files = stage2(SHARDS[0], TP, mp_world_size=2, universal_checkpoint_info=RULES)
        with pytest.raises(NotFound, match=r"up\.weight: its shards on tensor-parallel ranks \[1\] are missing"):
            opened(files)


# --------------------------------------------------------------------------------------- R80, R82, R83: what is read


def test_r80_weights_read_only_the_masters() -> None:
    """Of stage 3 files, which hold all states together, weights take the masters' bytes and no other payload."""
    weights = {"a": numbered(300, 301), "b": numbered(5000)}
    store = RecordingStore(MemoryStore(with_latest(stage3(weights, (("a", "b"),)))))
    manifest = READER.read(source_of(store))
    rows = np.concatenate([manifest.chunks.rows_of(manifest.tensor_id(f"module.{name}")) for name in weights])
    chunks = READER.resolve(source_of(store), manifest, rows)
    read_before = store.nbytes
    store.clear()
    for name, tensor in weights.items():
        found = assemble(store, manifest, chunks, f"module.{name}")
        assert found.data == (tensor + 0.25).numpy().tobytes()
    payload = sum(tensor.numel() for tensor in weights.values()) * 4
    assert store.nbytes == payload
    total = sum(source_of(store).listing.sizes.values())
    assert total > 3 * payload
    assert read_before < 300_000  # heads, directories and pickles of four files


@pytest.mark.parametrize("make", [stage2, stage3])
def test_r82_partitions_on_other_disks(make: Any) -> None:
    """Of four ranks' partitions two are here: which ones are missing is said, and what is here can be read."""
    files = make(WEIGHTS, GROUPS, world_size=4)
    missing = [f"{FOLDER}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (2, 3)]
    files = {path: data for path, data in files.items() if path not in missing}
    _, manifest = opened(files)
    assert manifest.info["missing_files"] == missing
    assert any(note.startswith(f"have 2 of 4 partitions; missing files: {missing[0]}") for note in manifest.notes)
    assert [f.message.partition(" is missing")[0] for f in findings(files)] == missing
    row = manifest.tensor_id("optimizer.state.a.exp_avg")
    rows = manifest.chunks.rows_of(row)
    held = coverage((5, 3), manifest.chunks.offsets[rows], manifest.chunks.sizes[rows])
    assert (held.overlapping, held.missing_elements > 0) == ((), True)


@pytest.mark.parametrize(("optim", "model"), [("stage2", stage2), ("stage3", stage3)])
def test_r83_states_keep_name_and_dtype(optim: str, model: Any) -> None:
    """Muon's momentum in bfloat16 beside fp32 masters, under its own name."""
    files = model(WEIGHTS, GROUPS)
    for rank in (0, 1):
        name = f"{FOLDER}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        value = torch.load(io.BytesIO(files[name]), weights_only=True)
        fields = value["optimizer_state_dict"]
        base = fields["base_optimizer_state" if optim == "stage2" else "optimizer_state_dict"]
        for states in base["state"].values():
            states["momentum_buffer"] = states.pop("exp_avg").to(torch.bfloat16)
            del states["exp_avg_sq"]
        files[name] = saved(value)
    _, manifest = opened(files)
    meta = manifest.tensor("optimizer.state.a.momentum_buffer")
    assert (meta.dtype.name, meta.section) == ("bfloat16", "optimizer")
    expected = states_of(WEIGHTS)["exp_avg"]["a"].to(torch.bfloat16).float()
    assert values_of(files, "optimizer.state.a.momentum_buffer") == expected.tolist()


def test_sub_groups_whose_ends_are_not_recorded() -> None:
    """A rank's vectors follow one another, wherever a sub-group ends: a parameter may straddle two."""
    states = states_of(WEIGHTS)
    files = stage3(WEIGHTS, (("a", "b", "c"),))
    for rank in (0, 1):
        value = stage3_optim(states, (("a", "b", "c"),), 2, rank)
        fields = value["optimizer_state_dict"]
        (vector,) = fields["fp32_flat_groups"]
        fields["fp32_flat_groups"] = [vector[:5].clone(), vector[5:].clone()]
        base = fields["optimizer_state_dict"]["state"]
        moments = {name: base[0][name] for name in ("exp_avg", "exp_avg_sq")}
        base[0] = {name: moment[:5].clone() for name, moment in moments.items()}
        base[1] = {name: moment[5:].clone() for name, moment in moments.items()}
        files[f"{FOLDER}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = saved(value)
    for state, tensors in states.items():
        for name, tensor in tensors.items():
            assert values_of(files, f"optimizer.state.{name}.{state}") == tensor.tolist()


def test_errors_are_of_this_package() -> None:
    """What is no model state at all is the file's fault, and says which."""
    files = stage2(WEIGHTS, GROUPS)
    path = f"{FOLDER}mp_rank_00_model_states.pt"
    with pytest.raises(CkptError, match="expected a dict, got list"):
        opened({**files, path: saved([1, 2])})
