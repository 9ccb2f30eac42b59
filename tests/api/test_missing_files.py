"""A missing file is in the way of what it held, and of nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import ckpt_tool
from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.convert.export import export
from ckpt_tool.errors import CoverageError
from tests.hostile.fuzz import checkpoint_in, contents, placed

ZARR = "megatron/old012_zarr_t2p1d1"
LOST = {
    "torch/hf_sharded": "model-00003-of-00003.safetensors",
    "torch/hf_pytorch_bin": "pytorch_model-00003-of-00003.bin",
    "deepspeed/ds_z1_bf16opt": "global_step3/bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt",
    "bytecheckpoint/ddp_2r": "global_step_2/optimizer/.metadata",
    ZARR: "iter_0000010/decoder.final_layernorm.weight/.zarray",
}


def lacking(name: str, folder: Path) -> tuple[Path, Path]:
    """A checkpoint, and a copy of it without one of its files."""
    whole = checkpoint_in(placed(name, folder / "whole"))
    copy = folder / "copy"
    shutil.copytree(whole, copy)
    lost = copy / LOST[name]
    if name == ZARR:
        shutil.rmtree(lost.parent)
    else:
        lost.unlink()
    return whole, copy


def exported(source: Path, target: Path, **options: Any) -> dict[str, Any]:
    """What an export holds."""
    export(source, target, names="source", durable=False, **options)
    return contents(target)


@pytest.mark.parametrize("name", ["deepspeed/ds_z1_bf16opt", "bytecheckpoint/ddp_2r"])
def test_weights_beside_a_lost_part_of_the_optimizer(name: str, tmp_path: Path) -> None:
    """They are exported as they would be from the whole; whatever takes the optimizer is refused."""
    whole, copy = lacking(name, tmp_path)
    assert exported(copy, tmp_path / "b") == exported(whole, tmp_path / "a")
    with pytest.raises(CoverageError, match=f"tensors of 1 missing file would be lost: {LOST[name]}"):
        export(copy, tmp_path / "c", everything=True)
    with pytest.raises(CoverageError, match="would be lost"):
        ckpt_tool.reshard(copy, tmp_path / "d", to="dcp")
    assert not (tmp_path / "c").exists()
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("name", LOST)
def test_a_diff_of_what_is_in_other_files(name: str, tmp_path: Path) -> None:
    """A comparison is refused where a missing file may hold some of it, and only there."""
    whole, copy = lacking(name, tmp_path)
    with open_checkpoint(copy) as found:
        kept = [fqn for fqn in found if found.manifest.tensor(fqn).section == "model"]
    assert ckpt_tool.diff(whole, copy, include=kept, section="model").is_same
    with pytest.raises(CoverageError, match=LOST[name]):
        ckpt_tool.diff(whole, copy)


def test_masters_are_in_the_optimizer(tmp_path: Path) -> None:
    """An export of them needs every partition."""
    _, copy = lacking("deepspeed/ds_z1_bf16opt", tmp_path)
    with pytest.raises(CoverageError, match="would be lost"):
        export(copy, tmp_path / "c", masters=True)


@pytest.mark.parametrize("name", ["torch/hf_sharded", "torch/hf_pytorch_bin", ZARR])
def test_names_that_an_index_tells(name: str, tmp_path: Path) -> None:
    """What is asked for by name is written where it is in other files; the error names what would be lost."""
    whole, copy = lacking(name, tmp_path)
    with open_checkpoint(whole) as before, open_checkpoint(copy) as after:
        kept, lost = sorted(set(after)), sorted(set(before) - set(after))
    assert kept
    assert lost
    with pytest.raises(CoverageError, match=f"{LOST[name]}; {lost[0]}") as raised:
        export(copy, tmp_path / "c", everything=True, names="source")
    assert "--exclude" in str(raised.value.hint)
    with pytest.raises(CoverageError, match="would be lost"):
        export(copy, tmp_path / "c", include=[kept[0], lost[0]], names="source")
    expected = exported(whole, tmp_path / "a", include=kept)
    assert exported(copy, tmp_path / "b", include=kept) == expected
    assert exported(copy, tmp_path / "d", everything=True, exclude=lost) == expected
    result = export(copy, tmp_path / "e", include=kept, names="source", durable=False)
    assert f"1 missing file held nothing of what was asked for: {LOST[name]}" in result.notes
    with open_checkpoint(tmp_path / "e") as found:
        assert found.manifest.info.get("missing_files") is None
