"""What states have no tensor for, or no tensor of their own: optimizers before their first step, and tied weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ckpt_tool
from ckpt_tool.api.job.saver import Saver
from ckpt_tool.errors import LayoutError
from ckpt_tool.frameworks.optimizers import make_state
from tests.job.test_save_alone import save

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(scope="module")
def saver() -> Iterator[Saver]:
    """One for all tests."""
    made = Saver()
    yield made
    made.close()


class Tied(nn.Module):  # type: ignore[misc]
    """An embedding whose weight is the head's as well."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(7, 5)
        self.inner = nn.Linear(5, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """One number for each token."""
        found: torch.Tensor = self.head(self.inner(self.embed(tokens)))
        return found


KINDS: dict[str, Any] = {
    "adam": lambda p: torch.optim.AdamW(p, lr=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "sgd without state": lambda p: torch.optim.SGD(p, lr=0.1),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


def train(model: nn.Module, optimizers: list[Any], n_steps: int) -> list[float]:
    """Losses."""
    losses = []
    for number in range(n_steps):
        loss = nn.functional.cross_entropy(model(torch.arange(7)), torch.arange(7).roll(number))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_before_its_first_step(saver: Saver, tmp_path: Path, kind: str) -> None:
    """Its state comes as that of one that has stepped does, and training goes on as it would have."""
    model = Tied(0)
    optimizer = KINDS[kind](model.parameters())
    train(model, [optimizer], 2)
    save(saver, {"model": model, "optimizers": [optimizer]}, tmp_path / "s").wait()
    saved, expected = copy.deepcopy(optimizer.state_dict()), train(model, [optimizer], 3)
    model = Tied(1)
    optimizer = KINDS[kind](model.parameters())
    with torch.inference_mode():  # what is made in it must still be trainable
        report = ckpt_tool.load({"model": model, "optimizers": [optimizer]}, tmp_path / "s")
    assert str(optimizer.state_dict()) == str(saved)
    assert (report.missing, report.unexpected) == ((), ())
    assert train(model, [optimizer], 3) == expected


def test_making_a_state_changes_nothing_else() -> None:
    """Parameters keep their bits, gradients and rates, and no scheduler counts a step."""
    weight = nn.Parameter(torch.tensor([1.0, -0.0, 3.0]))
    weight.grad = torch.ones(3)
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = torch.optim.AdamW([weight, frozen], lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    before, gradient = weight.detach().clone(), weight.grad
    assert make_state(optimizer)
    assert weight.detach().view(torch.int32).equal(before.view(torch.int32))
    assert weight.grad is gradient
    assert (optimizer.param_groups[0]["lr"], scheduler.last_epoch, frozen.grad) == (0.1, 0, None)
    assert set(optimizer.state) == {weight}
    assert not make_state(optimizer)


def test_states_that_were_not_there_when_saving(saver: Saver, tmp_path: Path) -> None:
    """A parameter, or a whole optimizer, that had not been stepped has no state again."""
    model = Tied(0)
    model.inner.bias.requires_grad_(False)
    first, second = torch.optim.Adam(model.parameters()), torch.optim.RMSprop(model.parameters())
    train(model, [first], 1)
    save(saver, {"a": first, "b": second}, tmp_path / "s").wait()
    model.inner.bias.requires_grad_(True)
    found = {"a": torch.optim.Adam(model.parameters()), "b": torch.optim.RMSprop(model.parameters())}
    report = ckpt_tool.load(found, tmp_path / "s")
    assert str(found["a"].state_dict()) == str(first.state_dict())
    assert found["b"].state_dict()["state"] == {}
    assert report.missing == ()


def test_a_state_under_other_names(saver: Saver, tmp_path: Path) -> None:
    """An optimizer whose state the checkpoint has by parameters' names is not left as it is without a word."""
    model = Tied(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, [optimizer], 1)
    momenta = {
        name: {"momentum_buffer": optimizer.state[value]["momentum_buffer"]} for name, value in model.named_parameters()
    }
    save(saver, {"optim": {"state": momenta, "param_groups": [{"lr": 0.1}]}}, tmp_path / "s").wait()
    fresh = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(LayoutError, match=r"missing: optim\.state\.0\.momentum_buffer"):
        ckpt_tool.load({"optim": fresh}, tmp_path / "s")
    assert not fresh.state
    ckpt_tool.load({"optim": fresh}, tmp_path / "s", strict=False)
    assert fresh.state_dict()["state"] == {}
    with pytest.raises(
        LayoutError, match=r"unexpected: optim\.state\.embed\.weight\.momentum_buffer: in its place .* empty dict"
    ):
        ckpt_tool.load({"optim": {"state": {}, "param_groups": [{"lr": 0.0}]}}, tmp_path / "s")
    state: dict[str, Any] = {"optim": {"state": {}, "param_groups": [{"lr": 0.0}]}}
    report = ckpt_tool.load(state, tmp_path / "s", strict=False)
    assert "optim.state.embed.weight.momentum_buffer" in report.unexpected
    assert state["optim"]["param_groups"][0]["lr"] == 0.1


def test_tied_weights_that_were_saved_once(tmp_path: Path) -> None:
    """What shares its memory with a tensor that is found is filled; what has memory of its own is missing."""
    model = Tied(0)
    save_file(
        {name: value for name, value in model.state_dict().items() if name != "head.weight"}, tmp_path / "s.safetensors"
    )
    tied = Tied(1)
    for replayed in (False, True):
        with torch.no_grad():
            tied.embed.weight.zero_()
        report = ckpt_tool.load(tied, tmp_path / "s.safetensors")
        assert (report.is_replayed, report.missing, report.renamed) == (
            replayed,
            (),
            (("head.weight", "embed.weight"),),
        )
        assert tied.head.weight.equal(model.embed.weight)
    untied = Tied(1)
    untied.head.weight = nn.Parameter(torch.zeros(7, 5))
    with pytest.raises(LayoutError, match=r"missing: head\.weight"):
        ckpt_tool.load(untied, tmp_path / "s.safetensors")
