"""The torch_dist reader on checkpoints of real Megatron: 0.12 and 0.19, each form of optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.errors import FormatError, NotFound, UnsafePickle
from ckpt_tool.formats.base import Source
from ckpt_tool.formats.megatron.dist_reader import READER
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import FileRange
from ckpt_tool.manifest.optimizer import optimizer_views
from ckpt_tool.manifest.tables import ChunkFlag
from ckpt_tool.storage.memory import MemoryStore
from ckpt_tool.storage.open import open_store
from tests.formats.conformance import Case, ReaderTests, Truth, all_rows, assemble, source_of, stored_bytes
from tests.formats.dcp.build import NO_GAP
from tests.formats.megatron.places import (
    CHECKPOINTS,
    by_layer,
    dense_shapes,
    expert_shapes,
    extra_folders,
    extra_truth,
    truth_from_seed,
)
from tests.storage.recording import RecordingStore

DENSE = truth_from_seed(dense_shapes(4, 112))
DENSE_TP1 = truth_from_seed(dense_shapes(4, 104))
EXPERTS = truth_from_seed(expert_shapes(2, 104, 4))
COMMON_STEPS = ("optimizer.param_state.*.step", "optimizer.optimizer.state.common_step")


def dense_case(name: str, *, max_read_requests: int = 5, truth: Callable[[], Mapping[str, Truth]] = DENSE) -> Case:
    """A checkpoint of the dense model, by its run's folder."""
    return Case(name, CHECKPOINTS / name / "ckpt", truth, COMMON_STEPS, max_read_requests, max_resolve_requests=8)


def expert_case(name: str, *, max_read_requests: int) -> Case:
    """A checkpoint of the model with experts."""
    return Case(name, CHECKPOINTS / name / "ckpt", EXPERTS, COMMON_STEPS, max_read_requests, max_resolve_requests=2)


CASES = (
    dense_case("td_full_t2p2d2"),
    dense_case("td_dpr_t2p2d2"),
    dense_case("td_nodist_t2"),
    dense_case("neg_noextra"),
    dense_case("old012_fsms_t2p1d2", max_read_requests=6),
    dense_case("old012_fsms_t1d3", max_read_requests=6, truth=DENSE_TP1),
    dense_case("dpr_vpp_p2", truth=DENSE_TP1),
    dense_case("dpr_uneven_p2", truth=DENSE_TP1),
    dense_case("td_dpzero_t2p2", max_read_requests=9),
    dense_case("td_full_t4p1", truth=by_layer(truth_from_seed(dense_shapes(4, 128)))),
    expert_case("moe_seq_e2", max_read_requests=5),
    expert_case("moe_dpr_e2", max_read_requests=5),
    expert_case("td_dpzero_moe_e2", max_read_requests=8),
    Case(
        "one_iteration",
        CHECKPOINTS / "td_dpr_t2p2d2/ckpt/iter_0000010",
        DENSE,
        max_read_requests=4,
        max_resolve_requests=8,
    ),
    *(
        Case(folder.name, folder / "ckpt", extra_truth(folder), COMMON_STEPS, max_read_requests=64)
        for folder in extra_folders("ckpt/iter_*/.metadata")
    ),
)


class TestMegatronDist(ReaderTests):
    """The contract of readers."""

    reader = READER
    reader_import = "ckpt_tool.formats.megatron.dist_reader:READER"
    cases = CASES


def files_of(name: str) -> dict[str, bytes]:
    """A checkpoint's files, to be changed."""
    return stored_bytes(CHECKPOINTS / name / "ckpt")


def source_at(name: str) -> Source:
    """A checkpoint on disk."""
    return Source(*open_store(CHECKPOINTS / name / "ckpt"))


def test_every_form_gives_the_same_tensors() -> None:
    """Buckets, flattened ranges, model-shaped and undistributed state read alike: names, types and shapes."""
    names = ("td_full_t2p2d2", "td_dpr_t2p2d2", "td_nodist_t2", "old012_fsms_t2p1d2")
    tables = []
    for name in names:
        manifest = READER.read(source_at(name))
        tables.append(
            sorted((m.fqn, m.dtype.name, m.shape, m.path) for m in manifest.tensors if not m.fqn.endswith("step"))
        )
    assert [table == tables[0] for table in tables] == [True] * len(names)
    assert len(tables[0]) == 36


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("td_full_t2p2d2", "fully_reshardable"),
        ("td_dpr_t2p2d2", "dp_reshardable"),
        ("td_nodist_t2", "not distributed"),
        ("old012_fsms_t2p1d2", "fully_sharded_model_space"),
    ],
)
def test_form_is_told(name: str, form: str) -> None:
    """``info`` names the form that the optimizer's state was stored in."""
    assert READER.read(source_at(name)).info["optimizer_form"] == form


