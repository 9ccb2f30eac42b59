"""Runs as users described them: which step is good, and why the newest is not."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from ckpt_tool.api.runs.ls import ls
from tests.api.runs import DEEPSPEED, HF, TITAN, copied, titan
from tests.formats.megatron.places import CHECKPOINTS
from tests.reports.conftest import FIXTURES, Ckpt
from tests.reports.made import put, safetensors_bytes, saved


def test_r68_tracker_behind_an_unfinished_step(tmp_path: Path, ckpt: Ckpt) -> None:
    """R68: the tracker says 10, the newest folder is 20 and unfinished: both are told, and 10 is the one to use."""
    titan(tmp_path, "iter_0000010", "iter_0000020")
    (tmp_path / "iter_0000020/.metadata").unlink()
    put(tmp_path, {"latest_checkpointed_iteration.txt": b"10"})
    ran = ckpt("ls", tmp_path)
    assert "latest_checkpointed_iteration.txt names 10; newer and not complete: iter_0000020" in ran.text
    assert ckpt("ls", tmp_path, "--latest").out == f"{tmp_path}/iter_0000010\n"


def test_r68_tracker_ahead(tmp_path: Path, ckpt: Ckpt) -> None:
    """R68: the tracker holds a number that no folder has."""
    titan(tmp_path, "iter_0000010")
    put(tmp_path, {"latest_checkpointed_iteration.txt": b"30\n"})
    assert "names 30, and there is no such step here" in ckpt("ls", tmp_path).text
    assert ckpt("ls", tmp_path, "--latest").out == f"{tmp_path}/iter_0000010\n"


@pytest.mark.parametrize("text", [b"", b"\n", b"global_step99", b"a/b"])
def test_a_tracker_of_deepspeed_that_names_nothing(tmp_path: Path, ckpt: Ckpt, text: bytes) -> None:
    """DeepSpeed's ``latest``, cut or of a step that was removed: steps that are there are named, and one to type."""
    copied(DEEPSPEED, *(tmp_path / f"global_step{n}" for n in (9, 10)))
    put(tmp_path, {"latest": text})
    refused = ckpt("verify", tmp_path)
    assert refused.status == 3
    assert f"{tmp_path}/latest: {'names' if b'99' in text else 'expected'}" in refused.err
    assert f'give the folder of a step: "{tmp_path}/global_step10" (beside it: global_step9)' in refused.text


@pytest.mark.parametrize("text", [b"", b"iter_0000010"])
def test_a_tracker_of_megatron_that_names_nothing(tmp_path: Path, ckpt: Ckpt, text: bytes) -> None:
    """Megatron's tracker with anything but a number: the iterations that are there, and one to type."""
    source = CHECKPOINTS / "legacy_vpp_p2v2/ckpt/iter_0000010"
    copied(source, tmp_path / "iter_0000010", tmp_path / "iter_0000020")
    put(tmp_path, {"latest_checkpointed_iteration.txt": text})
    refused = ckpt("verify", tmp_path)
    assert (refused.status, "expected an iteration's number or 'release'" in refused.err) == (3, True)
    assert f'a folder of iter_0000010, iter_0000020: "{tmp_path}/iter_0000020"' in refused.text


def test_r100_one_status_each(tmp_path: Path, ckpt: Ckpt) -> None:
    """R100: whole, no metadata, empty shard, missing rank file, temporary files, missing optimizer: a reason each."""
    titan(tmp_path, "step-10", "step-20", "step-30", "step-40", "step-50", "step-60", "step-70.tmp")
    (tmp_path / "step-40/.metadata").unlink()
    (tmp_path / "step-50/__0_0.distcp").write_bytes(b"")
    (tmp_path / "step-60/__2_0.distcp").rename(tmp_path / "step-60/__2_0.distcp.incomplete")
    steps = {step["step"]: step for step in ckpt("ls", tmp_path, "--json").json["steps"]}
    assert [n for n, step in steps.items() if step["complete"]] == [10, 20, 30]
    assert [steps[n]["why"][0].partition(",")[0].partition(";")[0] for n in (40, 50, 60, 70)] == [
        "no .metadata: its save did not end",
        "__0_0.distcp is empty",
        "1 unfinished file: __2_0.distcp.incomplete",
        "a temporary name: its save is under way",
    ]
    assert steps[60]["why"][1].startswith("__2_0.distcp is missing")
    assert f"newest complete: {tmp_path}/step-30" in ckpt("ls", tmp_path).text


