"""``ckpt verify --salvage`` as it is typed: what it says, and with which status it ends."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ckpt_tool.cli.app import main

FIXTURES = Path(__file__).parents[2] / "fixtures/torch"


@pytest.mark.parametrize(
    ("source", "gone", "status", "said"),
    [
        ("hf_sharded", "model.safetensors.index.json", 0, "36 kept, nothing is lost"),
        ("hf_sharded", "model-00001-of-00003.safetensors", 1, "26 kept, 10 lost"),
        ("dcp_no_flatten", ".metadata", 1, "kept, none known to be lost, but not all can be known"),
    ],
)
def test_status(
    tmp_path: Path, source: str, gone: str, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """0 when nothing is lost, 1 when something is, or when nothing that is left can tell."""
    shutil.copytree(FIXTURES / source / "ckpt", tmp_path / "c")
    (tmp_path / "c" / gone).unlink()
    assert main(["verify", str(tmp_path / "c"), "--salvage", str(tmp_path / "out")]) == status
    assert said in " ".join(capsys.readouterr().out.split())
    report = json.loads((tmp_path / "out.salvage.json").read_text())
    assert (status == 0) is not (report["lost"] or report["unknown"])
