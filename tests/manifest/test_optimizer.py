"""One normal form of optimizer state, from its three spellings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest

from ckpt_tool.dtypes import dtype
from ckpt_tool.manifest.model import Blob, KeyPath, Manifest, TensorMeta
from ckpt_tool.manifest.optimizer import OptimizerView, ParameterGroup, optimizer_views
from ckpt_tool.manifest.optimizer_names import match_parameters
from ckpt_tool.manifest.tables import ChunkTable, FileTable, TensorTable

MODEL = {"embed.weight": (5, 3), "norm.weight": (3,), "norm.running": (7,), "out.weight": (2, 3)}
ORDER = ("embed.weight", "norm.weight", "out.weight")
NAMES = dict(enumerate(ORDER))
FIRST = {"lr": 0.1, "betas": (0.9, 0.99)}
SECOND = {"lr": 0.02, "betas": (0.8, 0.99)}
EMPTY = {"lr": 0.5, "betas": (0.9, 0.9)}


def manifest_of(
    tensors: Iterable[tuple[KeyPath, tuple[int, ...]]],
    blobs: Mapping[KeyPath, Any],
    *,
    is_loaded: bool = True,
    is_flat: bool = False,
) -> Manifest:
    """A manifest with tensors in the model section unless their path says ``optim`` or ``state``."""
    metas = []
    for path, shape in tensors:
        fqn = ".".join(map(str, path))
        section = "optimizer" if {"optim", "state"} & set(fqn.split(".")) else "model"
        metas.append(TensorMeta(fqn, dtype("float32"), shape, section, (fqn,) if is_flat else path))
    return Manifest(
        format="test",
        root="memory://",
        tensors=TensorTable.from_records(metas),
        chunks=ChunkTable.from_columns(tensor=[], offsets=[], sizes=[], file=[], offset=[], length=[]),
        files=FileTable(),
        blobs=tuple(
            Blob(".".join(map(str, path)), "value", None, value, path, is_loaded=is_loaded)
            for path, value in blobs.items()
        ),
    )


def model_tensors() -> list[tuple[KeyPath, tuple[int, ...]]]:
    """Parameters and one buffer."""
    return [(("model", fqn), shape) for fqn, shape in MODEL.items()]


def adam_state(keys: Iterable[str | int]) -> list[tuple[KeyPath, tuple[int, ...]]]:
    """Adam's state of the parameters in ``ORDER``, called by ``keys``."""
    return [
        (("optim", "state", key, name), () if name == "step" else MODEL[fqn])
        for key, fqn in zip(keys, ORDER, strict=False)
        for name in ("step", "exp_avg", "exp_avg_sq")
    ]


def group_blobs(groups: Iterable[tuple[dict[str, Any], list[Any]]]) -> dict[KeyPath, Any]:
    """Blobs as a reader makes them of nested ``param_groups``: one a hyperparameter."""
    return {
        ("optim", "param_groups", number, name): value
        for number, (hyperparameters, params) in enumerate(groups)
        for name, value in {**hyperparameters, "params": params}.items()
    }


def by_ids() -> Manifest:
    """As ``Optimizer.state_dict()`` saves it."""
    return manifest_of(
        model_tensors() + adam_state(range(3)), group_blobs([(FIRST, [0, 1]), (SECOND, [2]), (EMPTY, [])])
    )


def by_names() -> Manifest:
    """As ``get_optimizer_state_dict`` saves it."""
    names = list(ORDER)
    return manifest_of(
        model_tensors() + adam_state(names), group_blobs([(FIRST, names[:2]), (SECOND, names[2:]), (EMPTY, [])])
    )


def by_flat_names() -> Manifest:
    """As ``flatten_optimizer_state_dict=True`` saves it."""
    tensors: list[tuple[KeyPath, tuple[int, ...]]] = [
        (("optim", f"state.{path[2]}.{path[3]}"), shape) for path, shape in adam_state(ORDER)
    ]
    blobs: dict[KeyPath, Any] = {
        ("optim", f"param_groups.{fqn}.{name}"): value
        for fqn, group in zip(ORDER, (FIRST, FIRST, SECOND), strict=True)
        for name, value in group.items()
    }
    return manifest_of(model_tensors() + tensors, blobs)


def only_view(manifest: Manifest) -> OptimizerView:
    """The view of a manifest with one optimizer."""
    (view,) = optimizer_views(manifest)
    return view


