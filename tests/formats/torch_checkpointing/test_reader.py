"""torch-checkpointing: the reader's contract on real files of every variant, and what is said of wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ckpt_tool.errors import CkptError, FormatError, UnsafePickle, Unsupported
from ckpt_tool.formats.detect import detect
from ckpt_tool.formats.torch_checkpointing.reader import READER
from ckpt_tool.manifest.finding import Severity
from ckpt_tool.storage.memory import MemoryStore
from tests.formats.conformance import ReaderTests, all_rows, assemble, source_of
from tests.formats.torch_checkpointing.real import FAMILY, METADATA, case, cases, edited, files_of, to_version_1

UNEVEN = "fsdp2_tp_4x2_uneven"
GRID = "fsdp2_tp_2x2"
SAFE = "fsdp2_4r_safetensors"


class TestTorchCheckpointing(ReaderTests):
    """Torch and safetensors items, with resharders and without, meshes of one and two axes."""

    reader = READER
    reader_import = "ckpt_tool.formats.torch_checkpointing.reader:READER"
    cases = cases()


def read_all(files: dict[str, bytes]) -> dict[str, Any]:
    """Every tensor, joined."""
    store = MemoryStore(files)
    manifest = READER.read(source_of(store))
    chunks = READER.resolve(source_of(store), manifest, all_rows(manifest))
    return {fqn: assemble(store, manifest, chunks, fqn) for fqn in manifest.tensors.fqns}


def refusal(files: dict[str, bytes]) -> CkptError:
    """The error of reading ``files``."""
    with pytest.raises(CkptError) as caught:
        READER.read(source_of(MemoryStore(files)))
    return caught.value


@pytest.mark.parametrize("name", [GRID, SAFE, UNEVEN, "plain_odd"])
def test_metadata_of_version_1(name: str) -> None:
    """The older metadata says the same."""
    files = edited(files_of(name), to_version_1)
    assert read_all(files) == case(FAMILY / name).truth()
    assert READER.read(source_of(MemoryStore(files))).info["version"] == "1.0"


@pytest.mark.parametrize("name", [GRID, UNEVEN, "strided_unresolved"])
def test_without_metadata_the_tensors_say_where_they_belong(name: str) -> None:
    """A manager that is used again writes no metadata: the DTensors in the files hold their placements too."""
    files = files_of(name)
    del files[METADATA]
    assert read_all(files) == case(FAMILY / name).truth()


def test_replicas_without_placement_are_told_by_checksums() -> None:
    """Counters are equal in all files and one tensor; random states differ and each rank keeps its own."""
    files = files_of(GRID)
    del files[METADATA]
    manifest = READER.read(source_of(MemoryStore(files)))
    assert [fqn for fqn in manifest.tensors.fqns if "rng" in fqn] == [f"train_state.rng@rank{r}" for r in range(4)]
    assert len(manifest.chunks.rows_of(manifest.tensor_id("model.calls"))) == 4
    assert manifest.notes == (
        "no metadata.pkl: placements are those that the files' own DTensors record",
        "15 tensors record no placement and have equal checksums in all files: replicas",
    )


def test_safetensors_without_metadata_are_kept_apart() -> None:
    """Local shards of safetensors files record neither placement nor checksum: nothing is joined by guess."""
    files = files_of(SAFE)
    del files[METADATA]
    manifest = READER.read(source_of(MemoryStore(files)))
    assert manifest.tensor("model.head.weight@rank0").shape == (2, 20)
    assert len(manifest.tensors) == 15 * 4


def test_values_that_are_no_tensors() -> None:
    """Python objects stand in torch files, JSON and raw bytes in files of their own; ranks that agree have one."""
    source = source_of(MemoryStore(files_of("plain_odd")))
    manifest = READER.read(source)
    blobs = READER.load_blobs(source, manifest, range(len(manifest.blobs)))
    values = {blob.fqn: blob.value for blob in blobs}
    assert values["conf"] == {"b": [1, 2.5, None, True], "a": "ü"}
    assert values["blob"] == b"RAW\x00BYTES"
    assert values["objs.set"] == {1, 2}
    assert values["objs.np"].tolist() == [0, 1, 2]
    assert values["odd.nested.list.2"] == 5
    assert values["step"] == manifest.info["step"] == 12
    grid = READER.read(source_of(MemoryStore(files_of(GRID))))
    assert [(b.value, b.rank) for b in grid.blobs if b.fqn == "train_state.rank"] == [(rank, rank) for rank in range(4)]
    assert [(b.value, b.rank) for b in grid.blobs if b.fqn == "step"] == [(2, None)]


def test_the_mesh_is_recorded() -> None:
    """Names and sizes of axes come from the metadata."""
    mesh = READER.read(source_of(MemoryStore(files_of(GRID)))).mesh
    assert mesh is not None
    assert (mesh.axes, mesh.sizes) == (("dp", "tp"), (2, 2))


def test_detection() -> None:
    """Metadata decides; without it several items whose files were streamed, with the same ranks."""
    files = files_of(GRID)
    assert detect(source_of(MemoryStore(files))) is READER
    del files[METADATA]
    assert detect(source_of(MemoryStore(files))) is READER
    del files["step_2.pt"]
    assert READER.probe(source_of(MemoryStore(files))).confidence == 0.0
    other = {**files_of(GRID), METADATA: b"\x80\x04]."}
    assert READER.probe(source_of(MemoryStore(other))).why == "metadata.pkl is a pickle of something else"


def test_an_attempt_that_was_not_committed() -> None:
    """The name of the folder tells; files of ranks beyond the world size are another attempt's."""
    files = files_of(UNEVEN)
    files["model_8.pt"] = files["model_0.pt"]
    source = source_of(MemoryStore(files, url="memory://run/tmp_step_5"))
    manifest = READER.read(source)
    assert [note.partition(":")[0] for note in manifest.notes] == [
        "the folder's name begins with 'tmp_'",
        "1 file of no rank of this save is left out",
    ]
    (finding,) = READER.check(source, manifest)
    assert (finding.kind, finding.severity) == ("unknown-file", Severity.WARNING)