@pytest.mark.parametrize("name", ["optimizer.pt", "trainer_state.json", "random_states_0.pkl", "dataloader.pt"])
def test_r100_state_that_others_have(tmp_path: Path, ckpt: Ckpt, name: str) -> None:
    """R100: a step with weights alone would restart the optimizer, or replay data, without a word."""
    for n in (1, 2, 3):
        copied(HF, tmp_path / f"checkpoint-{n}")
        put(tmp_path / f"checkpoint-{n}", {name: b"x"} if n < 3 else {})
    assert ckpt("ls", tmp_path, "--latest").out == f"{tmp_path}/checkpoint-2\n"
    assert "which 2 other steps have" in ckpt("ls", tmp_path).text


def test_r100_nothing_complete(tmp_path: Path, ckpt: Ckpt) -> None:
    """R100: a job script that finds no good step gets status 1 and no path."""
    titan(tmp_path, "step-1")
    (tmp_path / "step-1/.metadata").unlink()
    ran = ckpt("ls", tmp_path, "--latest")
    assert (ran.status, ran.out) == (1, "")


def test_r101_sizes_are_what_counts(tmp_path: Path, ckpt: Ckpt) -> None:
    """R101: that a file exists says little: the metadata says how long it must be."""
    titan(tmp_path, "step-1", "step-2")
    path = tmp_path / "step-2/__3_0.distcp"
    path.write_bytes(path.read_bytes()[:-1000])
    assert ckpt("ls", tmp_path, "--latest").out == f"{tmp_path}/step-1\n"


_SHARD = safetensors_bytes({"w": ("F32", [64], bytes(256))})
_INDEX = b'{"weight_map": {"w": "m-1-of-1.safetensors"}}'
_RANK_FILE = saved({"w": np.ones(3)})


@pytest.mark.parametrize(
    ("files", "cut"),
    [
        ({f"model_world_size_2_rank_{rank}.pt": _RANK_FILE for rank in range(2)}, "model_world_size_2_rank_1.pt"),
        ({"model.pt": _RANK_FILE, "ema_weights.pt": _RANK_FILE}, "ema_weights.pt"),
        ({"a.safetensors": _SHARD, "b.safetensors": _SHARD}, "b.safetensors"),
        ({"m-1-of-1.safetensors": _SHARD, "m.safetensors.index.json": _INDEX}, "m-1-of-1.safetensors"),
        ({"model.safetensors": _SHARD, "optim/state.pt": _RANK_FILE}, "optim/state.pt"),
    ],
)
def test_r100_one_cut_file_of_several(tmp_path: Path, ckpt: Ckpt, files: dict[str, bytes], cut: str) -> None:
    """R100: whatever they are called, files of a step that do not end as they should are none to train on from."""
    for n in (1, 2):
        put(tmp_path / f"step-{n}", files)
    assert ckpt("ls", tmp_path, "--latest").out == f"{tmp_path}/step-2\n"
    (tmp_path / "step-2" / cut).write_bytes(files[cut][:-100])
    assert f"{cut} is cut" in ckpt("ls", tmp_path).text
    assert ckpt("ls", tmp_path, "--latest").out == f"{tmp_path}/step-1\n"


_FIXTURES = Path(__file__).parents[2] / "fixtures/deepspeed"
_STAGE3 = ("zero_pp_rank_2_mp_rank_00_model_states.pt", "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt")


