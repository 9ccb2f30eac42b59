"""Every step of a run gets one status, with the reason; only listings and small files are read."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckpt_tool.api.runs.ls import RunListing, ls
from ckpt_tool.api.runs.names import step_name
from ckpt_tool.errors import NotFound, UsageError
from ckpt_tool.storage.local.store import LocalStore
from tests.api.runs import ACCELERATE, DEEPSPEED, FIXTURES, HF, TITAN, VERL, copied, titan
from tests.formats.zoo import CHECKPOINTS
from tests.reports.made import put
from tests.storage.recording import RecordingStore


def states(found: RunListing) -> dict[str, tuple[str, ...]]:
    """Why each step is not complete."""
    return {step.path: step.problems for step in found.steps}


def latest(found: RunListing) -> str | None:
    """Path of the newest complete step."""
    return None if found.latest is None else found.latest.path


@pytest.mark.parametrize(
    ("name", "step", "is_temporary"),
    [
        ("step-500", 500, False),
        ("iter_0000010", 10, False),
        ("release", None, False),
        ("global_step3", 3, False),
        ("global_step_10", 10, False),
        ("checkpoint-500", 500, False),
        ("checkpoint_5", 5, False),
        ("epoch=3-step=1000.ckpt", 1000, False),
        ("epoch_0_step_10", 10, False),
        ("megatron--val_loss=1.2-step=300-consumed_samples=500.0", 300, False),
        ("epoch_7", 7, False),
        ("last.ckpt", None, False),
        ("checkpoint-best", None, False),
        ("500", 500, False),
        ("500.orbax-checkpoint-tmp-17", 500, True),
        ("tmp-checkpoint-40", 40, True),
        ("step-40.partial", 40, True),
        ("step-40.tmp", 40, True),
    ],
)
def test_names_of_steps(name: str, step: int | None, is_temporary: bool) -> None:
    """Names that trainers give."""
    found = step_name(name)
    assert found is not None
    assert (found.step, found.is_temporary) == (step, is_temporary)


@pytest.mark.parametrize(
    "name",
    ["model-00001-of-00003.safetensors", "mp_rank_00", "rank_0.pt", "layer_03-model_00-model_states.pt", "optimizer_0",
     "pytorch_model_fsdp_0", "__0_0.distcp", "random_states_0.pkl", "weights", "iteration", "ds_moe_ep2_z1"],
)  # fmt: skip
def test_names_of_other_things(name: str) -> None:
    """Numbers of ranks, shards and layers are no steps."""
    assert step_name(name) is None


def test_dcp(tmp_path: Path) -> None:
    """The metadata file, and what it says of the others, decides."""
    run = titan(tmp_path, *(f"checkpoint/step-{n}" for n in (9, 10, 20, 30, 40, 50, 60)))
    steps = run / "checkpoint"
    (steps / "step-20/.metadata").unlink()
    (steps / "step-30/__2_0.distcp").write_bytes(b"")
    (steps / "step-40/__3_0.distcp").unlink()
    cut = steps / "step-50/__1_0.distcp"
    cut.write_bytes(cut.read_bytes()[:-9000])
    (steps / "step-60/.metadata").write_bytes(b"")
    (steps / "step-70").mkdir()
    (steps / "step-80.tmp").mkdir()
    found = ls(run)
    assert [step.step for step in found.steps] == [9, 10, 20, 30, 40, 50, 60, 70, 80]
    why = {path.partition("-")[2]: problems for path, problems in states(found).items()}
    assert (why["9"], why["10"]) == ((), ())
    assert why["20"] == ("no .metadata: its save did not end",)
    assert why["30"][0].startswith("__2_0.distcp is empty, expected at least")
    assert why["40"][0].startswith("__3_0.distcp is missing; it holds")
    assert "missing); cut off are" in why["50"][0]
    assert why["60"] == (".metadata is empty",)
    assert why["70"] == ("an empty folder",)
    assert why["80.tmp"] == ("a temporary name: its save is under way, or was killed", "an empty folder")
    assert latest(found) == "checkpoint/step-10"
    assert {(step.format, step.layout) for step in found.steps if step.is_complete} == {("dcp", "4 ranks")}


def test_deepspeed(tmp_path: Path) -> None:
    """Partitions of all ranks, a tracker that names a tag, and tags of any name."""
    copied(DEEPSPEED, tmp_path / "global_step3", tmp_path / "global_step6", tmp_path / "mine")
    (tmp_path / "global_step6/zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    put(tmp_path, {"latest": b"global_step3"})
    found = ls(tmp_path)
    said = "1 of 3 files zero_pp_rank_#_mp_rank_#_optim_states.pt are missing: (1, 0)"
    assert states(found) == {"global_step3": (), "global_step6": (said,)}
    assert [tracker.says for tracker in found.trackers] == ["names global_step3; newer and not complete: global_step6"]
    put(tmp_path, {"latest": b"mine"})
    assert set(states(ls(tmp_path))) == {"global_step3", "global_step6", "mine"}


@pytest.mark.parametrize("name", ["ds_z2_bf16", "ds_z3_bf16"])
def test_two_forms_of_one_step(name: str, tmp_path: Path) -> None:
    """Of a step and its universal form, which is written later, that is the newest which ``latest`` names."""
    source = FIXTURES / "deepspeed" / name / "ckpt"
    found = ls(source)
    assert [step.path for step in found.steps] == ["global_step3_universal", "global_step3"]
    assert (latest(found), latest(ls(source, latest=True))) == ("global_step3", "global_step3")
    assert all(step.is_complete for step in found.steps)
    assert [tracker.says for tracker in found.trackers] == [None, None]
    shutil.copytree(source, tmp_path / "run")
    (tmp_path / "run/latest").write_text("global_step3_universal")
    assert latest(ls(tmp_path / "run")) == "global_step3_universal"


def test_a_tracker_that_was_not_moved(tmp_path: Path) -> None:
    """Formats without a file that ends a save end it by moving the tracker: what is newer is not complete."""
    copied(DEEPSPEED, tmp_path / "global_step3", tmp_path / "global_step6")
    put(tmp_path, {"latest": b"global_step3"})
    found = ls(tmp_path)
    assert states(found)["global_step6"] == ("newer than global_step3, which latest names: its save did not end",)
    assert latest(found) == "global_step3"


def test_trainer(tmp_path: Path) -> None:
    """Shards of an index, and state that the other steps have."""
    run = tmp_path / "out"
    for n in (500, 1000, 1500, 2000):
        copied(HF, run / f"checkpoint-{n}")
        put(run / f"checkpoint-{n}", {"trainer_state.json": b"{}", "optimizer.pt": b"x", "README.md": b""})
    (run / "checkpoint-2000/optimizer.pt").unlink()
    (run / "checkpoint-1000/README.md").unlink()
    shard = min((run / "checkpoint-1500").glob("*.safetensors"))
    shard.unlink()
    found = ls(run)
    why = states(found)
    assert (why["checkpoint-500"], why["checkpoint-1000"]) == ((), ())
    assert any(f"files that are missing: {shard.name}" in text for text in why["checkpoint-1500"])
    assert why["checkpoint-2000"] == ("lacks optimizer.pt, which 3 other steps have",)
    assert latest(found) == "checkpoint-1000"


def test_lightning(tmp_path: Path) -> None:
    """Single files: a zip that is cut has no directory."""
    whole = (FIXTURES / "deepspeed/hf_bin_untied/ckpt/pytorch_model-00001-of-00002.bin").read_bytes()
    files = {"epoch=0-step=10.ckpt": whole, "epoch=1-step=20.ckpt": whole[:-5000], "epoch=2-step=30.ckpt": b""}
    found = ls(put(tmp_path / "checkpoints", files))
    why = states(found)
    assert why["epoch=0-step=10.ckpt"] == ()
    assert why["epoch=1-step=20.ckpt"] == ("epoch=1-step=20.ckpt is cut: a zip file without its directory",)
    assert why["epoch=2-step=30.ckpt"] == ("1 empty file: epoch=2-step=30.ckpt",)
    assert latest(found) == "epoch=0-step=10.ckpt"


def test_single_safetensors(tmp_path: Path) -> None:
    """A safetensors file ends where its header says."""
    save_file({"w": np.ones((64, 64), "f4")}, tmp_path / "step_1.safetensors")
    whole = (tmp_path / "step_1.safetensors").read_bytes()
    put(tmp_path, {"step_2.safetensors": whole[:-1], "step_3.safetensors": whole[:20]})
    why = states(ls(tmp_path))
    assert why["step_1.safetensors"] == ()
    assert "is cut: 16,4" in why["step_2.safetensors"][0]
    assert why["step_3.safetensors"][0] == "step_3.safetensors is cut within its header"


def test_verl(tmp_path: Path) -> None:
    """A step of several checkpoints, each with a file of every rank, and a number as tracker."""
    for n in (5, 10):
        copied(VERL, tmp_path / f"global_step_{n}/actor", tmp_path / f"global_step_{n}/critic")
    (tmp_path / "global_step_10/critic/model_world_size_4_rank_3.pt").unlink()
    put(tmp_path, {"latest_checkpointed_iteration.txt": b"10"})
    found = ls(tmp_path)
    first, second = found.steps
    assert first.parts == (("actor", "torch-ranks"), ("critic", "torch-ranks"))
    assert (first.layout, first.is_complete, second.is_complete) == ("4 ranks", True, False)
    assert (found.trackers[0].says or "").startswith("names 10, which is not complete: ")


def test_orbax_numbers(tmp_path: Path) -> None:
    """Folders that are numbers count where they are checkpoints; a folder being written has another name."""
    step = CHECKPOINTS / "orbax_manager/ckpt/3"
    copied(step, tmp_path / "1000", tmp_path / "3000", tmp_path / "2000.orbax-checkpoint-tmp-171")
    (tmp_path / "3000/rest/manifest.ocdbt").unlink()
    put(tmp_path, {"logs/7/events": b"x"})
    found = ls(tmp_path)
    assert [(step.path, step.is_complete) for step in found.steps] == [
        ("1000", True),
        ("2000.orbax-checkpoint-tmp-171", False),
        ("3000", False),
    ]
    assert found.steps[0].format == "orbax"
    assert "never put together" in found.steps[2].problems[0]


def test_accelerate(tmp_path: Path) -> None:
    """A bundle of model and optimizer: each part has its own metadata."""
    copied(ACCELERATE, tmp_path / "checkpoints/checkpoint_0", tmp_path / "checkpoints/checkpoint_1")
    (tmp_path / "checkpoints/checkpoint_1/optimizer_0/.metadata").unlink()
    found = ls(tmp_path)
    assert latest(found) == "checkpoints/checkpoint_0"
    assert "no optimizer_0/.metadata: its save did not end" in states(found)["checkpoints/checkpoint_1"]


def test_files_of_downloads(tmp_path: Path) -> None:
    """Unfinished files and marks make a step incomplete."""
    titan(tmp_path, "step-1", "step-2", "step-3")
    put(tmp_path / "step-2", {"x.incomplete": b"1", "CKPT_UNFINISHED": b""})
    put(tmp_path, {"step-3-unfinished": b""})
    why = states(ls(tmp_path))
    assert why["step-1"] == ()
    assert why["step-2"][0].startswith("2 unfinished files: ")
    assert why["step-3"] == ("step-3-unfinished lies beside it",)


def test_only_metadata_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No payload file is touched, and one listing serves all steps."""
    titan(tmp_path, *(f"step-{n}" for n in range(5)))
    stores: list[RecordingStore] = []

    def open_recording(_: object) -> object:
        stores.append(RecordingStore(LocalStore(str(tmp_path))))
        return stores[-1], stores[-1].listing()

    monkeypatch.setattr("ckpt_tool.api.runs.ls.open_store", open_recording)
    assert len(ls(tmp_path).steps) == 5
    assert {call.path.rpartition("/")[2] for call in stores[0].calls} == {".metadata"}
    assert len(stores[0].calls) <= 3 * 5
    assert len(ls(tmp_path, latest=True).steps) == 1
    assert {call.path for call in stores[1].calls} == {"step-4/.metadata"}
    assert len(stores) == 2