@pytest.mark.parametrize(
    ("manifest", "spelling", "prefix"),
    [(by_ids(), "ids", "model."), (by_names(), "names", ""), (by_flat_names(), "flat", "")],
    ids=["ids", "names", "flat"],
)
def test_three_spellings_have_one_normal_form(manifest: Manifest, spelling: str, prefix: str) -> None:
    """Whatever the spelling, each parameter has its three states and its group's own hyperparameters."""
    view = only_view(manifest)
    assert (view.spelling, view.prefix) == (spelling, "optim")
    assert {str(key): sorted(states) for key, states in view.named().items()} == {
        prefix + fqn: ["exp_avg", "exp_avg_sq", "step"] for fqn in ORDER
    }
    for states in view.parameters.values():
        assert all(fqn in manifest.tensors.index for fqn in states.values())
    groups = [(group.params, dict(group.hyperparameters)) for group in view.named_groups() if group.params]
    assert groups == [
        (tuple(prefix + fqn for fqn in ORDER[:2]), FIRST),
        ((prefix + ORDER[2],), SECOND),
    ]
    assert view.without_state == ()


def test_empty_group_keeps_its_hyperparameters() -> None:
    """A group without parameters stays a group, with its own lr."""
    assert only_view(by_ids()).groups[2] == ParameterGroup((), EMPTY)
    assert only_view(by_names()).groups[2] == ParameterGroup((), EMPTY)


def test_numbers_get_names_around_a_buffer() -> None:
    """Numbers match model tensors by order and shape, skipping the buffer; the evidence says so."""
    view = only_view(by_ids())
    assert view.names == {number: "model." + fqn for number, fqn in NAMES.items()}
    assert "in exactly one way" in view.evidence[-1]


def test_numbers_stay_numbers_when_two_readings_fit() -> None:
    """With two model tensors of the same shape and one number, no name is guessed."""
    tensors: list[tuple[KeyPath, tuple[int, ...]]] = [
        (("model", "a"), (2,)),
        (("model", "b"), (2,)),
        (("optim", "state", 0, "exp_avg"), (2,)),
    ]
    view = only_view(manifest_of(tensors, group_blobs([(FIRST, [0])])))
    assert view.names == {}
    assert list(view.named()) == [0]
    assert "do not match 1 number with 2 model tensors" in view.evidence[-1]


def test_parameters_without_state_are_listed() -> None:
    """A parameter that never got a gradient is in a group and has no state; this is no fault of the others."""
    manifest = manifest_of(model_tensors() + adam_state(range(2)), group_blobs([(FIRST, [0, 1, 2])]))
    view = only_view(manifest)
    assert view.without_state == (2,)
    assert list(view.parameters) == [0, 1]
    assert view.names == {number: "model." + NAMES[number] for number in (0, 1)}


def test_state_by_name_beside_groups_by_number() -> None:
    """ByteCheckpoint and nanotron key state by name and groups by number: as many numbers as names lack no state."""
    states = [((*path[:2], f"layer.{path[2]}", *path[3:]), shape) for path, shape in adam_state(range(3))]
    found = [
        only_view(manifest_of(model_tensors() + states, group_blobs([(FIRST, list(range(n)))]))).without_state
        for n in (3, 4)
    ]
    assert found == [(), (0, 1, 2, 3)]


def test_empty_state_dict_of_sgd_is_no_state() -> None:
    """SGD without momentum saves an empty dict for each parameter that was stepped."""
    blobs = group_blobs([(FIRST, [0, 1])]) | {("optim", "state", 1): {}}
    view = only_view(manifest_of([*model_tensors(), (("optim", "state", 0, "momentum_buffer"), (5, 3))], blobs))
    assert view.parameters == {0: {"momentum_buffer": "optim.state.0.momentum_buffer"}}
    assert view.without_state == (1,)


def test_digits_as_text_are_numbers() -> None:
    """DCP turns dict keys into text, so ``"0"`` in a path is parameter 0."""
    manifest = manifest_of(model_tensors() + adam_state(["0", "1", "2"]), group_blobs([(FIRST, [0, 1, 2])]))
    assert list(only_view(manifest).parameters) == [0, 1, 2]


def test_names_that_are_one_dotted_string_are_split() -> None:
    """A format with flat names (safetensors) shows the same view as one that keeps key paths."""
    flat = manifest_of(model_tensors() + adam_state(ORDER), {}, is_flat=True)
    view = only_view(flat)
    assert (view.prefix, list(view.parameters)) == ("optim", list(ORDER))
    assert view.parameters["out.weight"]["exp_avg"] == "optim.state.out.weight.exp_avg"


