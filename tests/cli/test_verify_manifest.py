"""``ckpt verify --write-manifest`` and ``--manifest`` as they are typed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ckpt_tool.cli.app import main

FIXTURES = Path(__file__).parents[2] / "fixtures"
SINGLE = FIXTURES / "torch/hf_single/ckpt"
SHARDED = FIXTURES / "torch/hf_sharded/ckpt"


@pytest.fixture
def manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Of one file, written by the command."""
    path = str(tmp_path / "m.json")
    assert main(["verify", str(SINGLE), "--write-manifest", path]) == 0
    assert f"wrote {path}  36 tensors, 1 file" in capsys.readouterr().err
    return path


def test_written_and_compared(manifest: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A copy in several files is proven by the manifest of one file, and it is said what was proven."""
    assert main(["verify", str(SHARDED), "--manifest", manifest, "--require-all"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "36 of 36 recorded tensors are here with the recorded content (CRC-32)" in printed
    assert "36.5 KiB of tensors read, 36.5 KiB proven by recorded checksums" in printed


def test_no_checkpoint_is_overwritten(manifest: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--write-manifest`` where ``--manifest`` was meant, or the checkpoint's own name: what is there stays."""
    path = str(shutil.copy(SINGLE / "model.safetensors", tmp_path))
    before = Path(path).read_bytes()
    plan = ["plan", path, "--default", "shard0", "--plan-json", path]
    for words in (["verify", path, "--write-manifest", path], ["inspect", path, "--parquet", path], plan):
        assert main(words) == 2
        assert "is not overwritten" in capsys.readouterr().err
        assert Path(path).read_bytes() == before
    assert main(["verify", path, "--write-manifest", manifest]) == 0  # one of our own is


def test_other_content(manifest: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Another model ends with 1."""
    other = FIXTURES / "torch/dcp_fsdp2_tp_2x2/ckpt"
    assert main(["verify", str(other), "--manifest", manifest, "--json"]) == 1
    kinds = {group["kind"] for group in json.loads(capsys.readouterr().out)["groups"]}
    assert "digest-mismatch" in kinds


def test_a_broken_one_is_not_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What has errors gets no manifest that would bless it."""
    copy = tmp_path / "copy"
    shutil.copytree(SHARDED, copy)
    next(copy.glob("*.safetensors")).unlink()
    assert main(["verify", str(copy), "--write-manifest", str(tmp_path / "m.json")]) == 1
    assert "not written: " in capsys.readouterr().err
    assert not (tmp_path / "m.json").exists()


def test_wide_and_sha256(tmp_path: Path) -> None:
    """On request: 128-bit sums of tensors, SHA-256 of files."""
    path = tmp_path / "m.json"
    assert main(["verify", str(SINGLE), "--write-manifest", str(path), "--wide", "--sha256"]) == 0
    document = json.loads(path.read_text())
    assert all(len(row["wide"]) == 32 for row in document["tensors"])
    assert [sorted(file) for file in document["files"]] == [["nbytes", "path", "sha256"]]
    assert main(["verify", str(SHARDED), "--manifest", str(path)]) == 0
    assert main(["verify", str(SINGLE), "--manifest", str(path)]) == 0


@pytest.mark.parametrize(
    "options",
    [
        ["--quick", "--write-manifest", "x"],
        ["--manifest", "y", "--write-manifest", "x"],
        ["--wide"],
        ["--sha256"],
        ["--require-all"],
        ["--strip-prefix", "a."],
    ],
)
def test_options_that_do_not_go_together(options: list[str]) -> None:
    """Each ends with 2 before anything is read."""
    assert main(["verify", str(SINGLE), *options]) == 2


def test_quick_with_a_manifest(manifest: str) -> None:
    """The quick level reads nothing that could be compared."""
    assert main(["verify", str(SINGLE), "--quick", "--manifest", manifest]) == 2
