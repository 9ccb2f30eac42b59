"""Which parameter of the model each number of an optimizer means: as it was given names, or by order and shape.

Knows no spelling of an optimizer's state beyond its groups, and reads nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from ckpt_tool.manifest.model import Manifest
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["ParameterGroup", "ParameterKey", "match_parameters", "names_of"]

ParameterKey = str | int
"""How an optimizer calls a parameter: its fqn, or its number in the order in which the optimizer was given them."""

_NAMES = "param_names"


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters that share hyperparameters."""

    params: tuple[ParameterKey, ...]
    """In saved order; empty for a group without parameters, or when ``params`` is among the unread ones."""
    hyperparameters: Mapping[str, Any]
    """Values of loaded blobs, inert."""
    unread: tuple[str, ...] = ()
    """Hyperparameters (or ``params``) whose blob is not loaded."""


def match_parameters(
    model: Sequence[tuple[str, tuple[int, ...]]], numbered: Sequence[tuple[int, tuple[int, ...] | None]]
) -> dict[int, str] | None:
    """Names of numbered parameters, found by order and shape; None when there is no reading, or more than one.

    ``model`` is ``(fqn, shape)`` in the model's order and may hold buffers and frozen parameters, which have no number;
    ``numbered`` is ``(number, shape of its moments)``, None for one without state, which fits any. Numbers follow the
    order of ``Module.parameters()``, which is that of ``state_dict()``. The match is unique when the leftmost and the
    rightmost way to pick are the same.

    >>> match_parameters([("a", (2,)), ("running", (5,)), ("b", (3,))], [(0, (2,)), (1, (3,))])
    {0: 'a', 1: 'b'}
    >>> match_parameters([("a", (2,)), ("b", (2,))], [(0, (2,))]) is None
    True
    """
    ordered = sorted(numbered, key=lambda entry: entry[0])
    leftmost = _pick(model, ordered)
    rightmost = _pick(model[::-1], ordered[::-1])
    return leftmost if leftmost == rightmost else None


def _pick(
    model: Sequence[tuple[str, tuple[int, ...]]], numbered: Sequence[tuple[int, tuple[int, ...] | None]]
) -> dict[int, str] | None:
    picked: dict[int, str] = {}
    candidates = iter(model)
    for number, shape in numbered:
        fqn = next((fqn for fqn, candidate in candidates if shape in (None, candidate)), None)
        if fqn is None:
            return None
        picked[number] = fqn
    return picked


def names_of(
    manifest: Manifest, state: Mapping[ParameterKey, Mapping[str, str]], groups: Sequence[ParameterGroup]
) -> tuple[dict[int, str], str]:
    """Names of numbered parameters, and why (not)."""
    recorded = manifest.info.get("optimizer_parameters")
    if isinstance(recorded, Mapping):
        return {int(key): str(fqn) for key, fqn in recorded.items()}, "names of numbers as the reader matched them"
    if any(_NAMES in group.unread for group in groups):
        return {}, f"{_NAMES} of the groups are not read"
    given = _given_names(groups)
    if given:
        found = _in_model([meta.fqn for meta in manifest.tensors if meta.section == "model"], given)
        if found is None:
            first = next(iter(given.values()))
            return {}, f"{_NAMES} of the groups, such as {first!r}, are no tensors of the model, so numbers stay"
        return found, f"{_NAMES} of the groups give {counted(len(found), 'number')} a name"
    numbered = [(key, _shape_of(manifest, states)) for key, states in state.items() if isinstance(key, int)]
    has_shapes = any(shape is not None for _, shape in numbered)
    if not has_shapes and sum(bool(group.params) for group in groups) > 1:
        return {}, "no state tells shapes, and order alone does not say which group a parameter is in, so numbers stay"
    model = list(_candidates(manifest))
    matched = match_parameters(model, numbered)
    if matched is None:  # parameters without state may be in the way: they fit anything
        matched = match_parameters(model, [entry for entry in numbered if entry[1] is not None])
    if matched is None:
        matched = _match_groups(model, dict(numbered), groups)
    counts = f"{counted(len(numbered), 'number')} with {counted(len(model), 'model tensor')}"
    if matched is None:
        return {}, f"order and shape do not match {counts} in exactly one way, so numbers stay"
    return (
        matched,
        f"order and shape match {counts} in exactly one way, {counted(len(matched), 'number', 'have')} a name"
        if has_shapes
        else f"there are {counts}, taken in order, as no state tells shapes",
    )


def _shape_of(manifest: Manifest, states: Mapping[str, str]) -> tuple[int, ...] | None:
    """A parameter's shape by its state: that of its largest tensor, beside which NAdam and ASGD keep numbers."""
    index, tensors = manifest.tensors.index, manifest.tensors
    shapes = [tensors.shape_of(index[fqn]) for name, fqn in states.items() if name != "step" and fqn in index]
    return max(shapes, key=prod, default=None)


def _given_names(groups: Sequence[ParameterGroup]) -> dict[int, str]:
    """Names by number where every group has them: of an optimizer that was given named parameters (torch 2.6)."""
    given: dict[int, str] = {}
    for group in groups:
        names = group.hyperparameters.get(_NAMES)
        if not isinstance(names, list | tuple) or len(names) != len(group.params):
            return {}
        given |= {key: str(name) for key, name in zip(group.params, names, strict=True) if isinstance(key, int)}
    return given


def _in_model(fqns: Sequence[str], given: Mapping[int, str]) -> dict[int, str] | None:
    """The tensor of each name: all under one key of the checkpoint, without what a wrapper put before all of them.

    >>> _in_model(["model.0.w", "model.1.w"], {0: "module.1.w", 1: "module.0.w"})
    {0: 'model.1.w', 1: 'model.0.w'}
    """
    known = set(fqns)
    names = {key: name.split(".") for key, name in given.items()}
    while all(names.values()):
        parts = next(iter(names.values()))
        ending = ".".join(parts)
        befores = [fqn.removesuffix(ending) for fqn in fqns if fqn == ending or fqn.endswith(f".{ending}")]
        for before in sorted(befores, key=len):
            found = {key: before + ".".join(name) for key, name in names.items()}
            if known.issuperset(found.values()):
                return found
        if len({name[0] for name in names.values()}) > 1:
            break
        names = {key: name[1:] for key, name in names.items()}
    return None


def _match_groups(
    model: Sequence[tuple[str, tuple[int, ...]]],
    shapes: Mapping[int, tuple[int, ...] | None],
    groups: Sequence[ParameterGroup],
) -> dict[int, str] | None:
    """Names found group by group: with weight decay apart, numbers follow the model's order only within a group."""
    matched: dict[int, str] = {}
    for group in groups:
        names = match_parameters(model, [(key, shapes[key]) for key in group.params if isinstance(key, int)])
        if names is None:
            return None
        matched.update(names)
    is_complete = bool(matched) and len(set(matched.values())) == len(matched) == len(shapes)
    return matched if is_complete else None


def _candidates(manifest: Manifest) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Model tensors that may be parameters, in order: no integers, no replicas by assumption, tied ones once."""
    replicated = frozenset(manifest.info.get("replicated_by_assumption", ()))
    chunks = manifest.chunks
    seen: set[tuple[int, int, int]] = set()
    for row, meta in enumerate(manifest.tensors):
        if meta.section != "model" or meta.dtype.kind not in ("float", "complex") or meta.fqn in replicated:
            continue
        places = {(int(chunks.file[c]), int(chunks.offset[c]), int(chunks.length[c])) for c in chunks.rows_of(row)}
        if not places or not places <= seen:
            yield meta.fqn, meta.shape
        seen |= places
