"""ByteCheckpoint: the reader's contract on real files of every mode, and what is said of those that are wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ckpt_tool.errors import FormatError, NotFound, UnsafePickle, Unsupported
from ckpt_tool.formats.base import Source
from ckpt_tool.formats.bytecheckpoint.reader import READER
from ckpt_tool.formats.detect import detect
from ckpt_tool.manifest.finding import Severity
from ckpt_tool.manifest.optimizer import optimizer_views
from ckpt_tool.storage.memory import MemoryStore
from ckpt_tool.storage.open import open_store
from tests.formats.bytecheckpoint.real import FAMILY, MODEL, OPTIMIZER, cases, edited, files_of
from tests.formats.conformance import ReaderTests, source_of


class TestByteCheckpoint(ReaderTests):
    """Decomposed FSDP, HSDP and DDP."""

    reader = READER
    reader_import = "ckpt_tool.formats.bytecheckpoint.reader:READER"
    cases = cases()


def refusal(files: dict[str, bytes]) -> Exception:
    """The error of reading ``files``."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 the tests compare class and text
        READER.read(source_of(MemoryStore(files)))
    return caught.value


def test_detection_prefers_it_to_megatron_and_dcp() -> None:
    """A tracker of the same name, and ``.metadata`` files, are also Megatron's and DCP's: content decides."""
    files = files_of("hsdp_4r")
    assert detect(source_of(MemoryStore(files))) is READER
    step = {path.removeprefix("global_step_2/"): data for path, data in files.items() if "/" in path}
    assert detect(source_of(MemoryStore(step))) is READER


def test_flat_parameters_become_boxes() -> None:
    """A range of a flat parameter is at most ``2n - 1`` boxes of each parameter in it, and padding is in none."""
    manifest = READER.read(source_of(MemoryStore(files_of("fsdp_dec_4r"))))
    rows = manifest.chunks.rows_of(manifest.tensor_id("model.head.weight"))
    assert [str(manifest.chunks.box(row, 2)) for row in rows] == [
        "[0:50, 0:5]",
        "[50:51, 0:4]",
        "[50:51, 4:5]",
        "[51:101, 0:5]",
    ]
    assert manifest.tensor("optimizer.state.head.weight.exp_avg").path == (
        "optimizer", "state", "head.weight", "exp_avg",
    )  # fmt: skip
    assert manifest.tensor("optimizer.state.head.weight.step").path == ("optimizer", "state", "head.weight", "step")
    assert manifest.info["decomposed"] == [
        "_flat_param", "blocks.0._flat_param", "blocks.1._flat_param", "blocks.2._flat_param",
    ]  # fmt: skip


def test_numbers_of_ddp_are_matched_with_parameters() -> None:
    """DDP's optimizer numbers parameters; as numbers they are matched with the model's names by order and shape."""
    manifest = READER.read(source_of(MemoryStore(files_of("ddp_2r"))))
    assert manifest.tensor("optimizer.state.0.exp_avg").path == ("optimizer", "state", 0, "exp_avg")
    (view,) = optimizer_views(manifest)
    assert view.names[0] == "model.module.emb.weight"


def test_extra_state_belongs_to_ranks() -> None:
    """Random states keep a name per rank; other values are objects with their rank."""
    source = source_of(MemoryStore(files_of("ddp_2r")))
    manifest = READER.read(source)
    assert [fqn for fqn in manifest.tensors.fqns if fqn.startswith("extra_state")] == [
        "extra_state.torch_rng_state@rank0",
        "extra_state.torch_rng_state@rank1",
    ]
    blobs = READER.load_blobs(source, manifest, range(len(manifest.blobs)))
    found = {(blob.fqn, blob.rank): blob.value for blob in blobs}
    assert (found["extra_state.sampler.offset", 0], found["extra_state.sampler.offset", 1]) == (1000, 1001)
    assert found["optimizer.param_groups", None][0]["lr"] == 0.01
    assert manifest.info == {"step": 2, "world_size": 2, "folder": "global_step_2", "version": "0.0.2"}


