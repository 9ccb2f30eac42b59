"""Reports R16 and R17 of section A: one optimizer, however its state is spelled and whatever it lacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp_of_torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from ckpt_tool.api.inspect import inspect
from tests.formats.dcp.build import Checkpoint
from tests.reports.conftest import Ckpt
from tests.reports.made import as_bytes, dcp, saved
from tests.reports.test_megatron import saved as saved_llama


class Model(torch.nn.Module):  # type: ignore[misc]
    """Two layers, one of them under two names, and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(3, 4)
        self.b = torch.nn.Linear(4, 4, bias=False)
        self.tied = self.b
        self.frozen = torch.nn.Linear(2, 2, bias=False).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Both layers."""
        found: torch.Tensor = self.b(self.a(x))
        return found


@pytest.fixture
def spellings(tmp_path: Path) -> dict[str, Path]:
    """The same training state with the optimizer keyed by number, by name, and flattened; in torch's own files."""
    torch.manual_seed(0)
    model = Model()
    groups = [
        {"params": [model.a.weight], "lr": 0.1},
        {"params": [model.a.bias, model.b.weight], "lr": 0.02, "weight_decay": 0.5},
    ]
    optimizer = torch.optim.AdamW(groups)
    for _ in range(2):
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
    weights, flat = get_model_state_dict(model), StateDictOptions(flatten_optimizer_state_dict=True)
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "numbers.pt")
    for name, options in (("names", None), ("flat", flat)):
        state = {"model": weights, "optim": get_optimizer_state_dict(model, optimizer, options=options)}
        dcp_of_torch.save(state, checkpoint_id=tmp_path / name, no_dist=True)
    return {"ids": tmp_path / "numbers.pt", "names": tmp_path / "names", "flat": tmp_path / "flat"}


def normal_form(url: Path) -> dict[str, Any]:
    """Bytes of each state of each parameter, and what each group says of its parameters; names without ``model.``."""
    (view,) = inspect(url, objects=True).optimizers
    tensors = as_bytes(url)
    state = {
        str(key).removeprefix("model."): {name: tensors[fqn] for name, fqn in states.items()}
        for key, states in view.named().items()
    }
    groups = [
        ([str(key).removeprefix("model.") for key in group.params], group.hyperparameters["lr"],
         group.hyperparameters["weight_decay"])
        for group in view.named_groups()
    ]  # fmt: skip
    return {"state": state, "groups": groups}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_r16_three_spellings_of_one_state(ckpt: Ckpt, spellings: dict[str, Path], tmp_path: Path) -> None:
    """R16: state by number, by name and flattened has one normal form, before and after a reshard, with both groups."""
    expected = normal_form(spellings["names"])
    assert expected["groups"] == [(["a.weight"], 0.1, 0.01), (["a.bias", "b.weight"], 0.02, 0.5)]
    assert sorted(expected["state"]) == ["a.bias", "a.weight", "b.weight"]
    for spelling, url in spellings.items():
        assert inspect(url, objects=True).optimizers[0].spelling == spelling
        assert normal_form(url) == expected
        assert ckpt("verify", url).status == 0
        assert ckpt("reshard", url, tmp_path / "out", "--dp", "2", "--overwrite").status == 0
        assert as_bytes(tmp_path / "out") == as_bytes(url)
        if spelling != "ids":  # numbers get names from the model, whose tied tensor is now two
            assert normal_form(tmp_path / "out") == expected


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("spelling", ["ids", "names", "flat"])
def test_r16_each_spelling_becomes_each_other(
    ckpt: Ckpt, spellings: dict[str, Path], tmp_path: Path, spelling: str
) -> None:
    """R16: state is spelled as asked, groups keep their learning rates, and torch's own optimizer takes it."""
    expected = normal_form(spellings["names"])
    for style, becomes in (("fqn", "names"), ("fqn-flat", "flat"), ("ids", "ids")):
        done = ckpt("reshard", spellings[spelling], tmp_path / style, "--dp", "2", "--optim-style", style)
        assert done.status == 0
        (view,) = inspect(tmp_path / style, objects=True).optimizers
        assert view.spelling == becomes
        if becomes != "ids":  # the model's tied tensor has no number, so numbers are not matched in one way only
            assert normal_form(tmp_path / style) == expected
        assert ckpt("verify", tmp_path / style).status == 0
    for flattened, style in ((False, "fqn"), (True, "fqn-flat")):
        assert_torch_loads(tmp_path / style, spellings["names"], flattened=flattened)


