"""Whether the optimizer covers the model: which parameters have state, which lack some, and whether shapes agree.

Looks at names and shapes only. Steps are compared once their values were read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod

from ckpt_tool.checks.extents import some_names
from ckpt_tool.manifest.finding import Finding, Severity
from ckpt_tool.manifest.model import Manifest
from ckpt_tool.manifest.optimizer import OptimizerView, ParameterKey, optimizer_views
from ckpt_tool.manifest.tables import SECTIONS
from ckpt_tool.sizes import counted

__all__ = ["MOMENTS", "model_names", "optimizer_findings", "step_findings"]

MOMENTS = frozenset(
    {
        "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer", "square_avg", "grad_avg", "acc_delta",
        "fp32_param", "master_param",
    }
)  # fmt: skip
"""State with one element per element of the parameter, whatever the optimizer."""
_KEYS_TRIED = 8


def optimizer_findings(manifest: Manifest) -> Iterator[Finding]:
    """Coverage of every optimizer in the checkpoint; nothing where there is none."""
    model = {
        fqn for fqn, s in zip(manifest.tensors.fqns, manifest.tensors.section, strict=True) if SECTIONS[s] == "model"
    }
    for view in optimizer_views(manifest):
        title = view.prefix or "the optimizer"
        if view.without_state:
            named = [str(view.names.get(k, k)) if isinstance(k, int) else k for k in view.without_state]
            said = (
                f"{counted(len(named), 'parameter')} of {title} without state, as those that "
                f"never got a gradient: {some_names(named)}"
            )
            yield Finding("no-optimizer-state", Severity.INFO, said, named[0])
        yield from _lacking(view, title)
        names = model_names(view, model)
        if names or not model:
            yield from _compared(manifest, view, names, title)
        elif view.spelling != "ids":
            said = f"no parameter of {title} has the name of a model tensor, so neither was checked against the other"
            yield Finding("optimizer-unmatched", Severity.INFO, said)


def model_names(view: OptimizerView, model: Sequence[str] | set[str]) -> dict[ParameterKey, str]:
    """Names in the model of the parameters that are there, by the key that the optimizer uses.

    Names of parameters begin behind some prefix of the model's (``model.``); the one that fits most of them is taken.
    """
    fqns = set(model)
    if view.names:
        return {key: fqn for key, fqn in view.names.items() if fqn in fqns and key in view.parameters}
    keys = [key for key in view.parameters if isinstance(key, str)]
    prefixes = Counter[str]()
    for key in keys[:_KEYS_TRIED]:
        prefixes.update(fqn.removesuffix(key) for fqn in fqns if fqn.endswith(key))
    candidates = [prefix for prefix in prefixes if prefix == "" or prefix.endswith((".", "/"))]
    found: list[dict[ParameterKey, str]] = [
        {key: prefix + key for key in keys if prefix + key in fqns} for prefix in candidates
    ]
    return max(found, key=len, default={})


def _lacking(view: OptimizerView, title: str) -> Iterator[Finding]:
    """Parameters whose state is a part of what more of the others have."""
    patterns: dict[frozenset[str], list[ParameterKey]] = {}
    for key, states in view.parameters.items():
        patterns.setdefault(frozenset(states), []).append(key)
    for pattern, keys in patterns.items():
        fuller = [p for p, holders in patterns.items() if pattern < p and len(holders) > len(keys)]
        if not fuller:
            continue
        missing = sorted(max(fuller, key=lambda p: len(patterns[p])) - pattern)
        for key in keys:
            name = str(view.names.get(key, key)) if isinstance(key, int) else key
            said = f"state of {name!r} in {title} lacks {', '.join(missing)}, which most other parameters have"
            yield Finding("state-incomplete", Severity.WARNING, said, name)


def _compared(
    manifest: Manifest, view: OptimizerView, names: Mapping[ParameterKey, str], title: str
) -> Iterator[Finding]:
    index = manifest.tensors.index
    for key, states in view.parameters.items():
        fqn = names.get(key)
        if fqn is None:
            if names and isinstance(key, str):
                said = f"{title} has state of {key!r}, which the model lacks"
                yield Finding("state-without-parameter", Severity.WARNING, said, next(iter(states.values())))
            continue
        shape = manifest.tensors.shape_of(index[fqn])
        for state, state_fqn in states.items():
            row = index.get(state_fqn)
            if row is None:
                continue
            got = manifest.tensors.shape_of(row)
            if got == shape or _is_factor(got, shape, state):
                continue
            severity = Severity.ERROR if state in MOMENTS else Severity.WARNING
            said = f"{state} of {fqn!r} has shape {list(got)}, expected the parameter's {list(shape)}"
            yield Finding("state-shape", severity, said, state_fqn)


def _is_factor(got: tuple[int, ...], shape: tuple[int, ...], state: str) -> bool:
    """Whether a state is a scalar or, unless it is elementwise, a reduction of its parameter over dimensions."""
    if prod(got) == 1:
        return True
    if state in MOMENTS:
        return False
    squeezed = [n for n in got if n != 1]
    remaining = iter(shape)
    return len(squeezed) < len(shape) and all(n in remaining for n in squeezed)


def step_findings(title: str, steps: Mapping[str, float], places: Mapping[str, Collection[float]]) -> Iterator[Finding]:
    """Whether the parameters of one optimizer agree about how many steps they have taken.

    An error where each of several files has counters of one value, and not all the same: they are of several saves. A
    warning where a file has several, as one has whose parameters began to train later than others.

    Args:
        title: how to call the optimizer.
        steps: by parameter.
        places: by file, the values of the counters in it.
    """
    groups: dict[float, list[str]] = {}
    for name, step in steps.items():
        groups.setdefault(step, []).append(name)
    if len(groups) < 2:
        return
    parts = [f"{step:g} ({len(names):,}: {some_names(names, 2)})" for step, names in sorted(groups.items())[:8]]
    more = f" and {counted(len(groups) - 8, 'more step')}" if len(groups) > 8 else ""
    said = f"parameters of {title} are at different steps: {'; '.join(parts)}{more}"
    rarest = min(groups.values(), key=len)
    if len(places) < 2 or any(len(values) > 1 for values in places.values()):
        yield Finding("mixed-steps", Severity.WARNING, said, rarest[0])
        return
    path = next(path for path, values in places.items() if steps[rarest[0]] in values)
    said += f"; {path} is of step {steps[rarest[0]]:g}, and each file of one step: files of several saves are mixed"
    yield Finding("mixed-steps", Severity.ERROR, said, rarest[0])