def test_missing_files_and_tensors_are_findings() -> None:
    """The rest is read; what is missing is said."""
    files = files_of(GRID)
    del files["model_2.pt"]

    def one_more(root: dict[str, Any]) -> None:
        paths = root["metadata"]["model"]["nested_path_to_metadata"]
        paths['["ghost"]'] = paths['["emb.weight"]']

    source = source_of(MemoryStore(edited(files, one_more)))
    findings = list(READER.check(source, READER.read(source)))
    assert [(f.kind, f.fqn) for f in findings] == [("missing-file", None), ("missing-tensor", "model.ghost")]
    assert findings[0].message == "model_2.pt is missing: its rank's boxes are not here"


def test_cut_json_is_a_finding() -> None:
    """An object that cannot be parsed is found by ``check``, and an error when it is asked for."""
    files = files_of("plain_odd")
    files["conf.json"] = files["conf.json"][:-4]
    source = source_of(MemoryStore(files))
    manifest = READER.read(source)
    (finding,) = READER.check(source, manifest)
    assert (finding.kind, finding.fqn) == ("damaged-object", "conf")
    with pytest.raises(FormatError, match="expected JSON"):
        READER.load_blobs(source, manifest, range(len(manifest.blobs)))


def placement_of(root: dict[str, Any], path: str = '["0.weight"]') -> dict[str, Any]:
    """What the metadata of the uneven checkpoint says of its weight."""
    data: dict[str, Any] = root["metadata"]["model"]["nested_path_to_metadata"][path][0]["sharding_metadata"]
    return data


def other_dtype(root: dict[str, Any]) -> None:
    """Another element type."""
    placement_of(root)["data"]["dtype"] = "torch.float16"


def other_rows(root: dict[str, Any]) -> None:
    """More rows than are stored."""
    placement_of(root)["data"]["global_shape"] = [32, 4]


def partial(root: dict[str, Any]) -> None:
    """Summands."""
    placement_of(root)["data"]["placements"][0] = {"type": "Partial"}


def unknown_kind(root: dict[str, Any]) -> None:
    """A kind of placement that is not known."""
    placement_of(root)["type"] = "next_v9"


def small_mesh(root: dict[str, Any]) -> None:
    """A mesh with fewer ranks than hold the tensor."""
    placement_of(root)["data"]["mesh_spec"]["mesh_shape"] = (2, 2)


def few_ranks(root: dict[str, Any]) -> None:
    """A rank that holds the tensor and is not listed."""
    root["metadata"]["model"]["nested_path_to_metadata"]['["0.weight"]'][0]["ranks"] = (0, 1)


def no_shape(root: dict[str, Any]) -> None:
    """A placement without a shape."""
    del placement_of(root)["data"]["global_shape"]


def wrong_dim(root: dict[str, Any]) -> None:
    """A dimension that the tensor does not have."""
    placement_of(root)["data"]["placements"][1]["dim"] = 7


def leaves(root: dict[str, Any]) -> None:
    """A file outside of the checkpoint."""
    root["metadata"]["model"]["rank_to_layout_info"][0] = {
        "file_path": "../secret.pt",
        "serialization_format": {"type": "TorchSerialization"},
    }


def one_file_for_two(root: dict[str, Any]) -> None:
    """Two ranks with one file."""
    layouts = root["metadata"]["model"]["rank_to_layout_info"]
    layouts[0] = {"file_path": "model_1.pt", "serialization_format": {"type": "TorchSerialization"}}