def test_run_is_described() -> None:
    """Arguments become mesh, step, world size and a map of layers to stages, without being executed."""
    manifest = READER.read(source_at("td_full_t2p2d2"))
    assert manifest.mesh is not None
    assert (manifest.mesh.axes, manifest.mesh.sizes) == (("pp", "dp", "tp"), (2, 2, 2))
    info = manifest.info
    assert (info["step"], info["world_size"], info["layer_stages"]) == (10, 8, [[0, 1], [2, 3]])
    assert info["args"]["padded_vocab_size"] == 112
    assert info["args"]["num_query_groups"] == 2
    assert info["args"]["transformer_impl"] == "local"


def test_stages_are_not_made_up() -> None:
    """A file that one process wrote for a run of two stages tells of no stage, and none is claimed."""
    assert "layer_stages" not in READER.read(source_at("neg_noextra")).info


def test_objects_keep_their_keys() -> None:
    """Random states and extra states come out of mcore's one-element lists, under the names of their pieces."""
    with open_checkpoint(CHECKPOINTS / "td_full_t2p2d2/ckpt") as checkpoint:
        objects = checkpoint.objects()
    assert {f"rng_state/shard_{pp}.{tp}_2.2" for pp in (0, 1) for tp in (0, 1)} <= set(objects)
    assert sorted(objects["rng_state/shard_0.0_2.2"][0]) == [
        "cuda_rng_state", "np_rng_state", "random_rng_state", "rng_tracker_states", "torch_rng_state",
    ]  # fmt: skip
    assert objects["model.decoder.layers.mlp.linear_fc1._extra_state/shard_3_4"] is None
    assert objects["iteration"] == 10
    assert objects["optimizer.optimizer.param_groups.0.lr"] == pytest.approx(0.00012580800065610593, rel=0, abs=0)
    assert objects["args"].cls.qualified == "argparse.Namespace"


def test_common_file_and_common_object_read_alike() -> None:
    """``common.pt`` of 0.12 gives the same kinds of names as the object of 0.19."""
    old, new = (READER.read(source_at(name)) for name in ("old012_fsms_t2p1d2", "td_full_t2p2d2"))
    shared = {"args", "iteration", "checkpoint_version", "num_floating_point_operations_so_far"}
    assert shared <= {blob.fqn for blob in old.blobs}
    assert shared <= {blob.fqn for blob in new.blobs}
    assert (old.info["common_state"], new.info["common_state"]) == ("common.pt", "common_state/shard_0_1")


def test_flattened_ranges_are_cut_into_boxes() -> None:
    """State of 0.12 comes in the weights' shape (R50): gate and up halves of a rank are boxes of one tensor."""
    manifest = READER.read(source_at("old012_fsms_t2p1d2"))
    number = manifest.tensor_id("optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight")
    boxes = {str(manifest.chunks.box(int(row), 3)) for row in manifest.chunks.rows_of(number)}
    assert boxes == {f"[{n}:{n + 1}, {at}:{at + 24}, 0:32]" for n in range(4) for at in (0, 24, 48, 72)}


def test_flattened_shapes_are_taken_from_weights() -> None:
    """Without ``mcore_data`` the weights tell the shapes, and a note says so."""
    files = files_of("old012_fsms_t2p1d2")
    path = "iter_0000010/.metadata"
    files[path] = files[path].replace(b"mcore_data", b"other_data")
    store = MemoryStore(files)
    manifest = READER.read(source_of(store))
    chunks = READER.resolve(source_of(store), manifest, all_rows(manifest))
    fqn = "optimizer.state.param.decoder.layers.mlp.linear_fc2.weight"
    assert assemble(store, manifest, chunks, fqn) == DENSE()[fqn]
    assert any("have no shape in mcore_data" in note for note in manifest.notes)


