"""Every document that a command prints says its schema, in one form, and the command's help tells it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from ckpt_tool.cli.app import main
from ckpt_tool.cli.commands import COMMANDS

SCHEMA = re.compile(r"ckpt-tool/[a-z]+/[1-9]\d*")
CALLS = {
    "inspect": ["SRC", "SRC --map w"],
    "ls": [". --latest", "."],
    "verify": ["SRC", "SRC --plan-fetch", "SRC --salvage saved"],
    "diff": ["SRC SRC"],
    "reshard": ["SRC out --dp 2", "SRC out2 --dp 2 --dry-run"],
    "export": ["SRC out.npz", "SRC out2.npz --dry-run"],
    "edit": ["SRC edited.safetensors --rename w=v"],
    "cat": ["SRC w[0]", "SRC w --out w.npy"],
    "plan": ["SRC --dp 2 --plan-json plan.json"],
    "clean": ["."],
    "formats": [""],
}
FILES = {"plan": "plan.json", "export": "out.npz.digests.json"}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_document_says_its_schema(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each form of each command prints a schema of the one form, known to its help; errors do on stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "step-1").mkdir()
    save_file({"w": np.arange(8, dtype=np.float32).reshape(4, 2)}, tmp_path / "step-1/model.safetensors")
    printed = []
    for call in CALLS[command]:
        argv = call.replace("SRC", "step-1/model.safetensors").split()
        assert main([command, *argv, "--json"]) == 0, capsys.readouterr().err
        printed.append(json.loads(capsys.readouterr().out)["schema"])
    if command in FILES:
        text = (tmp_path / FILES[command]).read_text("utf-8")
        printed.append(json.loads(text)["schema"])
    assert [schema for schema in printed if SCHEMA.fullmatch(schema) is None] == []
    main([command, "--help"])
    said = "".join(capsys.readouterr().out.split())
    assert [schema for schema in printed if schema not in said and not schema.startswith("ckpt-tool/digests/")] == []
    assert main([command, "no-such-place", "--no-such-option", "--json"]) == 2
    assert json.loads(capsys.readouterr().err)["schema"] == "ckpt-tool/error/1"
