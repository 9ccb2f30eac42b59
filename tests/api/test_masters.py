"""Exports of masters: what DeepSpeed's ``zero_to_fp32`` gives, without DeepSpeed, and where its tools fail."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ckpt_tool.api.convert.export import export
from ckpt_tool.errors import NotFound
from tests.formats.conformance import FIXTURES


@pytest.mark.parametrize(
    "name", ["ds_z2_bf16", "ds_z2_rr", "ds_z1_bf16opt", "ds_z3_sub", "ds_autotp2_z3", "ds_moe_ep2_z1", "ds_pp2_dp2_z1"]
)
def test_weights_are_the_masters(name: str, tmp_path: Path) -> None:
    """Under the weights' names, with frozen weights and buffers as they are; tied names have their owner's."""
    folder = FIXTURES / "deepspeed" / name
    target = tmp_path / "out.safetensors"
    result = export(folder / "ckpt", target, masters=True, tied="keep", names="source", durable=False)
    found, truth = load_file(target), load_file(folder / "truth.safetensors")
    masters = {key.removeprefix("fp32/"): value for key, value in truth.items() if key.startswith("fp32/")}
    assert masters
    for key, value in masters.items():
        assert found[f"module.{key}"].dtype == torch.float32
        assert torch.equal(found[f"module.{key}"].reshape(-1), value.reshape(-1)), key
    if "module.pos" in found:
        assert torch.equal(found["module.pos"], truth["param/pos"])
        assert torch.equal(found["module.head.weight"], truth["fp32/emb.weight"])
        assert any("15 weights are the optimizer's fp32 masters; 3 tensors have none" in note for note in result.notes)
    assert not any(".exp_avg" in key for key in found)


def test_a_run_without_masters(tmp_path: Path) -> None:
    """Without masters there is nothing to export under their name."""
    with pytest.raises(NotFound, match="no fp32 masters"):
        export(FIXTURES / "deepspeed/accelerate_fsdp2/ckpt", tmp_path / "out", masters=True, durable=False)
