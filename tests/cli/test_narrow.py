"""Narrow terminals: no line is longer than the terminal is wide, but for one name or path that no line could hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_tool.cli.app import main

FIXTURES = Path(__file__).parents[2] / "fixtures"
FSDP, MESH = "torch/dcp_fsdp2_4r_fp32/ckpt", "torch/dcp_fsdp2_tp_2x2/ckpt"
HF, RUN = "torch/hf_sharded/ckpt", "deepspeed/ds_z3_bf16/ckpt"


@pytest.mark.parametrize("width", [40, 60])
@pytest.mark.parametrize(
    "argv",
    [
        ["inspect", FSDP, "--by", "file"],
        ["inspect", FSDP, "--by", "rank"],
        ["inspect", FSDP],
        ["inspect", FSDP, "--flat"],
        ["inspect", FSDP, "--objects"],
        ["inspect", FSDP, "--optimizer"],
        ["inspect", MESH, "--map", "model.model.layers.0.self_attn.o_proj.weight"],
        ["diff", FSDP, MESH],
        ["diff", FSDP, MESH, "--everything", "--quick"],
        ["ls", RUN],
        ["verify", RUN, "--full"],
        ["verify", HF],
        ["formats"],
        ["cat", HF, "model.norm.weight[0:6]"],
        ["plan", HF, "--tp", "4", "--to", "rank-files", "--default", "replicate"],
        ["clean", "."],
    ],
    ids=" ".join,
)
def test_lines_fit(
    argv: list[str], width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tables lose what can be spared, then put names on lines of their own; sentences are wrapped."""
    monkeypatch.chdir(FIXTURES)
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(argv) in {0, 1}
    printed = capsys.readouterr()
    lines = [*printed.out.splitlines(), *printed.err.splitlines()]
    assert lines
    long = [text for text in lines if len(text) > width]
    assert [text for text in long if max(map(len, text.split())) < width - 6] == []
