"""Coverage of the model by its optimizer."""

from __future__ import annotations

import numpy as np
import pytest

from ckpt_tool.checks.optimizer import model_names, optimizer_findings, step_findings
from ckpt_tool.manifest.finding import Severity
from ckpt_tool.manifest.model import Blob, Manifest, TensorMeta
from ckpt_tool.manifest.optimizer import optimizer_views
from tests.checks.synthetic import checkpoint_of, kinds, make, stored, tensor

SHAPES = {"layers.0.w": (4, 2), "layers.1.w": (3, 2), "norm.w": (2,)}


def state_of(*names: str, prefix: str = "optim.state.", **shapes: tuple[int, ...]) -> list[TensorMeta]:
    """Adam's state of parameters."""
    moments = [
        tensor(f"{prefix}{name}.{moment}", shapes.get(moment, SHAPES[name]))
        for name in names
        for moment in ("exp_avg", "exp_avg_sq")
    ]
    return [*moments, *(tensor(f"{prefix}{name}.step", ()) for name in names)]


def manifest_of(state: list[TensorMeta], prefix: str = "model.", blobs: tuple[Blob, ...] = ()) -> Manifest:
    """A model with the parameters of `SHAPES`, and state."""
    return make([*(tensor(prefix + fqn, shape) for fqn, shape in SHAPES.items()), *state], [], blobs)


@pytest.mark.parametrize("prefix", ["", "model.", "app.model."])
def test_full_state_is_clean(prefix: str) -> None:
    """Names of parameters are found behind whatever prefix the model has."""
    manifest = manifest_of(state_of(*SHAPES), prefix)
    assert list(optimizer_findings(manifest)) == []
    [view] = optimizer_views(manifest)
    names = set(manifest.tensors.fqns)
    assert model_names(view, names) == {fqn: prefix + fqn for fqn in SHAPES}


def test_no_optimizer_is_clean() -> None:
    """A model alone has no optimizer to complain about."""
    assert list(optimizer_findings(manifest_of([]))) == []


def test_parameter_without_state_is_information() -> None:
    """Three parameters, state for two, all in the group: one never got a gradient."""
    groups = [
        Blob(
            "optim.param_groups",
            "value",
            None,
            [{"params": list(SHAPES), "lr": 0.1}],
            ("optim", "param_groups"),
            is_loaded=True,
        ),
    ]
    manifest = manifest_of(state_of("layers.0.w", "norm.w"), blobs=tuple(groups))
    [found] = optimizer_findings(manifest)
    assert (found.kind, found.severity, found.fqn) == ("no-optimizer-state", Severity.INFO, "layers.1.w")
    assert found.message.startswith("1 parameter of optim without state")


def test_parameter_that_lacks_one_state() -> None:
    """exp_avg_sq of one parameter is gone, the others have it."""
    state = [meta for meta in state_of(*SHAPES) if meta.fqn != "optim.state.layers.1.w.exp_avg_sq"]
    [found] = optimizer_findings(manifest_of(state))
    assert (found.kind, found.severity, found.fqn) == ("state-incomplete", Severity.WARNING, "layers.1.w")
    assert "lacks exp_avg_sq" in found.message


def test_two_optimizers_in_one_are_no_fault() -> None:
    """Muon for matrices and Adam for the rest: neither set of names is a part of the other."""
    state = [*state_of("norm.w"), tensor("optim.state.layers.0.w.momentum_buffer", (4, 2))]
    state.append(tensor("optim.state.layers.1.w.momentum_buffer", (3, 2)))
    assert list(optimizer_findings(manifest_of(state))) == []


def test_state_of_an_unknown_parameter() -> None:
    """State that belongs to no tensor of the model is left from another one."""
    state = [*state_of(*SHAPES), tensor("optim.state.gone.w.exp_avg", (2,)), tensor("optim.state.gone.w.step", ())]
    state.append(tensor("optim.state.gone.w.exp_avg_sq", (2,)))
    [found] = optimizer_findings(manifest_of(state))
    assert (found.kind, found.severity) == ("state-without-parameter", Severity.WARNING)
    assert "'gone.w'" in found.message


@pytest.mark.parametrize(
    ("state", "shape", "expected"),
    [
        ("exp_avg", (2, 4), [("state-shape", Severity.ERROR)]),
        ("exp_avg", (8,), [("state-shape", Severity.ERROR)]),
        ("exp_avg", (4, 2), []),
        ("step", (1,), []),
        ("exp_avg_sq_row", (4,), []),
        ("exp_avg_sq_col", (1, 2), []),
        ("own", (5, 5), [("state-shape", Severity.WARNING)]),
    ],
)
def test_shape_of_state(state: str, shape: tuple[int, ...], expected: list[tuple[str, Severity]]) -> None:
    """Elementwise state has the parameter's shape; scalars and factors may be smaller."""
    manifest = make([tensor("model.w", (4, 2)), tensor(f"optim.state.w.{state}", shape)], [])
    assert [(found.kind, found.severity) for found in optimizer_findings(manifest)] == expected


def test_names_that_never_meet_are_said_to_be_unchecked() -> None:
    """An optimizer whose names all differ from the model's is not a hundred faults."""
    manifest = make([tensor("model.a", (2,)), tensor("optim.state.x.exp_avg", (2,))], [])
    assert kinds(optimizer_findings(manifest)) == [("optimizer-unmatched", None)]


def test_optimizer_alone_is_clean() -> None:
    """A file of only the optimizer has no model to compare with."""
    assert list(optimizer_findings(make(state_of(*SHAPES), []))) == []


def test_mixed_steps_are_grouped() -> None:
    """Each step with its number of parameters, the rarest named: in one file some may have begun to train later."""
    steps = {f"p{i}": 10.0 for i in range(5)} | {"q": 9.0}
    said = "parameters of optim are at different steps: 9 (1: 'q'); 10 (5: 'p0', 'p1' and 3 more)"
    for places in ({"a": {9.0, 10.0}}, {"a": {9.0, 10.0}, "b": {10.0}}):
        [found] = step_findings("optim", steps, places)
        assert (found.kind, found.severity, found.fqn) == ("mixed-steps", Severity.WARNING, "q")
        assert found.message == said
    assert list(step_findings("optim", {"p": 3.0, "q": 3.0}, {"a": {3.0}, "b": {3.0}})) == []


def test_files_of_one_step_each_are_a_torn_save() -> None:
    """Where the steps part the files, these are of several saves, which is no checkpoint."""
    steps = {f"p{i}": 10.0 for i in range(5)} | {"q": 9.0}
    [found] = step_findings("optim", steps, {"a": {10.0}, "b": {9.0}, "c": {10.0}})
    assert (found.severity, found.fqn) == (Severity.ERROR, "q")
    assert found.message.endswith("; b is of step 9, and each file of one step: files of several saves are mixed")


@pytest.mark.parametrize(("second", "expected"), [(7.0, []), (6.0, ["mixed-steps"])])
def test_steps_are_read_at_the_default_level(second: float, expected: list[str]) -> None:
    """Step counters are tensors of one element, and their values count."""
    from ckpt_tool.api.trust.verify import verify

    arrays = {}
    for name, step in (("a", 7.0), ("b", second)):
        arrays[f"model.{name}"] = np.ones(3, "f4")
        arrays[f"optim.state.{name}.exp_avg"] = np.ones(3, "f4")
        arrays[f"optim.state.{name}.step"] = np.array(step, "f4")
    manifest, files = stored(arrays)
    assert [found.kind for found in verify(checkpoint_of(manifest, files)).findings] == expected
    assert verify(checkpoint_of(manifest, files), level="quick").findings == ()
