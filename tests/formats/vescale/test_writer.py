"""veScale's layout, written; veScale itself loads it in ``tests/consumers/test_vescale.py``."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tool.api.checkpoint import open_checkpoint
from ckpt_tool.api.convert.export import export
from ckpt_tool.api.convert.reshard import reshard
from ckpt_tool.api.trust.verify import verify
from ckpt_tool.errors import Unsupported
from tests.formats.conformance import FIXTURES
from tests.formats.zoo import extracted
from tests.reports.made import as_bytes

REAL = extracted(FIXTURES / "vescale/checkpoints.tar.xz")
TORCHTITAN = FIXTURES / "deepspeed/torchtitan_dp2tp2/ckpt/checkpoint/step-3"


@pytest.mark.parametrize("name", ["dp2_tp2", "dp3"])
def test_what_vescale_saved_for_other_ranks(name: str, tmp_path: Path) -> None:
    """Every weight, state and group; torch's own reader opens each folder's metadata."""
    source = REAL / name / "ckpt"
    reshard(source, tmp_path / "there", to="vescale", dp=4, default="shard0", durable=False)
    assert as_bytes(tmp_path / "there") == as_bytes(source)
    assert verify(tmp_path / "there", level="full").is_ok
    with open_checkpoint(source) as one, open_checkpoint(tmp_path / "there") as other:
        assert other.format == "vescale"
        assert other.objects() == one.objects()
    data = (tmp_path / "there/model/.metadata").read_bytes()
    assert b"torch.distributed._shard.sharded_tensor.metadata" in data  # where torch 2.2 has what is in it
    assert b"StorageMeta" not in data.replace(b"StorageMetadata", b"")
    assert pickle.loads(data).state_dict_metadata["layers.0.fc1.weight"].size == (10, 6)


def test_stages_have_folders(tmp_path: Path) -> None:
    """A training state of torchtitan over two stages: each optimizer holds its own layers, and their groups."""
    options: dict[str, Any] = {"exclude": ["train_state.*"], "rank_state": "drop", "durable": False}
    reshard(TORCHTITAN, tmp_path / "there", to="vescale", pp=2, default="replicate", **options)
    truth = {k: v for k, v in as_bytes(TORCHTITAN).items() if not k.startswith("train_state")}
    assert as_bytes(tmp_path / "there") == truth
    with open_checkpoint(tmp_path / "there") as found:
        groups = [found.objects()[f"optimizer.pp_{stage}.param_group_meta"] for stage in (0, 1)]
    with (
        open_checkpoint(tmp_path / "there/optimizer/pp_0") as one,
        open_checkpoint(tmp_path / "there/optimizer/pp_1") as two,
    ):
        parts = set(one), set(two)
    assert not parts[0] & parts[1]
    assert any("'layers.0." in fqn for fqn in parts[0])
    assert any("'layers.1." in fqn for fqn in parts[1])
    with open_checkpoint(TORCHTITAN) as source:
        rate = source.objects()["optimizer.param_groups.norm.weight.lr"]
    assert {group["lr"] for stage in groups for group in stage} == {rate}


def test_weights_alone(tmp_path: Path) -> None:
    """A folder for the model, and none for an optimizer."""
    export(TORCHTITAN, tmp_path / "there", to="vescale", names="source", durable=False)
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["model"]


def test_what_has_no_place_is_refused(tmp_path: Path) -> None:
    """Tensors of neither model nor optimizer, two optimizers, and an optimizer without hyperparameters."""
    weight = torch.ones(2)
    state = {"state": {"w": {"exp_avg": weight}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]}
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "stranger": ({"model": {"w": weight}, "optimizer": state, "rng": weight}, "1 tensor is of neither: rng"),
        "two": ({"model": {"w": weight}, "optimizer": state, "optim": state}, "veScale has one optimizer"),
        "bare": ({"model": {"w": weight}, "optimizer": {"state": state["state"]}}, "hyperparameters"),
    }
    for name, (saved, message) in cases.items():
        torch.save(saved, tmp_path / f"{name}.pt")
        with pytest.raises(Unsupported, match=message):
            reshard(tmp_path / f"{name}.pt", tmp_path / "out", to="vescale")