def test_verified(tmp_path: Path) -> None:
    """Damaged payload is seen by a verification only, and makes the step incomplete."""
    titan(tmp_path, "step-1", "step-2")
    path = tmp_path / "step-2/__1_0.distcp"
    data = bytearray(path.read_bytes())
    for at in range(len(data) // 3, len(data) // 3 + 4096):
        data[at] ^= 0x10
    path.write_bytes(data)
    assert latest(ls(tmp_path)) == "step-2"
    found = ls(tmp_path, verify="full")
    assert latest(found) == "step-1"
    assert states(found)["step-2"][0].startswith("verify: ")
    assert {step.verified for step in found.steps} == {"full"}
    assert latest(ls(tmp_path, verify="full", latest=True)) == "step-1"


def test_ages_and_sizes(tmp_path: Path) -> None:
    """A step is as old as its newest file, and as large as all of them."""
    titan(tmp_path, "step-1")
    for path in (tmp_path / "step-1").iterdir():
        os.utime(path, (0, 1000))
    os.utime(tmp_path / "step-1/__0_0.distcp", (0, 2000))
    step = ls(tmp_path).steps[0]
    sizes = [path.stat().st_size for path in TITAN.iterdir()]
    assert (step.modified, step.nbytes, step.n_files) == (2000.0, sum(sizes), len(sizes))
    assert ls(tmp_path).to_json()["steps"][0]["modified"] == "1970-01-01T00:33:20+00:00"


def test_no_run(tmp_path: Path) -> None:
    """One checkpoint is told from a run, and nothing from either."""
    found = ls(HF)
    assert [(step.path, step.is_complete) for step in found.steps] == [("", True)]
    assert found.notes == ("it is one checkpoint, no run with steps",)
    with pytest.raises(NotFound, match="no step of a run among 1 file"):
        ls(put(tmp_path, {"notes.md": b"x"}))
    with pytest.raises(NotFound, match="a file, expected the folder of a run"):
        ls(tmp_path / "notes.md")
    with pytest.raises(UsageError, match="no level"):
        ls(HF, verify="deep")


def test_document(tmp_path: Path) -> None:
    """The document has the keys that it is described with."""
    titan(tmp_path, "step-1")
    shutil.rmtree(tmp_path / "step-1")
    titan(tmp_path, "step-2")
    document = ls(tmp_path).to_json()
    assert list(document) == ["schema", "url", "latest", "steps", "trackers", "notes"]
    assert document["latest"] == f"{tmp_path}/step-2"
    assert list(document["steps"][0]) == [
        "path", "url", "step", "complete", "why", "format", "parts", "layout", "nbytes", "files", "modified", "verified"
    ]  # fmt: skip


def test_files_of_ranks_are_no_steps() -> None:
    """Files of ranks that are called ``step_0.pt`` are parts of one checkpoint."""
    found = ls(FIXTURES / "torch_checkpointing/plain_noreshard/ckpt")
    assert [(step.path, step.format) for step in found.steps] == [("", "torch-checkpointing")]


def test_steps_of_several_folders(tmp_path: Path) -> None:
    """Two runs below one folder are listed together, and it is said."""
    titan(tmp_path, "a/step-1", "b/step-2")
    found = ls(tmp_path)
    assert latest(found) == "b/step-2"
    assert found.notes == ("steps of 2 folders are listed together: a, b; give one for its own newest",)


@pytest.mark.parametrize(
    ("index", "why"),
    [
        (b'{"weight_map": {"w": 1}}', "is no index of shards"),
        (b'{"weight_map": {"w": [1]}}', "is no index of shards"),
        (b"[" * 100_000, "is no index of shards"),
        (b'{"weight_map": {"w": "a.safetensors"}}', "names 1 of 1 file that are missing: a.safetensors"),
    ],
)
def test_hostile_index(tmp_path: Path, index: bytes, why: str) -> None:
    """An index that is none is a reason, and no traceback."""
    copied(HF, tmp_path / "checkpoint-1")
    put(tmp_path / "checkpoint-1", {"model.safetensors.index.json": index})
    assert any(why in text for text in ls(tmp_path).steps[0].problems)


def test_hostile_headers(tmp_path: Path) -> None:
    """Headers that lie are a reason, and no traceback."""
    headers = (b"[1]", b'{"w": {"data_offsets": ["x", "y"]}}', b'{"w": {"data_offsets": [0, 1e400]}}', b"[" * 50_000)
    files = {f"step_{n}.safetensors": len(h).to_bytes(8, "little") + h for n, h in enumerate(headers)}
    found = ls(put(tmp_path, {**files, "step_9.safetensors": b"\xff" * 64}))
    assert [step.is_complete for step in found.steps] == [False] * 5


def test_folders_of_any_name(tmp_path: Path) -> None:
    """Where no name tells a step, every folder that is a checkpoint is one, and the last written is the newest."""
    titan(tmp_path, "good", "new")
    for name, seconds in (("good", 9000), ("new", 1000)):
        for path in (tmp_path / name).iterdir():
            os.utime(path, (seconds, seconds))
    found = ls(tmp_path)
    assert [step.path for step in found.steps] == ["new", "good"]
    assert latest(found) == "good"
    assert found.notes == ("no name tells a step: the last written one counts as the newest",)


def test_layout_of_rank_files() -> None:
    """The number of ranks that wrote files."""
    assert [step.layout for step in ls(FIXTURES / "ckpt/rank_files_v1/ckpt").steps] == ["3 ranks"]


def test_links(tmp_path: Path) -> None:
    """``latest`` as a link: it agrees, it lags behind, it leads to nothing; other links are nobody's business."""
    titan(tmp_path, "step-10", "step-20")
    (tmp_path / "latest").symlink_to("step-20")
    (tmp_path / "best").symlink_to("step-10")
    found = ls(tmp_path)
    assert [step.path for step in found.steps] == ["step-10", "step-20"]
    assert [(each.path, each.names, each.says) for each in found.trackers] == [("latest", "step-20", None)]
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to(tmp_path / "step-10", target_is_directory=True)
    (tracker,) = ls(tmp_path).trackers
    assert tracker.says == "names step-10; newer and complete: step-20"
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("step-30")
    (tracker,) = ls(tmp_path).trackers
    assert tracker.says == "is a link to step-30, and there is no such step here"
    newest = ls(tmp_path, latest=True).latest
    assert newest is not None
    assert newest.path == "step-20"


def test_own_files_beside_steps(tmp_path: Path) -> None:
    """A trainer's final model in the run's folder is listed with the steps, and is not the newest of them."""
    copied(HF, tmp_path / "run")
    copied(HF, tmp_path / "run/checkpoint-5", tmp_path / "run/checkpoint-10")
    (tmp_path / "run/training_args.bin").write_bytes(b"x")
    found = ls(tmp_path / "run")
    assert [(step.path, step.step, step.is_complete) for step in found.steps] == [
        ("", None, True), ("checkpoint-5", 5, True), ("checkpoint-10", 10, True),
    ]  # fmt: skip
    assert found.latest is not None
    assert found.latest.path == "checkpoint-10"
    assert found.steps[0].n_files == 5
    assert found.notes == ("its own files are a checkpoint too, listed as .",)
    min((tmp_path / "run").glob("*.safetensors")).unlink()
    assert not ls(tmp_path / "run").steps[0].is_complete
    for path in (tmp_path / "run").glob("*.*"):
        path.unlink()
    (tmp_path / "run/config.json").write_bytes(b"{}")
    assert [step.path for step in ls(tmp_path / "run").steps] == ["checkpoint-5", "checkpoint-10"]