def assert_torch_loads(url: Path, truth: Path, *, flattened: bool) -> None:
    """``dcp.load`` fills the state that torch asks for: moments and groups are those of ``truth``."""
    model = Model()
    optimizer = torch.optim.AdamW([{"params": [model.a.weight]}, {"params": [model.a.bias, model.b.weight]}])
    options = StateDictOptions(flatten_optimizer_state_dict=flattened)
    state = {"optim": get_optimizer_state_dict(model, optimizer, options=options)}
    dcp_of_torch.load(state, checkpoint_id=url, no_dist=True)
    set_optimizer_state_dict(model, optimizer, state["optim"], options=options)
    tensors = as_bytes(truth)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.1, 0.01), (0.02, 0.5)]
    for name, parameter in (("a.weight", model.a.weight), ("a.bias", model.a.bias), ("b.weight", model.b.weight)):
        for slot, value in optimizer.state[parameter].items():
            assert value.numpy().tobytes() == tensors[f"optim.state.{name}.{slot}"][-1]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_r16_numbers_load_into_an_optimizer(ckpt: Ckpt, spellings: dict[str, Path], tmp_path: Path) -> None:
    """R16: from names back to the numbers that ``Optimizer.load_state_dict`` takes, in one torch.save file."""
    target = tmp_path / "out.pt"
    assert ckpt("reshard", spellings["flat"], target, "--to", "torch-save", "--optim-style", "ids").status == 0
    model, truth = Model(), torch.load(spellings["ids"], weights_only=True)["optim"]
    optimizer = torch.optim.AdamW([{"params": [model.a.weight]}, {"params": [model.a.bias, model.b.weight]}])
    optimizer.load_state_dict(torch.load(target, weights_only=True)["optim"])
    loaded = optimizer.state_dict()
    assert [group["lr"] for group in loaded["param_groups"]] == [0.1, 0.02]
    for number, states in truth["state"].items():
        for slot, value in states.items():
            assert torch.equal(loaded["state"][number][slot], value)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_r16_refusals(ckpt: Ckpt, spellings: dict[str, Path], tmp_path: Path) -> None:
    """R16: without names for its numbers an optimizer keeps its spelling, and one that is absent is said to be."""
    refused = ckpt(
        "reshard", spellings["ids"], tmp_path / "out", "--optim-style", "fqn", "--include", "optim.*", "--dp", "2"
    )
    assert refused.status == 2
    assert "3 of 3 parameters are known by their number only" in refused.err
    torch.save({"model": Model().state_dict()}, tmp_path / "model.pt")
    none = ckpt("reshard", tmp_path / "model.pt", tmp_path / "out", "--optim-style", "fqn")
    assert (none.status, "there is no optimizer to spell otherwise" in none.err) == (2, True)
    assert not (tmp_path / "out").exists()


def optimizer_state(made: Checkpoint) -> None:
    """Adam of two groups and an empty one: ``c`` never got a gradient, ``tied`` is in the model but not in a group."""
    paths: dict[str, Any] = {}

    def tensor(value: torch.Tensor, *path: str) -> None:
        made.tensor(".".join(path), value.shape, [(0, (0,) * value.ndim, value)])
        paths[".".join(path)] = path

    def stored(value: object, *path: str | int) -> None:
        fqn = ".".join(map(str, path))
        made.stored(fqn, 0, None, None, saved(value))
        paths[fqn] = path

    for number, name in enumerate("abc"):
        tensor(torch.full((2, 3), float(number)), "model", name)
    tensor(torch.zeros(2, 3), "model", "tied")
    for name in "ab":
        tensor(torch.tensor(1.0), "optim", "state", name, "step")
        tensor(torch.full((2, 3), 0.5), "optim", "state", name, "exp_avg")
        tensor(torch.full((2, 3), 0.25), "optim", "state", name, "exp_avg_sq")
    for group, (rate, names) in enumerate(((0.1, "a"), (0.01, "bc"))):
        stored(rate, "optim", "param_groups", group, "lr")
        for number, name in enumerate(names):
            stored(name, "optim", "param_groups", group, "params", number)
    stored(0.001, "optim", "param_groups", 2, "lr")
    stored([], "optim", "param_groups", 2, "params")
    made.planner_data = paths


