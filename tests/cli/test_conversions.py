from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.cli.app import main
from ckpt_tool.cli.output import Output
from ckpt_tool.cli.progress import progress_bar
from ckpt_tool.engine.base import Progress

FIXTURES = Path(__file__).parents[2] / "fixtures"
FSDP = FIXTURES / "torch/dcp_fsdp2_4r_fp32/ckpt"
RESULT_KEYS = {"schema", "target_url", "format", "n_tensors", "n_files", "nbytes", "report", "dropped", "notes"}
PLAN_KEYS = {
    "schema", "source", "source_format", "target", "target_format", "mesh", "fingerprint", "read_nbytes",
    "needed_nbytes", "n_reads", "written_nbytes", "n_writes", "n_target_files", "target_nbytes", "peak_memory_bytes",
    "casts", "dropped", "notes",
}  # fmt: skip


def ckpt(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> str:
    """What ``ckpt`` prints on stdout, having ended well."""
    assert main([str(argument) for argument in argv]) == 0
    return capsys.readouterr().out


def test_help_names_every_format_that_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    """A format that ``ckpt formats`` calls written is offered by the help of a command that writes it."""
    written = {entry["name"] for entry in json.loads(ckpt(capsys, "formats", "--json"))["formats"] if entry["writes"]}
    said = "".join(re.sub(r"-\s+", "-", ckpt(capsys, command, "--help")) for command in ("reshard", "export"))
    assert {name for name in written if not re.search(rf"\b{name}\b", said)} == set()


@pytest.mark.parametrize("command", ["export", "reshard"])
def test_an_unknown_dtype_is_a_usage_error(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A misspelt option ends with 2, unlike a checkpoint with a type that nobody knows."""
    assert main([command, str(FSDP), str(tmp_path / "out"), "--dtype", "int3"]) == 2
    assert capsys.readouterr().err.startswith("error: 'int3' is not a known dtype\n")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A small safetensors file of two layers and a buffer."""
    path = tmp_path / "source.safetensors"
    tensors = {f"layers.{n}.w": np.arange(12, dtype=np.float32).reshape(3, 4) + n / 3 for n in range(2)}
    save_file({**tensors, "count": np.array([3], np.int64)}, path)
    return path


def test_export_says_what_changed(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An export with a cast prints what it wrote, which tensors it cast, and by how much values changed."""
    printed = " ".join(ckpt(capsys, "export", source, tmp_path / "out.safetensors", "--dtype", "bf16").split())
    wrote, cast = printed.split(" cast: ")
    assert wrote.startswith(f"wrote {tmp_path}/out.safetensors safetensors, whole tensors: 3 tensors in 1 file, ")
    assert cast.startswith("2 tensors from float32 to bfloat16: layers.0.w, layers.1.w; 12 values changed, by 0.0")
    assert "at most (in layers.1.w), relatively by 0.00" in cast


def test_export_lists_what_it_drops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Optimizer state and objects that a weights file does not hold are counted, by reason."""
    printed = " ".join(ckpt(capsys, "export", FSDP, tmp_path / "weights").split())
    assert "dropped: 96 left out, optimizer state: " in printed
    assert "dropped: 29 left out, not a tensor: " in printed


def test_export_json(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The document of a run names the target and counts what is in it."""
    document = json.loads(ckpt(capsys, "export", source, tmp_path / "out", "--json"))
    assert set(document) >= RESULT_KEYS
    assert (document["schema"], document["n_tensors"], document["target_url"]) == (
        "ckpt-tool/conversion/1",
        3,
        str(tmp_path / "out"),
    )


def test_export_quiet(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Quiet, only the target is printed."""
    assert main(["export", str(source), str(tmp_path / "out"), "--quiet"]) == 0
    assert capsys.readouterr() == (f"{tmp_path}/out\n", "")


def test_existing_targets_are_refused(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A target that is there ends with 2 and is left as it is; --overwrite replaces it."""
    target = tmp_path / "out"
    assert main(["export", str(source), str(target)]) == 0
    before = {path.name: path.read_bytes() for path in target.iterdir()}
    assert main(["export", str(source), str(target), "--dtype", "fp64"]) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in target.iterdir()} == before
    assert main(["export", str(source), str(target), "--dtype", "fp64", "--overwrite"]) == 0
    assert {path.name: path.read_bytes() for path in target.iterdir()} != before


def test_reshard_holds_the_same_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint of another mesh, written by the command, has every tensor bit for bit."""
    printed = ckpt(capsys, "reshard", FSDP, tmp_path / "out", "--tp", "2", "--dp", "2", "--default", "replicate")
    said = " ".join(printed.split())  # the terminal's width decides where lines end
    assert said.startswith(f"wrote {tmp_path}/out dcp, 4 ranks, mesh dp=2 tp=2: 134 tensors in ")
    with open_checkpoint(FSDP) as expected, open_checkpoint(tmp_path / "out") as actual:
        assert sorted(actual) == sorted(expected)
        assert [fqn for fqn in expected if expected[fqn].numpy().tobytes() != actual[fqn].numpy().tobytes()] == []


def test_dry_run_says_what_is_in_the_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A target that is there is told before the run that would stop at it; an empty folder is none."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("b")
    for name, options, is_told in (("empty", [], False), ("full", [], True), ("full", ["--overwrite"], False)):
        printed = ckpt(capsys, "reshard", FSDP, tmp_path / name, "--dp", "2", "--dry-run", *options)
        assert ("is there already: the run needs --overwrite" in " ".join(printed.split())) is is_told


def test_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A dry run prints bytes, requests and memory, and leaves no target."""
    printed = ckpt(capsys, "reshard", FSDP, tmp_path / "out", "--dp", "2", "--dry-run")
    labels = [line.split()[0] for line in printed.splitlines()[:5]]
    assert labels == ["from", "to", "read", "write", "memory"]
    assert list(tmp_path.iterdir()) == []


def test_plan_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The summary has the documented keys; the saved plan names every byte range that is read."""
    document = json.loads(ckpt(capsys, "plan", FSDP, "--dp", "2", "--json", "--plan-json", tmp_path / "plan.json"))
    assert set(document) >= PLAN_KEYS
    assert document["mesh"]["dp"] == 2
    saved = json.loads((tmp_path / "plan.json").read_text("utf-8"))
    assert saved["fingerprint"] == document["fingerprint"]
    assert sum(length for tile in saved["tiles"] for _, _, length in tile["reads"]) == document["read_nbytes"]


def test_plan_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    """``--plan-json -`` prints the plan alone, and only when nothing else is printed."""
    assert (
        json.loads(ckpt(capsys, "plan", FSDP, "--dp", "2", "--quiet", "--plan-json", "-"))["schema"]
        == "ckpt-tool/tiles/1"
    )
    assert main(["plan", str(FSDP), "--dp", "2", "--plan-json", "-"]) == 2


def test_verify_fine(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A good checkpoint ends with 0 and says so."""
    assert ckpt(capsys, "verify", source, "--quick").splitlines()[-1] == "nothing wrong"


def test_verify_of_what_cannot_be_opened(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint whose only file contradicts its header has no report: it ends with 3, as every command does."""
    source.write_bytes(source.read_bytes()[:-8])
    assert main(["verify", str(source)]) == 3
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "(8 missing)" in printed.err


def test_verify_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing file is an error in the document, with its path, and the status is 1."""
    for path in FSDP.iterdir():
        if path.name != "__3_0.distcp":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    assert main(["verify", str(tmp_path), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["ok"]) == ("ckpt-tool/verify/1", False)
    missing = [found for found in document["findings"] if found["kind"] == "missing-file"]
    assert [(found["severity"], found["file"]) for found in missing] == [("error", "__3_0.distcp")]
    assert main(["verify", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "error missing-file\n" in printed
    assert len(printed.splitlines()) < 40
    assert printed.splitlines()[-3].endswith("errors")
    commands = [f"ckpt verify {tmp_path} {option}" for option in ("--plan-fetch", "--salvage OUT")]
    assert printed.splitlines()[-2:] == [f"next: {command}" for command in commands]
    assert document["next"] == commands


def test_cat_prints_numbers(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A slice is printed as numpy prints it, under the name, type and shape of the tensor."""
    assert ckpt(capsys, "cat", source, "layers.0.w[0:2, 1:3]").splitlines() == [
        "layers.0.w  float32 [3, 4]  shown [2, 2]",
        "[[1. 2.]",
        " [5. 6.]]",
    ]


def test_cat_json(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The document has the values, nested."""
    document = json.loads(ckpt(capsys, "cat", source, "layers.0.w[1]", "--json"))
    assert document == {
        "schema": "ckpt-tool/cat/1", "fqn": "layers.0.w", "dtype": "float32", "shape": [4],
        "values": [4.0, 5.0, 6.0, 7.0],
    }  # fmt: skip


def test_cat_writes_npy(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file holds the slice; a file that is there is refused without --overwrite."""
    target = tmp_path / "w.npy"
    ckpt(capsys, "cat", source, "layers.1.w[:, 0:2]", "--out", target)
    np.testing.assert_array_equal(np.load(target), load_file(source)["layers.1.w"][:, 0:2])
    assert main(["cat", str(source), "count", "--out", str(target)]) == 2
    ckpt(capsys, "cat", source, "count", "--out", target, "--overwrite")
    assert np.load(target).tolist() == [3]


def test_progress_is_for_terminals(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a terminal there is no callback and no output; quiet, never."""
    for mode in ("human", "json", "quiet"):
        with progress_bar(Output(mode), "writing") as moved:
            assert moved is None
    assert capsys.readouterr() == ("", "")


def test_progress_draws_bytes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a terminal the bar shows bytes of bytes."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with progress_bar(Output("human"), "writing") as moved:
        assert moved is not None
        moved(Progress(512, 1024))
    assert "0.5/1.0 KiB" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)


def test_stages_of_zero_are_deepspeeds(capsys: pytest.CaptureFixture[str]) -> None:
    """The option is not passed over where the target has no such thing."""
    assert main(["plan", str(FSDP), "--zero-stage", "2"]) == 2
    assert "dcp has no stages of ZeRO" in capsys.readouterr().err