def test_without_a_common_state_nothing_loads() -> None:
    """0.12 keeps arguments and hyperparameters in a file that no metadata lists: its loss is an error."""
    files = files_of("old012_fsms_t2p1d2")
    assert not list(_errors(files))
    del files["iter_0000010/common.pt"]
    (finding,) = _errors(files)
    assert finding.where == FileRange("iter_0000010/common.pt", 0, 0)


def _errors(files: dict[str, bytes]) -> list[Finding]:
    source = source_of(MemoryStore(files))
    return [one for one in READER.check(source, READER.read(source)) if one.severity is Severity.ERROR]


def test_buckets_say_which_order_fits() -> None:
    """Decoded buckets (R51) come with the evidence: the order of registration whose boundaries all fit."""
    manifest = READER.read(source_at("td_dpr_t2p2d2"))
    assert "optimizer buckets decoded: registration order local, every boundary fits" in manifest.notes
    assert not any("dp_group_idx" in fqn for fqn in manifest.tensors.fqns)


def test_buckets_without_arguments_are_left_alone() -> None:
    """Without the run's arguments buckets stay what they are (R51), the missing fact is named, weights still read."""
    files = files_of("td_dpr_t2p2d2")
    path = "iter_0000010/.metadata"
    files[path] = files[path].replace(b"common_state/shard_0_1", b"uncommon_stat/shard_0_1"[:22])
    store = MemoryStore(files)
    manifest = READER.read(source_of(store))
    assert manifest.info["optimizer_undecoded"] == (
        "the tensor- and pipeline-parallel sizes of the run are not known: no args were saved"
    )
    assert sum("bucket_idx" in fqn for fqn in manifest.tensors.fqns) == 18
    chunks = READER.resolve(source_of(store), manifest, all_rows(manifest))
    fqn = "model.decoder.layers.mlp.linear_fc1.weight"
    assert assemble(store, manifest, chunks, fqn) == DENSE()[fqn]
    kinds = {finding.kind for finding in READER.check(source_of(store), manifest)}
    assert "optimizer-undecoded" in kinds


def test_resolving_costs_a_request_per_item_at_most() -> None:
    """On storage where requests are not merged, each stored item costs one, however many boxes it holds."""
    memory = MemoryStore(files_of("old012_fsms_t2p1d2"), cost=NO_GAP)
    store = RecordingStore(memory)
    source = source_of(store)
    manifest = READER.read(source)
    in_items = np.flatnonzero(manifest.chunks.flags & ChunkFlag.UNRESOLVED)
    items = {(int(manifest.chunks.file[row]), int(manifest.chunks.offset[row])) for row in in_items}
    common = [row for row in in_items if manifest.files.paths[manifest.chunks.file[row]].endswith("common.pt")]
    store.clear()
    READER.resolve(source, manifest, np.setdiff1d(in_items, common))
    assert len(store.calls) == len(items) - len({int(manifest.chunks.offset[row]) for row in common})


def test_missing_extra_state_is_found() -> None:
    """Objects that Megatron's strict loading would miss are a finding; the tensors are read all the same."""
    source = source_at("neg_noextra")
    findings = {f.kind: f for f in READER.check(source, READER.read(source))}
    assert findings["missing-extra-state"].severity is Severity.WARNING
    assert "Missing key" in findings["missing-extra-state"].message
    assert "0 random states, expected 4" in findings["rng-grid"].message


def test_sound_checkpoint_has_no_findings() -> None:
    """What Megatron loads is found without fault."""
    source = source_at("td_full_t2p2d2")
    assert list(READER.check(source, READER.read(source))) == []


def test_missing_file_is_found() -> None:
    """A rank's file that is gone is named with what lay in it; a stray one is a warning."""
    files = files_of("td_full_t2p2d2")
    del files["iter_0000010/__3_0.distcp"]
    files["iter_0000010/__99_0.distcp"] = b"left over"
    source = source_of(MemoryStore(files))
    findings = list(READER.check(source, READER.read(source)))
    assert [(f.kind, f.where.path if f.where else None) for f in findings] == [
        ("missing-file", "iter_0000010/__3_0.distcp"),
        ("unknown-file", "iter_0000010/__99_0.distcp"),
    ]