@pytest.mark.parametrize(
    ("fixture", "gone", "said"),
    [
        ("ds_z3_bf16", _STAGE3, f"2 files are missing: {', '.join(_STAGE3)}"),
        ("ds_z3_bf16", ("*_model_states.pt",), "no model states, which name the parameters"),
        ("ds_z3_bf16", ("*_optim_states.pt",), "no optimizer partition"),
        ("ds_z2_bf16", ("*_optim_states.pt",), "no optimizer partition"),
        ("ds_z2_bf16", ("mp_rank_00_model_states.pt",), "missing files: mp_rank_00_model_states.pt"),
        ("ds_pp2_dp2_z1", ("mp_rank_01_model_states.pt",), "1 file is missing: mp_rank_01_model_states.pt"),
        ("ds_pp2_dp2_z1", ("layer_01-model_states.pt",), "1 file is missing: layer_01-model_states.pt"),
        ("ds_pp2_dp2_z1", ("layer_03-model_states.pt",), "1 file is missing: layer_03-model_states.pt"),
        ("ds_z2_bf16/universal", ("zero/emb.weight/exp_avg.pt",), "1 file is missing: zero/emb.weight/exp_avg.pt"),
        ("ds_z2_bf16/universal", ("zero/emb.weight/*",), "1 file is missing: zero/emb.weight/fp32.pt"),
        ("ds_z3_bf16/universal", ("zero/emb.weight/*",), "1 file is missing: zero/emb.weight/fp32.pt"),
        ("ds_moe_ep2_z1", ("layer_0_expert_3_*",), "1 file is missing: layer_0_expert_3_mp_rank_00_model_states.pt"),
        ("ds_moe_ep2_z1", ("layer_0_expert_*",), "4 files are missing: layer_0_expert_0_mp_rank_00_model_states.pt"),
    ],
)
def test_r100_files_that_no_gap_in_numbers_tells(
    tmp_path: Path, ckpt: Ckpt, fixture: str, gone: tuple[str, ...], said: str
) -> None:
    """R100: the last ranks, a layer, an expert, all of a kind: what is there looks regular, and is no whole step."""
    name, _, form = fixture.partition("/")
    source = _FIXTURES / name / "ckpt" / ("global_step3_universal" if form else "global_step3")
    copied(source, tmp_path / "global_step3", tmp_path / "global_step6")
    assert ckpt("ls", tmp_path, "--latest").out == f"{tmp_path}/global_step6\n"
    for path in [path for pattern in gone for path in (tmp_path / "global_step6").glob(pattern)]:
        path.unlink()
    listed = ckpt("ls", tmp_path)
    assert said in listed.text, listed.text
    assert ckpt("ls", tmp_path, "--latest").out == f"{tmp_path}/global_step3\n"
    checked = ckpt("verify", tmp_path / "global_step6")
    assert checked.status or "warning optimizer-lost" in checked.out, checked.text
    if "1 file is missing" in said:
        assert f"missing-file {said.rpartition(' ')[2]}" in checked.text, checked.text


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        ("mp_rank_00_001/*", "1 of 2 rank folders is missing, such as tensor-parallel rank 0 of stage 1"),
        ("*/distrib_optim.pt", "no distrib_optim.pt is here"),
    ],
)
def test_r100_ranks_that_a_run_of_megatron_had(tmp_path: Path, ckpt: Ckpt, gone: str, said: str) -> None:
    """R100: the args of the first rank tell of stages behind the last that is there, and of a distributed optimizer."""
    source = CHECKPOINTS / "legacy_vpp_p2v2/ckpt/iter_0000010"
    copied(source, tmp_path / "iter_0000001", tmp_path / "iter_0000002")
    assert ckpt("ls", tmp_path, "--latest").out == f"{tmp_path}/iter_0000002\n"
    for path in (tmp_path / "iter_0000002").glob(gone):
        path.unlink()
    assert said in ckpt("ls", tmp_path).text
    assert ckpt("ls", tmp_path, "--latest").out == f"{tmp_path}/iter_0000001\n"
    checked = ckpt("verify", tmp_path / "iter_0000002")
    assert said in checked.text, checked.text


@pytest.mark.parametrize("gone", ["common.pt", "metadata.json", "output_layer.weight/0.0"])
@pytest.mark.parametrize("fixture", ["old012_zarr_t2p1d1", "old012_fsms_t2p1d2"])
def test_r100_what_megatron_needs_to_load(tmp_path: Path, ckpt: Ckpt, fixture: str, gone: str) -> None:
    """R100: the common state, the file that is written last, a chunk of an array."""
    source = CHECKPOINTS / fixture / "ckpt/iter_0000010"
    if not (source / gone).exists():
        gone = "__1_0.distcp"
    copied(source, tmp_path / "iter_0000010", tmp_path / "iter_0000020")
    assert ckpt("ls", tmp_path, "--latest").out == f"{tmp_path}/iter_0000020\n"
    (tmp_path / "iter_0000020" / gone).unlink()
    assert f"{gone} is missing" in ckpt("ls", tmp_path).text
    assert ckpt("ls", tmp_path, "--latest").out == f"{tmp_path}/iter_0000010\n"