@pytest.mark.parametrize("wrapper", ["", "module."])
def test_r16_names_that_the_optimizer_was_given(ckpt: Ckpt, tmp_path: Path, wrapper: str) -> None:
    """R16: two layers of one shape, given to the optimizer in the other order by name: moments go with the names."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW([(f"{wrapper}{name}", parameters[name]) for name in ("1.weight", "0.weight")])
    model(torch.ones(1, 4)).pow(2).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "numbers.pt")
    done = ckpt("reshard", tmp_path / "numbers.pt", tmp_path / "out", "--dp", "2", "--optim-style", "fqn")
    assert "now keyed by name (param_names of the groups give 2 numbers a name)" in done.text
    for name, parameter in parameters.items():
        moment = optimizer.state[parameter]["exp_avg"].numpy().tobytes()
        assert as_bytes(tmp_path / "out")[f"optim.state.{name}.exp_avg"][2] == moment


def test_r16_names_of_another_model(ckpt: Ckpt, tmp_path: Path) -> None:
    """R16: names that the model does not have are no reason to go by order, and without any the order is said."""
    model = torch.nn.Linear(4, 4, bias=False)
    for given, expected in {
        ("other",): "such as 'other', are no tensors of the model",
        (): "order and shape match",
    }.items():
        parameters = [(name, model.weight) for name in given] or [model.weight]
        optimizer = torch.optim.SGD(parameters, momentum=0.9)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "numbers.pt")
        target = tmp_path / f"out{len(given)}"
        done = ckpt("reshard", tmp_path / "numbers.pt", target, "--dp", "2", "--optim-style", "fqn")
        assert (done.status, expected in done.text) == (2 * len(given), True)


def test_r16_groups_keep_their_numbers(ckpt: Ckpt, tmp_path: Path) -> None:
    """R16: of three groups, one of them empty, each keeps its learning rate and its parameters through a reshard."""
    source = dcp(tmp_path / "source", optimizer_state)
    assert ckpt("reshard", source, tmp_path / "out", "--dp", "2").status == 0
    (before,), (after,) = (inspect(at, objects=True).optimizers for at in (source, tmp_path / "out"))
    assert [(group.params, group.hyperparameters["lr"]) for group in after.groups] == [
        (("a",), 0.1),
        (("b", "c"), 0.01),
        ((), 0.001),
    ]
    assert after == before


def test_r16_groups_of_metadata_without_key_paths(ckpt: Ckpt, tmp_path: Path) -> None:
    """R16: older metadata has dotted names only; the members of a list of parameters are no groups of their own."""

    def without_paths(made: Checkpoint) -> None:
        optimizer_state(made)
        made.planner_data = None

    source = dcp(tmp_path / "source", without_paths)
    (view,) = inspect(source, objects=True).optimizers
    assert [group.params for group in view.groups] == [("a",), ("b", "c"), ()]
    assert ckpt("verify", source).status == 0


def test_r17_parameters_without_state(ckpt: Ckpt, tmp_path: Path) -> None:
    """R17: a parameter that never got a gradient has no state; verify says so, and nothing is wrong with it."""
    source = dcp(tmp_path / "source", optimizer_state)
    found = ckpt("verify", source)
    assert found.status == 0
    assert "1 parameter of optim without state, as those that never got a gradient: c" in found.text.replace("'", "")


def test_r17_shown_by_name(ckpt: Ckpt, tmp_path: Path) -> None:
    """R17: a parameter without state is called by its name where its number has one."""
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model.weight.grad = torch.ones(3, 2)
    optimizer.step()
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "m.pt")
    assert "without state: 1 parameter (model.bias)" in ckpt("inspect", tmp_path / "m.pt", "--optimizer").text


def test_r16_on_the_way_to_megatron(ckpt: Ckpt, tmp_path: Path) -> None:
    """R16: a state by number becomes that of Megatron's weights by its order, which is said."""
    weights = {name: torch.from_numpy(array) for name, array in saved_llama(tmp_path / "hf").items()}
    optimizer = torch.optim.AdamW([torch.nn.Parameter(tensor.clone()) for tensor in weights.values()])
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.save({"model": weights, "optim": optimizer.state_dict()}, tmp_path / "run.pt")
    config = tmp_path / "hf/config.json"
    done = ckpt("reshard", tmp_path / "run.pt", tmp_path / "out", "--to", "megatron", "--config", config)
    assert done.status == 0
    assert "optim: order and shape match 12 numbers with 12 model tensors in exactly one way" in done.text