def test_the_folder_of_a_step() -> None:
    """Given by itself it says the step by its name."""
    store, listing = open_store(FAMILY / "ddp_2r/ckpt/global_step_2")
    manifest = READER.read(Source(store, listing))
    assert manifest.info == {"step": 2, "world_size": 2, "version": "0.0.2"}
    assert manifest.files.paths[0] == "model/__0_0.distcp"


def test_a_section_alone() -> None:
    """A section that was copied out of its step is read by itself, also as part of no checkpoint's name."""
    store, listing = open_store(FAMILY / "fsdp_dec_4r/ckpt/global_step_2/model")
    manifest = READER.read(Source(store, listing))
    assert manifest.tensor("model.head.weight").shape == (101, 5)
    assert manifest.files.paths[0] == "__0_0.distcp"
    files = {path.rpartition("/")[2]: data for path, data in files_of("hsdp_4r").items() if "/optimizer/" in path}
    assert detect(source_of(MemoryStore(files))) is READER
    manifest = READER.read(source_of(MemoryStore(files, url="memory://copy/optimizer")))
    assert manifest.notes == ("one section alone, read as optimizer",)
    assert "optimizer.state.head.weight.exp_avg" in manifest.tensors.index


def test_the_tracker_decides_between_steps() -> None:
    """Of two steps the tracker's is read, and the other one named; without a tracker there is no choice to make."""
    files = files_of("ddp_2r")
    both = {**files, **{path.replace("step_2", "step_10"): data for path, data in files.items()}}
    manifest = READER.read(source_of(MemoryStore(both)))
    assert manifest.info["step"] == 2
    assert manifest.notes[0] == (
        "latest_checkpointed_iteration.txt names 2: global_step_2 is read; beside it: global_step_10"
    )
    del both["latest_checkpointed_iteration.txt"]
    assert READER.probe(source_of(MemoryStore(both))).confidence == 0.0
    with pytest.raises(NotFound, match=r"global_step_2 \(bytecheckpoint\), global_step_10 \(bytecheckpoint\)"):
        detect(source_of(MemoryStore(both)))
    del files["latest_checkpointed_iteration.txt"]
    assert (
        "no latest_checkpointed_iteration.txt: the only step is read"
        in READER.read(source_of(MemoryStore(files))).notes
    )


def test_a_step_that_is_not_there() -> None:
    """A tracker that names a step without metadata is an error that names the steps there are."""
    files = {**files_of("ddp_2r"), "latest_checkpointed_iteration.txt": b"7"}
    error = refusal(files)
    assert isinstance(error, NotFound)
    assert error.message == (
        "latest_checkpointed_iteration.txt names 7, but global_step_7 is not there or has no .metadata; there are: "
        "global_step_2"
    )
    assert error.hint is not None
    assert error.hint.endswith('global_step_2"')
    error = refusal({**files, "latest_checkpointed_iteration.txt": b"seven"})
    assert isinstance(error, FormatError)
    assert error.message == "expected the number of a step, got 'seven'"


def test_missing_and_cut_files_are_findings() -> None:
    """Files that metadata names are compared with the listing; those of extra state with the ranks."""
    files = files_of("hsdp_4r")
    del files["global_step_2/extra_state/extra_state_rank_3.pt"]
    cut = "global_step_2/model/__0_0.distcp"
    files[cut] = files[cut][:-1]
    del files["global_step_2/optimizer/__1_0.distcp"]
    files["global_step_2/optimizer/__7_0.distcp"] = b"left"
    source = source_of(MemoryStore(files))
    findings = list(READER.check(source, READER.read(source)))
    assert [(f.kind, f.severity) for f in findings] == [
        ("cut-file", Severity.ERROR),
        ("missing-file", Severity.ERROR),
        ("unknown-file", Severity.WARNING),
        ("missing-file", Severity.ERROR),  # of a rank whose tensors are here
        *[("missing-file", Severity.WARNING)] * 4,
    ]
    lost = [finding.where.path.rpartition("/")[2] for finding in findings[3:] if finding.where is not None]
    assert lost == [f"extra_state_rank_{rank}.pt" for rank in range(3, 8)]


