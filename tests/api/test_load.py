"""Loading in one process, without torch.distributed: values, optimizers, names, casts and strange memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckpt_tool
from ckpt_tool.errors import LayoutError, UsageError

FIXTURES = Path(__file__).parents[2] / "fixtures/torch"
DCP = FIXTURES / "dcp_fsdp2_4r_fp32"
HF = FIXTURES / "hf_sharded"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of two tensors."""
    tensors = {"w": torch.arange(24.0).reshape(4, 6), "b": torch.arange(5, dtype=torch.bfloat16)}
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


def test_values_are_set() -> None:
    """Values that are no tensors come from the checkpoint's objects, at any depth; others stay and are listed."""
    truth = json.loads((DCP / "truth.json").read_text(encoding="utf-8"))
    state = {
        "optim": {"param_groups": [{"lr": None, "betas": None, "mine": 1}]},
        "cfg": {"name": "", "lst": []},
    }
    report = ckpt_tool.load(state, DCP / "ckpt")
    assert state == {
        "optim": {"param_groups": [{"lr": truth["optim.param_groups.0.lr"], "betas": (0.9, 0.999), "mine": 1}]},
        "cfg": {"name": truth["cfg.name"], "lst": truth["cfg.lst"]},
    }
    assert (report.n_values, report.missing) == (4, ("optim.param_groups.0.mine",))


def test_a_module_and_its_optimizer(tmp_path: Path) -> None:
    """A module is filled in place, and an optimizer gets back its state with its hyperparameters."""
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    optimizer, fresh = (torch.optim.AdamW(each.parameters(), lr=lr) for each, lr in ((model, 0.5), (other, 0.1)))
    for each, optim in ((model, optimizer), (other, fresh)):
        each(torch.ones(1, 3)).sum().backward()
        optim.step()
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "state.pt")
    weight = other.weight
    ckpt_tool.load({"model": other, "optim": fresh}, tmp_path / "state.pt")
    assert other.weight is weight
    assert weight.equal(model.weight)
    assert fresh.param_groups[0]["lr"] == 0.5
    assert fresh.state[weight]["exp_avg"].equal(optimizer.state[model.weight]["exp_avg"])


def test_memory_that_is_not_contiguous(saved: Path) -> None:
    """Transposed and stepped views are filled in place, what lies between is not touched."""
    base = torch.full((6, 8), -1.0)
    bias = torch.zeros(10, dtype=torch.bfloat16)
    ckpt_tool.load({"w": base[:, ::2].t(), "b": bias[::2]}, saved)
    assert base[:, ::2].t().equal(torch.arange(24.0).reshape(4, 6))
    assert base[:, 1::2].eq(-1).all()
    assert bias.tolist() == [0, 0, 1, 0, 2, 0, 3, 0, 4, 0]


def test_casts_only_if_asked(saved: Path) -> None:
    """Another element type is an error that says so, and a conversion with cast=True."""
    state = {"w": torch.zeros(4, 6, dtype=torch.float16), "b": torch.zeros(5)}
    with pytest.raises(LayoutError, match=r"2 dtype\n  dtype: w: expected float16, got float32") as caught:
        ckpt_tool.load(state, saved)
    assert caught.value.hint == "pass cast=True to convert element types"
    assert not state["w"].any()
    ckpt_tool.load(state, saved, cast=True)
    assert state["w"].equal(torch.arange(24.0).reshape(4, 6).half())
    assert state["b"].equal(torch.arange(5.0))


def test_names(saved: Path) -> None:
    """Names are those given, or what is left without outer keys and wrappers' prefixes."""
    wrapped = {"model": {"module.w": torch.zeros(4, 6), "_orig_mod.b": torch.zeros(5, dtype=torch.bfloat16)}}
    report = ckpt_tool.load(wrapped, saved)
    assert report.renamed == (("model.module.w", "w"), ("model._orig_mod.b", "b"))
    assert wrapped["model"]["module.w"].equal(torch.arange(24.0).reshape(4, 6))
    mine = {"x": torch.zeros(4, 6), "b": torch.zeros(5, dtype=torch.bfloat16)}
    ckpt_tool.load(mine, saved, names={"x": "w"})
    assert mine["x"].equal(torch.arange(24.0).reshape(4, 6))
    called = {"y.w": torch.zeros(4, 6)}
    report = ckpt_tool.load(called, saved, names=lambda fqn: fqn.removeprefix("y."), strict=False)
    assert called["y.w"].equal(torch.arange(24.0).reshape(4, 6))
    assert report.unexpected == ("b",)


def test_everything_that_does_not_fit_is_in_one_error(saved: Path) -> None:
    """Missing, unexpected and misshapen tensors are listed together; nothing is filled."""
    state = {"w": torch.zeros(6, 4), "x": torch.zeros(1)}
    with pytest.raises(LayoutError, match="1 missing, 1 unexpected, 1 shape") as caught:
        ckpt_tool.load(state, saved)
    for line in ("shape: w: expected [6, 4], got [4, 6]", "missing: x: not in", "unexpected: b: not in the state"):
        assert line in str(caught.value)
    assert not state["w"].any()


def test_small_memory_gives_the_same_bits() -> None:
    """A budget far below the size of a tensor changes nothing but the number of reads."""
    truth = load_file(HF / "truth.safetensors")
    state = {name: torch.zeros_like(tensor) for name, tensor in truth.items()}
    report = ckpt_tool.load(state, HF / "ckpt", memory_budget_bytes=1024)
    assert {name: state[name].tolist() for name in truth} == {name: truth[name].tolist() for name in truth}
    assert report.exchange == "none"
    assert report.why == "there is one rank"
    assert report.read_nbytes == report.filled_nbytes == sum(tensor.nbytes for tensor in truth.values())


def test_unknown_exchange(saved: Path) -> None:
    """A word that is no way of exchanging is refused."""
    with pytest.raises(UsageError, match="one of auto, none, shared-memory, all-to-all, got 'ring'"):
        ckpt_tool.load({"w": torch.zeros(1)}, saved, exchange="ring")  # type: ignore[arg-type]