def test_unloaded_blobs_are_named_unread() -> None:
    """Before blobs are loaded, the view says which hyperparameters exist but not their values."""
    manifest = manifest_of(model_tensors() + adam_state(range(3)), group_blobs([(FIRST, [0, 1, 2])]), is_loaded=False)
    (group,) = only_view(manifest).groups
    assert group == ParameterGroup((), {}, ("lr", "betas", "params"))


def test_whole_param_groups_in_one_blob() -> None:
    """The list of groups was as one object by torch 2.1."""
    blobs: dict[KeyPath, Any] = {("optim", "param_groups"): [{**FIRST, "params": [0, 1]}, {**SECOND, "params": [2]}]}
    view = only_view(manifest_of(model_tensors() + adam_state(range(3)), blobs))
    assert view.groups == (ParameterGroup((0, 1), FIRST), ParameterGroup((2,), SECOND))


def test_params_listed_one_by_one() -> None:
    """A reader may give each member of ``params`` an entry of its own."""
    blobs: dict[KeyPath, Any] = {("optim", "param_groups", 0, "params", n): n for n in range(3)}
    assert only_view(manifest_of(model_tensors() + adam_state(range(3)), blobs)).groups == (
        ParameterGroup((0, 1, 2), {}),
    )


def test_a_model_with_a_module_called_state_is_no_optimizer() -> None:
    """``state`` in a name is not enough."""
    metas = [TensorMeta("block.state.a.weight", dtype("float32"), (2,), "model", ("block.state.a.weight",))]
    manifest = manifest_of([], {}).replace(tensors=TensorTable.from_records(metas))
    assert optimizer_views(manifest) == ()


def test_two_optimizers_are_two_views() -> None:
    """Lightning saves a list of optimizers."""
    tensors: list[tuple[KeyPath, tuple[int, ...]]] = [
        (("optim", number, "state", 0, "exp_avg"), (number + 1,)) for number in range(2)
    ]
    assert [view.prefix for view in optimizer_views(manifest_of(tensors, {}))] == ["optim.0", "optim.1"]


def test_match_is_refused_when_a_parameter_is_missing() -> None:
    """More numbers than fitting tensors is no reading at all."""
    assert match_parameters([("a", (2,))], [(0, (2,)), (1, (2,))]) is None


def test_a_tied_weight_is_one_parameter() -> None:
    """Two model names of the same bytes are one parameter: the optimizer numbers it once, by its first name."""
    tensors: list[tuple[KeyPath, tuple[int, ...]]] = [
        (("model", "embed"), (5, 3)),
        (("model", "mid"), (3,)),
        (("model", "head"), (5, 3)),
        (("optim", "state", 0, "exp_avg"), (5, 3)),
        (("optim", "state", 1, "exp_avg"), (3,)),
    ]
    chunks = ChunkTable.from_columns(
        tensor=[0, 1, 2], offsets=[[0, 0]] * 3, sizes=[[5, 3], [3, 1], [5, 3]], file=[0] * 3, offset=[0, 60, 0],
        length=[60, 12, 60],
    )  # fmt: skip
    untied = manifest_of(tensors, group_blobs([(FIRST, [0, 1])]))
    assert only_view(untied).names == {0: "model.embed", 1: "model.mid"}
    swapped = manifest_of([tensors[0], tensors[2], tensors[1], *tensors[3:]], group_blobs([(FIRST, [0, 1])]))
    assert only_view(swapped).names == {}
    columns = chunks.take([0, 2, 1]).replace(tensor=np.arange(3, dtype=np.int32))
    assert only_view(swapped.replace(chunks=columns)).names == {0: "model.embed", 1: "model.mid"}


def test_numbers_in_the_order_of_groups() -> None:
    """With weight decay for matrices only, numbers run through the groups, each in the model's order."""
    shapes = {"a.weight": (2, 3), "a.bias": (2,), "b.weight": (4, 2), "b.bias": (4,)}
    order = ("a.weight", "b.weight", "a.bias", "b.bias")
    tensors: list[tuple[KeyPath, tuple[int, ...]]] = [(("model", fqn), shape) for fqn, shape in shapes.items()]
    tensors += [(("optim", "state", number, "exp_avg"), shapes[fqn]) for number, fqn in enumerate(order)]
    view = only_view(manifest_of(tensors, group_blobs([(FIRST, [0, 1]), (SECOND, [2, 3])])))
    assert view.names == {number: "model." + fqn for number, fqn in enumerate(order)}