def drop_shell(fields: dict[str, Any]) -> None:
    """One tensor without its shell."""
    index = next(key for key, shell in fields["all_tensor_metadata"].items() if shell is not None)
    del fields["all_tensor_metadata"][index]


def other_length(fields: dict[str, Any]) -> None:
    """One item recorded longer than its storage."""
    info = next(info for index, info in fields["storage_data"].items() if index.state["fqn"] == "pe")
    info.state["length"] += 4


def unsafe_shell(fields: dict[str, Any]) -> None:
    """A shell that asks for a shell."""
    key = next(iter(fields["all_tensor_metadata"]))
    fields["all_tensor_metadata"][key] = b"cos\nsystem\n(S'echo'\ntR."


def foreign_shell(fields: dict[str, Any]) -> None:
    """A shell of something that is no tensor."""
    key = next(iter(fields["all_tensor_metadata"]))
    fields["all_tensor_metadata"][key] = b"\x80\x02}."


def no_shells(fields: dict[str, Any]) -> None:
    """No shells at all."""
    fields["all_tensor_metadata"] = None


def short_names(fields: dict[str, Any]) -> None:
    """A flat parameter with a name too few."""
    fields["user_defined_dict"]["fsdp_flat_param_to_fqns"]["_flat_param"].pop()


def other_shape(fields: dict[str, Any]) -> None:
    """A parameter of another size than its part of the flat one."""
    fields["user_defined_dict"]["fsdp_shapes"]["_flat_param"][0] = (101, 6)


def too_long(fields: dict[str, Any]) -> None:
    """Parts that are longer than the flat parameter."""
    recorded = fields["user_defined_dict"]
    numels = recorded["fsdp_numels_with_padding"]["_flat_param"]
    recorded["fsdp_numels_with_padding"]["_flat_param"] = (*numels[:-1], numels[-1] + 100)


@pytest.mark.parametrize(
    ("edit", "kind", "message"),
    [
        (drop_shell, FormatError, r"the chunk at \[0\] of 'pe' has no tensor metadata"),
        (other_length, FormatError, "an item of 24 bytes is recorded for a storage of 20"),
        (unsafe_shell, UnsafePickle, "asks for os.system"),
        (foreign_shell, Unsupported, "a stored dict, expected a plain tensor"),
        (no_shells, FormatError, "all_tensor_metadata is a NoneType, expected a dict"),
        (short_names, FormatError, r"'_flat_param' records 4 parts, 4 marks of padding, 1 name and 2 shapes"),
        (other_shape, FormatError, r"'emb.weight' in '_flat_param' has shape \[101, 6\] and 505 elements"),
        (too_long, FormatError, "holds 1,016 elements, its parts are 1,116"),
    ],
)
def test_metadata_that_contradicts_itself(
    edit: Callable[[dict[str, Any]], None], kind: type[Exception], message: str
) -> None:
    """Each contradiction is one error that names the section's metadata."""
    error = refusal(edited(files_of("fsdp_dec_4r"), MODEL, edit))
    assert type(error) is kind
    with pytest.raises(kind, match=message):
        raise error
    assert str(getattr(error, "where", "")).startswith("global_step_2/model/.metadata")


def test_cut_metadata() -> None:
    """Half a pickle is an error, wherever it is cut."""
    files = files_of("fsdp_dec_4r")
    error = refusal({**files, OPTIMIZER: files[OPTIMIZER][:-100]})
    assert isinstance(error, FormatError)
    error = refusal({**files, OPTIMIZER: b""})
    assert isinstance(error, FormatError)
    assert error.message == "expected metadata of ByteCheckpoint, got an empty file"


def test_a_section_of_dcp_is_left_to_others() -> None:
    """``model/.metadata`` of torch's own classes is no ByteCheckpoint."""
    files = files_of("ddp_2r")
    other = files[MODEL].replace(b"bytecheckpoint.checkpointer.meta_type", b"torch.distributed.checkpoint.metadata")
    probe = READER.probe(source_of(MemoryStore({**files, MODEL: other})))
    assert probe.confidence == 0.0
