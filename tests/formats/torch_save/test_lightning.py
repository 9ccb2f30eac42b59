"""Lightning's ``.ckpt``, written: weights of any checkpoint, and all of what Lightning saved itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tool.api.convert.export import export
from ckpt_tool.errors import Unsupported
from tests.formats.conformance import FIXTURES
from tests.reports.made import as_bytes

SOURCE = FIXTURES / "torch/hf_single/ckpt"


def test_weights_of_another_program(tmp_path: Path) -> None:
    """Under ``state_dict``, beside the few values that Lightning looks for."""
    result = export(SOURCE, tmp_path / "m.ckpt", to="lightning", names="source", durable=False)
    assert result.format == "lightning"
    found = torch.load(tmp_path / "m.ckpt", weights_only=True)
    assert {key: value for key, value in found.items() if key != "state_dict"} == {
        "epoch": 0, "global_step": 0, "pytorch-lightning_version": "2.6.6",
    }  # fmt: skip
    truth = as_bytes(SOURCE)
    assert list(found["state_dict"]) == list(truth)
    ours = as_bytes(tmp_path / "m.ckpt")
    assert ours == {f"state_dict.{fqn}": one for fqn, one in truth.items()}


def test_what_lightning_saved_is_written_again(tmp_path: Path) -> None:
    """Loops, callbacks, optimizers by number: the same nested values."""
    weight = torch.arange(6.0).reshape(2, 3)
    moments = {"step": torch.tensor(4.0), "exp_avg": weight * 2}
    state: dict[str, Any] = {
        "epoch": 1, "global_step": 4, "pytorch-lightning_version": "2.4.0", "state_dict": {"net.weight": weight},
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 1}}}}, "callbacks": {},
        "optimizer_states": [{"state": {0: moments}, "param_groups": [{"lr": 0.1, "params": [0]}]}],
        "lr_schedulers": [],
    }  # fmt: skip
    torch.save(state, tmp_path / "one.ckpt")
    export(tmp_path / "one.ckpt", tmp_path / "two.ckpt", to="lightning", everything=True, names="source", durable=False)
    found = torch.load(tmp_path / "two.ckpt", weights_only=True)
    for one, other in (
        (state, found),
        (state["optimizer_states"][0]["state"][0], found["optimizer_states"][0]["state"][0]),
    ):
        assert one.keys() == other.keys()
    assert torch.equal(found["state_dict"]["net.weight"], weight)
    assert torch.equal(found["optimizer_states"][0]["state"][0]["exp_avg"], weight * 2)
    assert found["optimizer_states"][0]["param_groups"] == [{"lr": 0.1, "params": [0]}]
    assert (found["loops"], found["epoch"], found["pytorch-lightning_version"]) == (state["loops"], 1, "2.4.0")


def test_optimizers_of_other_programs_are_refused(tmp_path: Path) -> None:
    """Lightning numbers parameters in an order that no file tells."""
    source = FIXTURES / "torch/dcp_fsdp2_4r_fp32/ckpt"
    with pytest.raises(Unsupported, match="in another form than any other program") as caught:
        export(source, tmp_path / "m.ckpt", to="lightning", everything=True, names="source")
    assert "without --all" in (caught.value.hint or "")