def _trained(make: Callable[[Sequence[torch.nn.Parameter]], torch.optim.Optimizer]) -> dict[str, Any]:
    """A training state of two layers after a step of the optimizer that ``make`` makes."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = make(list(model.parameters()))
    model(torch.ones(5, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optim": optimizer.state_dict()}


@pytest.mark.parametrize(
    ("style", "make"),
    [
        ("fqn", lambda p: torch.optim.SGD(p, lr=0.1)),
        ("fqn-flat", lambda p: torch.optim.SGD(p, lr=0.1)),
        ("fqn-flat", torch.optim.NAdam),
        ("fqn-flat", torch.optim.ASGD),
        ("fqn", lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1))),
    ],
)
def test_r16_unusual_optimizers(ckpt: Ckpt, tmp_path: Path, style: str, make: Any) -> None:
    """R16: no state at all, state that is one number beside moments, a learning rate that is a tensor: nothing is lost.

    The way by name and back by number ends with the state that was saved.
    """
    state = _trained(make)
    torch.save(state, tmp_path / "m.pt")
    words = ["--default", "replicate", "--optim-style"]
    assert ckpt("reshard", tmp_path / "m.pt", tmp_path / "named", *words, style).status == 0
    assert ckpt("reshard", tmp_path / "named", tmp_path / "back.pt", "--to", "torch-save", *words, "ids").status == 0
    back = torch.load(tmp_path / "back.pt", weights_only=True)["optim"]
    assert back["param_groups"] == state["optim"]["param_groups"]
    assert back["state"].keys() == state["optim"]["state"].keys()
    for number, slots in state["optim"]["state"].items():
        assert all(torch.equal(back["state"][number][slot], value) for slot, value in slots.items())


def test_r16_groups_without_state_are_shown(ckpt: Ckpt, tmp_path: Path) -> None:
    """R16: SGD without momentum has groups and no state; with two groups nothing tells which parameter is in which."""
    torch.save(_trained(lambda p: torch.optim.SGD(p, lr=0.1)), tmp_path / "one.pt")
    shown = ckpt("inspect", tmp_path / "one.pt", "--optimizer").text
    assert "optim no parameter with state no state; groups list 4 parameters there are 4 numbers with 4 model" in shown
    assert "group 0 4 parameters; lr: 0.1" in shown
    two = _trained(lambda p: torch.optim.SGD([{"params": p[::2], "lr": 0.1}, {"params": p[1::2]}], lr=0.2))
    torch.save(two, tmp_path / "two.pt")
    refused = ckpt("reshard", tmp_path / "two.pt", tmp_path / "out", "--default", "replicate", "--optim-style", "fqn")
    assert (refused.status, "order alone does not say which group a parameter is in" in refused.err) == (2, True)


def test_r16_a_tensor_for_each_parameter_is_not_made(ckpt: Ckpt, tmp_path: Path) -> None:
    """R16: a learning rate that is a tensor would have to be one for each parameter, which is refused by its name."""
    torch.save(_trained(lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1))), tmp_path / "m.pt")
    refused = ckpt(
        "reshard", tmp_path / "m.pt", tmp_path / "out", "--default", "replicate", "--optim-style", "fqn-flat"
    )
    assert (refused.status, "hyperparameters of optim are tensors or unread (lr)" in refused.err) == (2, True)
