"""States under the names of the other mode: DDP numbers parameters and keeps its wrapper's name, FSDP does neither."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.errors import UsageError
from tests.formats.conformance import FIXTURES

FAMILY = FIXTURES / "bytecheckpoint"


def written(name: str, style: str, folder: Path) -> dict[str, bytes]:
    """Tensors of a fixture that was written in another style."""
    reshard(FAMILY / name / "ckpt", folder, to="bytecheckpoint", optim_style=style, rank_state="drop", durable=False)
    return content(folder)


def content(folder: Path) -> dict[str, bytes]:
    """Every tensor's bytes."""
    with open_checkpoint(folder) as found:
        return {fqn: view.numpy().tobytes() for fqn, view in found.items()}


def test_ddp_becomes_fsdp_and_back(tmp_path: Path) -> None:
    """Every weight and moment is there under its new name; back it is what it was."""
    before = content(FAMILY / "ddp_2r/ckpt")
    named = written("ddp_2r", "fqn", tmp_path / "named")
    assert named["model.emb.weight"] == before["model.module.emb.weight"]
    assert named["optimizer.state.emb.weight.exp_avg"] == before["optimizer.state.0.exp_avg"]
    assert not any("module." in fqn for fqn in named)
    with open_checkpoint(tmp_path / "named") as found:
        groups = found.objects()["optimizer.param_groups"]
        assert groups[0]["params"][:2] == ["emb.weight", "blocks.0.ln.weight"]
    reshard(tmp_path / "named", tmp_path / "back", to="bytecheckpoint", optim_style="ids", durable=False)
    assert content(tmp_path / "back") == {k: v for k, v in before.items() if not k.startswith("extra_state.torch_rng")}


def test_fsdp_becomes_ddp(tmp_path: Path) -> None:
    """Names get the wrapper, parameters their number."""
    before = content(FAMILY / "hsdp_4r/ckpt")
    found = written("hsdp_4r", "ids", tmp_path / "ddp")
    assert found["model.module.emb.weight"] == before["model.emb.weight"]
    assert found["optimizer.state.0.exp_avg"] == before["optimizer.state.emb.weight.exp_avg"]


def test_numbers_that_nobody_can_tell(tmp_path: Path) -> None:
    """Decomposed, groups number what the state names: the model's order is nowhere."""
    with pytest.raises(UsageError, match="nothing tells which number is whose"):
        written("fsdp_dec_4r", "ids", tmp_path / "no")
