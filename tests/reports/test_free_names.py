"""Training states whose keys people named freely: what is a weight, what is state, and what is one rank's (R8, R28)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.formats.dcp.build import Checkpoint
from tests.reports.conftest import Ckpt
from tests.reports.made import as_bytes, dcp, saved


@pytest.mark.parametrize(
    "name",
    [
        "data_loader_rank_{}", "train_dataloader.rank_{}", "rng_state_{}", "random_states_{}", "rng_state_rank_{}",
        "train_state.dataloader_rank{}", "rank_{}.rng", "sampler.rank_0000{}", "extra_state.rank{}.rng",
        "dp_rank_{}.dataloader",
    ],
)  # fmt: skip
def test_r8_state_of_ranks_by_any_name(ckpt: Ckpt, tmp_path: Path, name: str) -> None:
    """R8: whatever it is called, where every rank has one; a number that only one has is no rank."""

    def add(made: Checkpoint) -> None:
        made.tensor("w", (4,), [(0, (0,), torch.arange(4.0))])
        made.stored("lora_rank_8", 0, None, None, saved("one"))
        for rank in range(4):
            made.stored(name.format(rank), rank, None, None, saved(f"state of {rank}"))

    source = dcp(tmp_path / "source", add)
    refused = ckpt("reshard", source, tmp_path / "out", "--dp", "2")
    assert refused.status == 2
    assert f"4 entries hold the state of single ranks ({name.format(0)}, " in refused.text
    assert "4 ranks saved them, the target has 2" in refused.text
    done = ckpt("reshard", source, tmp_path / "out", "--dp", "2", "--rank-state", "drop", "--json")
    assert {entry["fqn"] for entry in done.json["dropped"]} == {name.format(rank) for rank in range(4)}
    assert ckpt("reshard", source, tmp_path / "same", "--dp", "4").status == 0


def _trained() -> dict[str, Any]:
    """The state of AdamW after a step, by numbers."""
    module = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state: dict[str, Any] = optimizer.state_dict()
    return state


@pytest.mark.parametrize(
    ("beside", "kept"),
    [
        ({"last_optimizer_state": _trained(), "criterion": {"w": torch.ones(3)}}, {"criterion.w"}),
        ({"optG": _trained(), "g_optimizer": _trained(), "lr_scheduler_g": {"base": torch.tensor(1.0)}}, set()),
        ({"cuda_rng_state": torch.get_rng_state(), "torch_rng_states": [torch.get_rng_state()]}, set()),
        ({"amp_scaler": {"scale": torch.tensor(65536.0)}, "train_sampler": {"order": torch.arange(9)}}, set()),
        ({"best_val_loss": torch.tensor(1.5)}, {"best_val_loss"}),
    ],
    ids=["fairseq", "gan", "random", "scaler", "loss"],
)
def test_state_that_people_name_freely_is_no_weight(
    ckpt: Ckpt, tmp_path: Path, beside: dict[str, Any], kept: set[str]
) -> None:
    """Beside R28: optimizers, random states and scalers under any name stay out; what goes along is said."""
    torch.save({"model": {"w": torch.ones(3, 4)}, **beside}, tmp_path / "run.pt")
    done = ckpt("export", tmp_path / "run.pt", tmp_path / "out")
    assert done.status == 0
    assert set(as_bytes(tmp_path / "out")) == {"w", *kept}
    assert all(f"1 tensor is written too: {name}" in done.text for name in kept)


def test_keys_around_keys_of_the_model(ckpt: Ckpt, tmp_path: Path) -> None:
    """Composer has the model in a state in a file: names are the module's own."""
    torch.save({"state": {"model": {"w": torch.ones(3)}, "optimizers": {"AdamW": _trained()}}}, tmp_path / "run.pt")
    assert ckpt("export", tmp_path / "run.pt", tmp_path / "out").status == 0
    assert set(as_bytes(tmp_path / "out")) == {"w"}


def test_a_tensor_that_is_all_there_is(ckpt: Ckpt, tmp_path: Path) -> None:
    """One tensor and nothing around it has a name in an export too."""
    torch.save(torch.arange(3.0), tmp_path / "tensor.pt")
    assert ckpt("export", tmp_path / "tensor.pt", tmp_path / "out").status == 0
    assert list(as_bytes(tmp_path / "out")) == ["value"]


def test_weights_as_arrays_of_numpy(ckpt: Ckpt, tmp_path: Path) -> None:
    """Arrays are no tensors of torch: alone, they are named in the hint, and beside tensors as what is left out."""
    arrays = {"a": np.ones((2, 3), np.float32), "b": np.zeros(4)}
    torch.save({"model": arrays, "step": 3}, tmp_path / "arrays.pt")
    refused = ckpt("export", tmp_path / "arrays.pt", tmp_path / "out")
    assert (refused.status, "2 arrays of numpy are among them, such as model.a" in refused.err) == (3, True)
    torch.save({"model": {**arrays, "c": torch.zeros(4)}, "step": 3}, tmp_path / "both.pt")
    done = ckpt("export", tmp_path / "both.pt", tmp_path / "out")
    assert "2 left out, an array of numpy, which torch.save keeps as an object: model.a, model.b" in done.text
    assert "1 left out, not a tensor: step" in done.text
