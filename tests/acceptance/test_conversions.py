"""Every real checkpoint keeps every bit: read, exported, moved to other layouts and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ckpt_tool.api.checkpoint import Checkpoint, open_checkpoint
from ckpt_tool.api.convert.export import export
from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.api.trust.verify import verify
from ckpt_tool.manifest.optimizer import optimizer_views
from tests.acceptance.checkpoints import Case, cases, truth

CASES = list(cases())
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "pp2xtp2": {"pp": 2, "tp": 2},
    "dp3": {"dp": 3},
    "dp4-replicated": {"dp": 4, "dp_mode": "replicate"},
    "tp2xpp2xdp2": {"tp": 2, "pp": 2, "dp": 2},
}
WRITERS = ("dcp", "rank-files", "torch-ranks")


def by_name(case: Case) -> str:
    """Test id."""
    return case.name


def assert_true(checkpoint: Checkpoint, case: Case) -> int:
    """Each tensor of the truth is there with its dtype, shape and bytes; returns their number."""
    expected = truth(case)
    numbered = {
        f"@{state}/{parameter}": fqn
        for optimizer in optimizer_views(checkpoint.manifest)
        for parameter, states in optimizer.named().items()
        for state, fqn in states.items()
    }
    for key, (dtype, shape, data) in expected.items():
        fqn = numbered[key] if key.startswith("@") else key
        view = checkpoint[fqn]
        assert view.dtype.safetensors == dtype, fqn
        assert view.shape == shape, fqn
        assert view.numpy().tobytes() == data, fqn
    return len(expected)


@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_open_reads_the_truth(case: Case) -> None:
    """Every tensor of the truth is found under its name, bit for bit."""
    with open_checkpoint(case.url) as checkpoint:
        assert assert_true(checkpoint, case) > 0


@pytest.mark.parametrize("case", CASES, ids=by_name)
def test_verify_finds_nothing_wrong(case: Case) -> None:
    """A sound checkpoint has no error at the fullest level."""
    report = verify(str(case.url), level="full")
    assert [f for f in report.findings if f.severity.name == "ERROR"] == []


@pytest.mark.parametrize("case", CASES, ids=by_name)
@pytest.mark.parametrize("to", ["safetensors", "torch-save", "dcp"])
def test_export_all_keeps_every_bit(case: Case, to: str, tmp_path: Path) -> None:
    """Everything exported under its own names equals the truth, in each whole format."""
    export(case.url, tmp_path / "out", to=to, everything=True, names="source", durable=False)
    with open_checkpoint(tmp_path / "out") as checkpoint:
        assert_true(checkpoint, case)


@pytest.mark.parametrize("case", CASES, ids=by_name)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_reshard_and_back(case: Case, layout: str, tmp_path: Path) -> None:
    """Moved to another layout the tensors are the truth, and after moving back to one rank they still are."""
    to = WRITERS[list(LAYOUTS).index(layout) % len(WRITERS)]
    options: dict[str, Any] = {"default": "replicate", "rank_state": "drop", "durable": False}
    reshard(case.url, tmp_path / "there", to=to, **options, **LAYOUTS[layout])
    with open_checkpoint(tmp_path / "there") as checkpoint:
        assert_true(checkpoint, case)
    reshard(tmp_path / "there", tmp_path / "back", to="dcp", **options)
    with open_checkpoint(tmp_path / "back") as checkpoint:
        assert_true(checkpoint, case)
