"""A step of one file is looked at, for its name alone says nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ckpt_tool.api.runs.ls import ls
from tests.api.runs import FIXTURES


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 7\n", "is a git-LFS"),
        ("model.safetensors", b"<!DOCTYPE html><html></html>", "is an HTML page"),
        ("model.safetensors", bytes(64), "is only zero bytes at its start"),
        ("model.safetensors", (90).to_bytes(8, "little") + b"{", "is cut within its header"),
        ("pytorch_model.bin", b"PK\x03\x04" + bytes(40), "is cut: a zip file without its directory"),
    ],
)
def test_one_file_in_a_folder_that_is_no_model(name: str, content: bytes, why: str, tmp_path: Path) -> None:
    """A folder whose weights are a pointer, a page or the front of a file is no complete step."""
    shutil.copytree(FIXTURES / "torch/hf_single/ckpt", tmp_path / "checkpoint-1")
    shutil.copytree(FIXTURES / "torch/hf_single/ckpt", tmp_path / "checkpoint-2")
    (tmp_path / "checkpoint-2/model.safetensors").unlink()
    (tmp_path / "checkpoint-2" / name).write_bytes(content)
    found = ls(tmp_path)
    assert found.latest is not None
    assert found.latest.path == "checkpoint-1"
    problems = {step.path: step.problems for step in found.steps}
    assert problems["checkpoint-2"][0].startswith(f"{name} {why}")