def fewer_layouts(root: dict[str, Any]) -> None:
    """A rank without a record of its file."""
    del root["metadata"]["model"]["rank_to_layout_info"][3]


def other_storage(root: dict[str, Any]) -> None:
    """A way to store that is not known."""
    root["metadata"]["model"]["rank_to_layout_info"][0] = {"file_path": "a", "serialization_format": {"type": "Zstd"}}


def version_9(root: dict[str, Any]) -> None:
    """A version that is not known."""
    root["version"] = "9.0"


def no_ranks(root: dict[str, Any]) -> None:
    """A world without ranks."""
    root["world_size"] = 0


def no_path(root: dict[str, Any]) -> None:
    """A key that is no list."""
    paths = root["metadata"]["model"]["nested_path_to_metadata"]
    paths["0.weight"] = paths.pop('["0.weight"]')


@pytest.mark.parametrize(
    ("edit", "kind", "message"),
    [
        (other_dtype, FormatError, "the stored tensor is float32, metadata.pkl says float16"),
        (other_rows, FormatError, r"rank 0 should hold \[4, 4\] of \[32, 4\], the stored tensor is \[2, 4\]"),
        (partial, Unsupported, "a placement 'Partial', which is not known here"),
        (unknown_kind, Unsupported, "a placement of the kind 'next_v9'"),
        (small_mesh, FormatError, r"rank 0, 2 placements and 8 ranks do not fit a mesh of \[2, 2\]"),
        (few_ranks, FormatError, r"rank 2 holds it, metadata.pkl lists ranks \[0, 1\]"),
        (no_shape, FormatError, "its placement in metadata.pkl lacks or garbles 'global_shape'"),
        (wrong_dim, FormatError, "a tensor of 2 dimensions has no dimension 7 to shard"),
        (leaves, FormatError, "leaves the checkpoint's folder"),
        (one_file_for_two, FormatError, "two ranks have one file of 'model'"),
        (fewer_layouts, FormatError, "files of 7 ranks are recorded for 'model', expected all of 0 to 7"),
        (other_storage, Unsupported, "'model' is stored by 'Zstd'"),
        (version_9, Unsupported, "metadata of version '9.0', expected one of 1.0, 2.0"),
        (no_ranks, FormatError, "world_size is 0, expected a number of ranks"),
        (no_path, FormatError, "a field is missing or of the wrong type"),
    ],
)
def test_metadata_that_contradicts_the_files(
    edit: Callable[[dict[str, Any]], None], kind: type[CkptError], message: str
) -> None:
    """Each contradiction is one error that says where."""
    error = refusal(edited(files_of(UNEVEN), edit))
    assert type(error) is kind
    assert error.where
    with pytest.raises(kind, match=message):
        raise error


def test_hostile_and_cut_metadata() -> None:
    """Nothing in it is executed, and half of it is an error."""
    files = files_of(UNEVEN)
    error = refusal({**files, METADATA: b"cos\nsystem\n(S'echo'\ntR."})
    assert isinstance(error, UnsafePickle)
    assert isinstance(refusal({**files, METADATA: files[METADATA][:-9]}), FormatError)
    assert isinstance(refusal({**files, METADATA: b"\x80\x04]."}), FormatError)
    assert isinstance(refusal({**files, "model_3.pt": files["model_3.pt"][:700]}), FormatError)


def test_explicit_boxes() -> None:
    """``default_tensor_v1`` lists boxes of the global and of the stored tensor."""

    def boxes(root: dict[str, Any]) -> None:
        paths = root["metadata"]["model"]["nested_path_to_metadata"]
        (group,) = paths['["0.weight"]']
        rows = {0: 0, 1: 5, 2: 2, 3: 6, 4: 4, 5: 7, 7: 8}
        counts = {0: 2, 1: 1, 2: 2}
        paths['["0.weight"]'] = [
            {
                "ranks": (rank,),
                "sharding_metadata": {
                    "type": "default_tensor_v1",
                    "data": {
                        "global_shape": [9, 4],
                        "global_offsets": [[rows[rank], 0]] if rank in rows else [],
                        "local_offsets": [[0, 0]] if rank in rows else [],
                        "local_sizes": [[counts.get(rank, 1), 4]] if rank in rows else [],
                        "dtype": "torch.float32",
                    },
                },
            }
            for rank in group["ranks"]
        ]

    assert read_all(edited(files_of(UNEVEN), boxes)) == case(FAMILY / UNEVEN).truth()

    def outside(root: dict[str, Any]) -> None:
        boxes(root)
        placement_of(root)["data"]["global_offsets"] = [[8, 0]]

    error = refusal(edited(files_of(UNEVEN), outside))
    assert error.message == "the box [8:10, 0:4] of [9, 4], [0:2, 0:4] of the stored tensor, lies outside"
