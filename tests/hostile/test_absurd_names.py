"""Names of files count ranks, shards and pieces, and a name may say any number: an answer at once, within memory."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckpt_tool.cli.app import main

FIXTURES = Path(__file__).parents[2] / "fixtures"
HUGE = 999_999_999_999
DOCUMENTED = {0, 1, 2, 3, 4}


def rename(folder: Path, old: str, new: str) -> None:
    """Every file and folder of which the name has ``old`` in it, the innermost first."""
    found = [path for path in sorted(folder.rglob("*"), reverse=True) if old in path.name]
    assert found
    for path in found:
        path.rename(path.with_name(path.name.replace(old, new)))


def answers(target: Path, out: Path) -> dict[str, int]:
    """The status of each command."""
    commands = ("inspect", "verify", "verify --plan-fetch", "ls", f"verify --salvage {out}/s",
                f"edit {out}/e --drop *bias*", f"export {out}/x")  # fmt: skip
    return {words: main([words.split()[0], str(target), *words.split()[1:]]) for words in commands}


@pytest.mark.parametrize("number", [65_535, HUGE], ids=str)
@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("deepspeed/ds_pp2_dp2_z1", "mp_rank_01_model", "mp_rank_{}_model"),
        ("deepspeed/ds_z2_bf16", "zero_pp_rank_1", "zero_pp_rank_{}"),
        ("deepspeed/ds_moe_ep2_z1", "zero_pp_rank_2", "zero_pp_rank_{}"),
        ("torch/dcp_no_collectives", "__1", "__{}"),
        ("torch/verl_2d", "rank_1.pt", "rank_{}.pt"),
        ("torch/hf_sharded", "-00002-of", "-{}-of"),
    ],
)
def test_renamed_files_are_missed(name: str, old: str, new: str, number: int, tmp_path: Path) -> None:
    """A file under another number leaves a gap: each command says so with a documented status, and is not ``whole``."""
    target = Path(shutil.copytree(FIXTURES / name / "ckpt", tmp_path / "checkpoint"))
    rename(target, old, new.format(number))
    found = answers(target, tmp_path)
    assert set(found.values()) <= DOCUMENTED
    assert found["verify"] != 0


def test_grids_of_names_alone(tmp_path: Path) -> None:
    """Two files of a trillion, of formats that tell their grid by names: shards, ranks, pieces of objects."""
    weights = {"w": torch.ones(2)}
    for name in (
        f"model-00001-of-{HUGE}.safetensors", "model/a/model_w_pp-rank-0-of-1_tp-rank-1-of-999999999.safetensors",
        f"model_world_size_{HUGE}_rank_0.pt", f"consolidated.{HUGE}.pth", f"random_states_{HUGE}.pkl",
        f"mp_rank_00_{HUGE}/model_optim_rng.pt", f"iter_0000001/x/shard_0.0_{HUGE}.{HUGE}.pt",
    ):  # fmt: skip
        target = tmp_path / f"of-{len(list(tmp_path.iterdir()))}"
        (target / name).parent.mkdir(parents=True)
        if name.endswith("safetensors"):
            save_file(weights, target / name)
        else:
            torch.save(weights, target / name)
        (target / "checkpoint_metadata.json").write_text("{}")
        assert set(answers(target, tmp_path / "out").values()) <= DOCUMENTED, name