def test_param_state_of_one_rank_is_explained() -> None:
    """A ``param_state`` in the common state is rank 0's alone (R53): one line says what Megatron would do."""
    notes = READER.read(source_at("old012_fsms_t2p1d2")).notes
    assert sum("Cannot merge two lists with different lengths" in note for note in notes) == 1


def test_dangerous_arguments_are_refused() -> None:
    """A common state that asks for ``os.system`` is reported, and nothing runs."""
    files = files_of("old012_fsms_t2p1d2")
    path = "iter_0000010/.metadata"
    files[path] = b"\x80\x02cos\nsystem\nX\x04\x00\x00\x00true\x85R."
    with pytest.raises(UnsafePickle):
        READER.read(source_of(MemoryStore(files)))


def test_item_of_another_shape_is_refused() -> None:
    """An item that does not hold what the metadata says is an error with its place."""
    files = files_of("td_full_t2p2d2")
    path = "iter_0000010/.metadata"
    source = source_of(MemoryStore(files))
    manifest = READER.read(source)
    row = int(manifest.chunks.rows_of(manifest.tensor_id("model.decoder.final_layernorm.weight"))[0])
    other = int(manifest.chunks.rows_of(manifest.tensor_id("model.output_layer.weight"))[0])
    offset = manifest.chunks.offset.copy()
    length, file = manifest.chunks.length.copy(), manifest.chunks.file.copy()
    offset[row], length[row], file[row] = offset[other], length[other], file[other]
    wrong = manifest.replace(chunks=manifest.chunks.replace(offset=offset, length=length, file=file))
    with pytest.raises(FormatError, match=r"is to have .* elements of bfloat16"):
        READER.resolve(source, wrong, np.array([row]))
    assert path in files


def test_cut_file_is_refused() -> None:
    """An item beyond its file's end is an error that counts the missing bytes."""
    files = files_of("td_full_t2p2d2")
    path = "iter_0000010/__0_0.distcp"
    files[path] = files[path][:5000]
    source = source_of(MemoryStore(files))
    with pytest.raises(FormatError, match=r"ends at byte 56,558, the file has 5,000") as caught:
        READER.read(source)
    assert str(caught.value).startswith("iter_0000010/__0_0.distcp: the item of 'common_state")


def test_selected_tensors_resolve_by_themselves(tmp_path: Path) -> None:
    """Tensors whose items hold several boxes read the same when only they are asked for."""
    del tmp_path
    with open_checkpoint(CHECKPOINTS / "td_dpr_t2p2d2/ckpt") as checkpoint:
        view = checkpoint["optimizer.state.exp_avg_sq.decoder.layers.mlp.linear_fc1.weight"]
        piece = view[2, 20:60, 3:9]
    truth = np.frombuffer(DENSE()[view.fqn].data, dtype=np.float32).reshape(view.shape)
    np.testing.assert_array_equal(piece, truth[2, 20:60, 3:9])


def test_incomplete_iteration_is_not_read() -> None:
    """Without ``metadata.json``, which is written last, an iteration is not complete."""
    files = files_of("td_full_t2p2d2")
    del files["iter_0000010/metadata.json"]
    with pytest.raises(NotFound, match="iter_0000010 is not complete"):
        READER.read(source_of(MemoryStore(files)))


@pytest.mark.parametrize("name", ["td_full_t2p2d2", "td_dpr_t2p2d2", "old012_fsms_t2p1d2"])
def test_optimizer_is_seen_by_parameter(name: str) -> None:
    """State that is stored slot by slot is seen parameter by parameter: each weight has a master and two moments."""
    manifest = READER.read(source_at(name))
    view = next(view for view in optimizer_views(manifest) if len(view.parameters) > 1)
    assert {f"model.{key}" for key in view.parameters} == {m.fqn for m in manifest.tensors if m.section == "model"}
    slots = {tuple(sorted(states)) for key, states in view.parameters.items() if "param_state" not in str(key)}
    assert slots == {("exp_avg", "exp_avg_sq", "param")}


def test_resolved_manifest_is_checked_alike() -> None:
    """After resolving, ``check`` still knows which files are used."""
    source = source_at("td_dpr_t2p2d2")
    manifest = READER.read(source)
    resolved = manifest.replace(chunks=READER.resolve(source, manifest, all_rows(manifest)))
    assert list(READER.check(source, resolved)) == []