@pytest.mark.parametrize(
    "gone",
    ["output_layer.weight", "optimizer.state.exp_avg.output_layer.weight", "optimizer.state.*.output_layer.weight"],
)
def test_r100_a_folder_of_an_array(tmp_path: Path, ckpt: Ckpt, gone: str) -> None:
    """R100, R91: state tells of its weight, a weight's state of that which is lost, and locks of what they were for."""
    source = CHECKPOINTS / "old012_zarr_t2p1d1/ckpt/iter_0000010"
    copied(source, tmp_path / "iter_0000010", tmp_path / "iter_0000020")
    lost = sorted((tmp_path / "iter_0000020").glob(gone))
    for folder in lost:
        shutil.rmtree(folder)
    assert ckpt("ls", tmp_path, "--latest").out == f"{tmp_path}/iter_0000010\n"
    fetch = ckpt("verify", tmp_path / "iter_0000020", "--plan-fetch")
    assert (fetch.status, fetch.out.splitlines()) == (1, [f"{folder.name}/.zarray" for folder in lost])


def test_r100_one_rank_of_bytecheckpoint_without_its_loader(tmp_path: Path, ckpt: Ckpt) -> None:
    """R100: only a rank's extra state is missing, without which its part of the data would be replayed."""
    shutil.copytree(FIXTURES / "bytecheckpoint/fsdp_dec_4r/ckpt/global_step_2", tmp_path / "global_step_2")
    shutil.copytree(tmp_path / "global_step_2", tmp_path / "global_step_4")
    assert ckpt("ls", tmp_path, "--latest").out == f"{tmp_path}/global_step_4\n"
    (tmp_path / "global_step_4/extra_state/extra_state_rank_2.pt").unlink()
    assert ckpt("ls", tmp_path, "--latest").out == f"{tmp_path}/global_step_2\n"
    assert ckpt("verify", tmp_path / "global_step_4", "--quick").status == 1


@pytest.mark.parametrize("level", ["quick", "full"])
def test_r103_steps_of_several_files(tmp_path: Path, ckpt: Ckpt, level: str) -> None:
    """R103: a model's, an optimizer's and a schedule's file beside each other, each a checkpoint, are one step."""
    files = {f"{name}.pt": saved({"w": torch.ones(300)}) for name in ("model", "optimizer", "scheduler")}
    for step in (1, 2, 3):
        put(tmp_path / f"step_{step}", files)
    assert ckpt("ls", tmp_path, "--verify", level, "--latest").out == f"{tmp_path}/step_3\n"
    found = ckpt("ls", tmp_path, "--json").json["steps"][0]["parts"]
    assert found == [{"folder": name, "format": "torch-save"} for name in sorted(files)]
    raw = files["optimizer.pt"]
    at = raw.index(np.ones(300, "f4").tobytes())
    (tmp_path / "step_3/optimizer.pt").write_bytes(raw[:at] + b"\x01" + raw[at + 1 :])
    (tmp_path / "step_2/optimizer.pt").write_bytes(raw[:900])
    newest = "step_1" if level == "full" else "step_3"
    assert ckpt("ls", tmp_path, "--verify", level, "--latest").out == f"{tmp_path}/{newest}\n"
    assert "optimizer.pt is cut" in ckpt("ls", tmp_path).text


def test_r100_a_file_beside_folders(tmp_path: Path, ckpt: Ckpt) -> None:
    """R100: what lies beside a step's folders is looked at as well."""
    weights = safetensors_bytes({"w": ("F32", [2], bytes(8))})
    for step in (1, 2):
        put(
            tmp_path / f"step_{step}", {"model/model.safetensors": weights, "optimizer.pt": saved({"m": torch.ones(9)})}
        )
    path = tmp_path / "step_2/optimizer.pt"
    path.write_bytes(path.read_bytes()[:-40])
    assert "optimizer.pt is cut" in ckpt("ls", tmp_path).text
    assert ckpt("ls", tmp_path, "--latest").out == f"{tmp_path}/step_1\n"


