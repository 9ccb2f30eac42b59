from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import ckpt_tool
from ckpt_tool.api.convert.export import export
from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.api.trust.diff import diff
from ckpt_tool.compare.report import DiffReport
from ckpt_tool.errors import CoverageError, FormatError, NotFound

FIXTURES = Path(__file__).parents[2] / "fixtures"
FSDP = FIXTURES / "torch/dcp_fsdp2_4r_fp32"
TENSOR_KEYS = {
    "fqn", "fqn_b", "status", "dtype_a", "dtype_b", "shape_a", "shape_b", "accepted", "reason", "compared", "differing",
    "nan_payload", "non_finite", "signed_zero", "max_abs", "max_rel", "max_ulp", "first", "bounds",
}  # fmt: skip


def statuses(report: DiffReport) -> dict[str, int]:
    """Counts that are not zero."""
    return {status: n for status, n in report.counts.items() if n}


@pytest.fixture(scope="module")
def resharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled FSDP checkpoint with tensor parallelism, as rank files and as DCP."""
    folder = tmp_path_factory.mktemp("resharded")
    for to in ("rank-files", "dcp"):
        reshard(FSDP / "ckpt", folder / to, tp=2, dp=2, to=to, default="replicate", durable=False)
    return folder


@pytest.mark.parametrize(
    "name",
    ["dcp_fsdp2_4r_fp32", "dcp_fsdp2_tp_2x2", "dcp_zstd", "dcp_safetensors", "hf_sharded", "hf_pytorch_bin", "verl_2d"],
)
def test_real_checkpoints_hold_their_truth(name: str) -> None:
    """A checkpoint of any format is the same as the tensors that its writer saved beside it."""
    report = diff(FIXTURES / "torch" / name / "ckpt", FIXTURES / "torch" / name / "truth.safetensors")
    assert (report.is_same, set(statuses(report))) == (True, {"same"})


@pytest.mark.parametrize("to", ["rank-files", "dcp"])
def test_reshard_changes_nothing(resharded: Path, to: str) -> None:
    """A reshard to another mesh and format is the same, tensor by tensor, optimizer included."""
    report = diff(FSDP / "ckpt", resharded / to)
    assert (report.is_same, statuses(report)) == (True, {"same": 133})
    assert (report.a.n_ignored_tensors + report.b.n_ignored_tensors, report.a.format, report.b.format) == (2, "dcp", to)


def test_export_changes_names_alone(tmp_path: Path) -> None:
    """The weights of an export meet their source without a map of names, and the report says how."""
    export(FSDP / "ckpt", tmp_path / "weights.safetensors", durable=False)
    report = diff(FSDP / "ckpt", tmp_path / "weights.safetensors", section="model")
    assert (report.is_same, set(statuses(report))) == (True, {"same"})
    assert (report.a.n_unselected, report.b.n_unselected) == (96, 0)
    assert "without outer keys and wrapper prefixes" in report.notes[0]
    exact = diff(FSDP / "ckpt", tmp_path / "weights.safetensors", section="model", names="exact")
    assert {"only-a", "only-b"} <= set(statuses(exact))
    mapped = diff(
        FSDP / "ckpt",
        tmp_path / "weights.safetensors",
        section="model",
        names="exact",
        map_names=[(r"^model\.", "")] * 2,
    )
    assert "only-b" not in statuses(mapped)
    assert mapped.is_same


def test_two_formats_of_one_model() -> None:
    """One model as one file and as three is the same; the bytes of both are what was compared."""
    report = diff(FIXTURES / "torch/hf_single/ckpt", FIXTURES / "torch/hf_sharded/ckpt")
    assert (report.is_same, statuses(report), report.objects) == (True, {"same": 36}, ())
    assert report.compared_nbytes == report.a.nbytes + report.b.nbytes


def test_casts_count_as_the_same_when_allowed(tmp_path: Path) -> None:
    """A rounded export is a difference with a reason, and none where casts are allowed."""
    for name in ("float32", "bfloat16"):
        export(FSDP / "ckpt", tmp_path / f"{name}.safetensors", include=["model.model.*"], dtype=name, durable=False)
    paths = tmp_path / "float32.safetensors", tmp_path / "bfloat16.safetensors"
    report = diff(*paths)
    assert not report.is_same
    assert {(each.status, each.reason.kind if each.reason else None) for each in report.tensors} == {("dtype", "cast")}
    allowed = diff(*paths, allow_cast=True, reasons=False)
    assert allowed.is_same
    assert all(each.is_accepted for each in allowed.tensors)


def test_one_changed_bit(tmp_path: Path) -> None:
    """A single flipped bit is found in its tensor, at its index, and nowhere else."""
    source = FIXTURES / "torch/hf_single/ckpt/model.safetensors"
    data = bytearray(source.read_bytes())
    data[-1] ^= 0x10
    (tmp_path / "model.safetensors").write_bytes(data)
    report = diff(source, tmp_path / "model.safetensors")
    assert statuses(report) == {"differs": 1, "same": 35}
    measures = report.tensors[0].measures
    assert measures is not None
    assert measures.n_differing == 1


def test_selection(tmp_path: Path) -> None:
    """Patterns may fit names of either side; one that fits neither is an error."""
    save_file({"a.w": np.ones(3, "f4"), "a.b": np.ones(3, "f4")}, tmp_path / "a.safetensors")
    save_file({"a.w": np.zeros(3, "f4"), "c.x": np.ones(3, "f4")}, tmp_path / "b.safetensors")
    paths = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    assert statuses(diff(*paths, include=["*.b", "c.*"])) == {"only-a": 1, "only-b": 1}
    assert statuses(diff(*paths, exclude=["a.b", "c.x"])) == {"differs": 1}
    with pytest.raises(NotFound, match="no tensor matches 'q'"):
        diff(*paths, include=["q"])


def test_objects_on_request() -> None:
    """Objects and random states are counted, and compared when asked for."""
    report = diff(FSDP / "ckpt", FSDP / "ckpt")
    assert report.objects == ()
    assert [(side.n_ignored_tensors, side.n_ignored_objects) for side in (report.a, report.b)] == [(1, 29), (1, 29)]
    assert report.to_json()["ignored"] == {"tensors": 2, "objects": 58, "unselected": 0}
    full = diff(FSDP / "ckpt", FSDP / "ckpt", everything=True)
    assert (len(full.objects), full.is_same) == (29, True)
    assert full.to_json()["a"]["ignored"] == {"tensors": 0, "objects": 0, "unselected": 0}
    other = diff(FSDP / "ckpt", FIXTURES / "torch/dcp_fsdp2_tp_2x2/ckpt", everything=True)
    assert {each.status for each in other.objects} == {"same", "differs", "only-a"}


def test_missing_files_are_refused(tmp_path: Path) -> None:
    """A checkpoint without one of its files is not called different, it is refused."""
    for path in (FIXTURES / "torch/hf_sharded/ckpt").iterdir():
        if "00002" not in path.name:
            (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises((CoverageError, NotFound)):
        diff(FIXTURES / "torch/hf_sharded/ckpt", tmp_path)


def test_json() -> None:
    """The document has the keys of its schema, is JSON, and lists equal tensors on request alone."""
    report = diff(FIXTURES / "torch/dcp_fsdp1_flat_2r/ckpt", FIXTURES / "torch/dcp_fsdp2_tp_2x2/ckpt")
    document = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert (document["schema"], document["same"]) == ("ckpt-tool/diff/1", False)
    assert {each["status"] for each in document["tensors"]} == {"only-a", "differs"}
    assert all(set(each) == TENSOR_KEYS for each in document["tensors"])
    assert sum(group["count"] for group in document["groups"]) == sum(document["counts"].values())
    everything = report.to_json(with_same=True)
    assert len(everything["tensors"]) == sum(document["counts"].values())
    first = next(each for each in document["tensors"] if each["status"] == "differs")["first"]
    assert set(first) == {"index", "a", "b"}


def test_template(tmp_path: Path) -> None:
    """A saved list of what a model expects: missing, unexpected, other shapes and types, and no byte is read."""
    save_file({"w": np.ones((3, 4), "f4"), "x": np.ones(2, "f4"), "odd": np.ones(2)}, tmp_path / "a.safetensors")
    save_file({"w": np.zeros((3, 5), "f4"), "x": np.ones(2, "f2"), "new": np.ones(2)}, tmp_path / "b.safetensors")
    expected = ckpt_tool.inspect(tmp_path / "b.safetensors").to_json()
    (tmp_path / "template.json").write_text(json.dumps(expected))
    report = diff(tmp_path / "a.safetensors", tmp_path / "template.json")
    assert {each.fqn: each.status for each in report.tensors} == {
        "odd": "only-a", "new": "only-b", "w": "shape", "x": "dtype",
    }  # fmt: skip
    assert (report.is_quick, report.compared_nbytes) == (True, 0)
    assert report.notes == ("B lists tensors without their bytes",)
    for content in ("{}", "no JSON", '{"w": ["x"], "y": 1}'):
        (tmp_path / "other.json").write_text(content)
        with pytest.raises(NotFound):
            diff(tmp_path / "a.safetensors", tmp_path / "other.json")


@pytest.mark.parametrize(
    "written",
    [
        {"__metadata__": {"format": "pt"}, "w": {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 60]},
         "x": {"dtype": "F16", "shape": [2]}, "new": {"dtype": "F64", "shape": [2]}},
        {"tensors": {"w": {"dtype": "torch.float32", "shape": [3, 5]}, "x": {"dtype": "half", "shape": [2]},
                     "new": {"dtype": "float64", "shape": [2]}}},
        [{"fqn": "w", "dtype": "float32", "shape": [3, 5]}, {"name": "x", "dtype": "fp16", "shape": [2]},
         {"fqn": "new", "dtype": "f64", "shape": [2]}],
    ],
)  # fmt: skip
def test_template_by_hand(tmp_path: Path, written: Any) -> None:
    """A list that a person or another program wrote says the same, whatever it calls the types."""
    save_file({"w": np.ones((3, 4), "f4"), "x": np.ones(2, "f4"), "odd": np.ones(2)}, tmp_path / "a.safetensors")
    (tmp_path / "template.json").write_text(json.dumps(written))
    report = diff(tmp_path / "a.safetensors", tmp_path / "template.json")
    assert {each.fqn: each.status for each in report.tensors} == {
        "odd": "only-a", "new": "only-b", "w": "shape", "x": "dtype",
    }  # fmt: skip
    assert (report.is_quick, report.compared_nbytes) == (True, 0)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"w": [3, 4]}, "'w': expected a dtype such as \"bfloat16\", got null"),
        ({"w": {"dtype": "f4", "shape": [3]}}, "'w': 'f4' is not a known dtype"),
        ({"w": {"dtype": "f32", "shape": [-3]}}, "'w': expected a shape such as [4, 8], got [-3]"),
        ({"w": {"dtype": "f32", "shape": [3]}, "x": {"dtype": "f32"}}, "'x': expected a shape such as [4, 8], got nul"),
        ([{"fqn": "w", "dtype": "f32", "shape": [3]}] * 2, "tensor 'w' is listed twice"),
    ],
)
def test_template_that_says_too_little(tmp_path: Path, written: Any, message: str) -> None:
    """What a list lacks is said with its file, the tensor, and the form that is read."""
    save_file({"w": np.ones((3, 4), "f4")}, tmp_path / "a.safetensors")
    path = tmp_path / "template.json"
    path.write_text(json.dumps(written))
    with pytest.raises(FormatError, match=re.escape(f"{path}: {message}")):
        diff(tmp_path / "a.safetensors", path)


def test_saved_and_reloaded(tmp_path: Path) -> None:
    """What a loader changed after a save is told per tensor: count, distance, first index."""
    saved = {"w": np.arange(12, dtype="f4").reshape(3, 4), "buf": np.ones(2, "f4")}
    save_file(saved, tmp_path / "saved.safetensors")
    save_file({**saved, "buf": np.array([1, 3], "f4")}, tmp_path / "reloaded.safetensors")
    report = ckpt_tool.diff(tmp_path / "saved.safetensors", tmp_path / "reloaded.safetensors")
    measures = report.tensors[0].measures
    assert measures is not None
    assert (report.tensors[0].fqn, measures.n_differing, measures.max_abs, measures.first_index) == (
        "buf",
        1,
        2.0,
        (1,),
    )