def test_loose_files_are_no_run(tmp_path: Path, ckpt: Ckpt) -> None:
    """A file of weights beside folders is one checkpoint without these; many files are one each, and none of a run."""
    weights = safetensors_bytes({"w": ("F32", [2], bytes(8))})
    put(
        tmp_path / "one", {"loose.safetensors": weights, "a/model.safetensors": weights, "b/model.safetensors": weights}
    )
    ran = ckpt("ls", tmp_path / "one")
    assert "it is one checkpoint, no run with steps; checkpoints of their own below it: a, b" in ran.text
    assert ckpt("ls", tmp_path / "one", "--json").json["steps"][0]["nbytes"] == len(weights)
    put(tmp_path / "many", {f"exp{n}.pt": saved({"w": torch.ones(2)}) for n in range(3)})
    ran = ckpt("ls", tmp_path / "many")
    assert (ran.status, "no step of a run among 3 files" in ran.err) == (3, True)
    assert ckpt("ls", tmp_path / "many", "--latest").status == 1


def test_r103_the_newest_ones_are_suspect(tmp_path: Path, ckpt: Ckpt) -> None:
    """R103: verified from the newest back, the last good one is found although all files are there."""
    titan(tmp_path, "step-1", "step-2", "step-3")
    for n in (2, 3):
        path = tmp_path / f"step-{n}/__1_0.distcp"
        data = path.read_bytes()
        third = len(data) // 3
        path.write_bytes(data[:third] + bytes(8192) + data[third + 8192 :])
    assert ckpt("ls", tmp_path, "--latest").out == f"{tmp_path}/step-3\n"
    assert ckpt("ls", tmp_path, "--latest", "--verify", "full").out == f"{tmp_path}/step-1\n"
    steps = ckpt("ls", tmp_path, "--verify", "full", "--json").json["steps"]
    assert [step["complete"] for step in steps] == [True, False, False]


class PagedFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """A store that lists two objects at a time, as one that lists a thousand does with more of them."""

    protocol = "paged"
    store: dict[str, Any] = {}  # noqa: RUF012 - as the class that it derives from
    pages = 0

    @classmethod
    def _strip_protocol(cls, path: str) -> Any:
        return super()._strip_protocol(path.replace("paged://", "memory://"))

    def find(self, path: str, maxdepth: Any = None, withdirs: bool = False, **options: Any) -> Any:
        """All objects below a prefix, page by page."""
        found = super().find(path, maxdepth=maxdepth, withdirs=withdirs, **options)
        names = sorted(found)
        result: dict[str, Any] = {}
        token = 0
        while token < len(names):
            result |= {name: found[name] for name in names[token : token + 2]}
            token += 2
            type(self).pages += 1
        return result if options.get("detail") else list(result)


@pytest.fixture
def bucket() -> Iterator[Any]:
    """An empty store of small pages."""
    fsspec.register_implementation("paged", PagedFileSystem, clobber=True)
    PagedFileSystem.store.clear()
    PagedFileSystem.pages = 0
    yield fsspec.filesystem("paged")
    PagedFileSystem.store.clear()


def test_r104_listing_of_many_pages(bucket: Any) -> None:
    """R104: shards beyond the first page are seen, and the whole run is listed once."""
    for n in (1, 2, 3):
        for path in TITAN.iterdir():
            if (n, path.name) != (3, "__2_0.distcp"):
                bucket.pipe_file(f"/run/step-{n}/{path.name}", path.read_bytes())
    found = ls("paged://run")
    assert [step.is_complete for step in found.steps] == [True, True, False]
    assert found.steps[2].problems[0].startswith("__2_0.distcp is missing")
    assert found.latest is not None
    assert found.latest.url == "paged://run/step-2"
    assert PagedFileSystem.pages == 7  # 14 objects
    assert all(step.modified is not None for step in found.steps)


def test_r104_ranks_that_were_not_uploaded(bucket: Any) -> None:
    """R104: without metadata that names them, the numbers of ranks show what is missing."""
    for path in DEEPSPEED.iterdir():
        if path.name != "zero_pp_rank_0_mp_rank_00_optim_states.pt":
            bucket.pipe_file(f"/run/global_step3/{path.name}", path.read_bytes())
    bucket.pipe_file("/run/latest", b"global_step3")
    found = ls("paged://run")
    assert found.steps[0].problems == ("1 of 3 files zero_pp_rank_#_mp_rank_#_optim_states.pt are missing: (0, 0)",)
    assert found.latest is None
