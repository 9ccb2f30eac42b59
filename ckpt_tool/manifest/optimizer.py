"""An optimizer view is the one normal form of an optimizer's state, whichever of three ways it was saved.

The spellings, of which torch itself writes all three:

- ``ids``: ``torch.optim.Optimizer.state_dict()``: ``state.<number>.exp_avg`` and ``param_groups.<g>.params`` = numbers;
- ``names``: ``get_state_dict`` and FSDP: ``state.<fqn>.exp_avg`` and ``param_groups.<g>.params`` = fqns;
- ``flat``: ``flatten_optimizer_state_dict=True``: ``state.<fqn>.exp_avg`` and ``param_groups.<fqn>.lr``, one entry for
  each parameter and hyperparameter.

Looks only at names, shapes and loaded blobs; knows no kind of optimizer and reads no file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ckpt_tool.manifest.model import KeyPath, Manifest
from ckpt_tool.records import dataclass, field
from ckpt_tool.sizes import counted

__all__ = ["OptimizerView", "ParameterGroup", "ParameterKey", "match_parameters", "optimizer_views"]

ParameterKey = str | int
"""How an optimizer calls a parameter: its fqn, or its number in the order in which the optimizer was given them."""

_STATE, _GROUPS, _NAMES = "state", "param_groups", "param_names"
_LISTED = re.compile(r"(\d+)\.params\.(\d+)")
_SLOTS = frozenset(
    {"param", "fp32_param", "master_param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"}
)


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters that share hyperparameters."""

    params: tuple[ParameterKey, ...]
    """In saved order; empty for a group without parameters, or when ``params`` is among the unread ones."""
    hyperparameters: Mapping[str, Any]
    """Values of loaded blobs, inert."""
    unread: tuple[str, ...] = ()
    """Hyperparameters (or ``params``) whose blob is not loaded."""


@dataclass(frozen=True, slots=True)
class OptimizerView:
    """One optimizer of a checkpoint."""

    prefix: str
    """What stands before ``state`` in the fqns, without the dot; empty when they start with it."""
    path: KeyPath
    """The keys of that prefix."""
    spelling: str
    """``ids``, ``names`` or ``flat``."""
    parameters: Mapping[ParameterKey, Mapping[str, str]]
    """By parameter, then by name of the state (``exp_avg``): fqn of the tensor, or of the blob, that holds it."""
    groups: tuple[ParameterGroup, ...]
    names: Mapping[int, str]
    """fqn in the model of numbered parameters; empty when it is not known, or nothing is numbered."""
    without_state: tuple[ParameterKey, ...]
    """Members of groups that have no state at all, as those have that never got a gradient."""
    evidence: tuple[str, ...] = ()
    """Why it was read like this."""

    def named(self) -> dict[ParameterKey, Mapping[str, str]]:
        """``parameters`` with numbers replaced by fqns where these are known."""
        return {self._name(key): state for key, state in self.parameters.items()}

    def named_groups(self) -> tuple[ParameterGroup, ...]:
        """``groups`` with numbers replaced by fqns where these are known."""
        return tuple(
            ParameterGroup(tuple(self._name(key) for key in group.params), group.hyperparameters, group.unread)
            for group in self.groups
        )

    def _name(self, key: ParameterKey) -> ParameterKey:
        return self.names.get(key, key) if isinstance(key, int) else key


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


def optimizer_views(manifest: Manifest) -> tuple[OptimizerView, ...]:
    """Every optimizer in a checkpoint, in order of appearance; none when nothing looks like one.

    A name with ``state`` in it counts only when the tensor is in the optimizer section or ``param_groups`` stands
    beside it: a model may have a module called ``state``. Numbers are matched with model parameters by
    ``info["optimizer_parameters"]`` where the reader recorded it, by ``param_names`` of the groups where the optimizer
    was given names, else by order and shape (`match_parameters`).
    """
    drafts: dict[KeyPath, _Draft] = {}
    for meta in manifest.tensors:
        _collect(drafts, meta.fqn, meta.path, value=None, is_loaded=False, is_optimizer=meta.section == "optimizer")
    seen: set[str] = set()
    for blob in manifest.blobs:
        if blob.fqn not in seen:  # ranks repeat what is the same for all
            seen.add(blob.fqn)
            _collect(drafts, blob.fqn, blob.path or (blob.fqn,), value=blob.value, is_loaded=blob.is_loaded)
    return tuple(
        draft.finish(manifest) for draft in drafts.values() if draft.state and (draft.groups or draft.is_optimizer)
    )


@dataclass(slots=True)
class _Draft:
    """What has been collected of one optimizer."""

    prefix: KeyPath
    is_nested: bool
    is_optimizer: bool = False
    state: dict[ParameterKey, dict[str, str]] = field(default_factory=dict)
    groups: dict[ParameterKey, dict[str, tuple[bool, Any]]] = field(default_factory=dict)

    def finish(self, manifest: Manifest) -> OptimizerView:
        state_keys = list(self.state)
        is_numbered = all(isinstance(key, int) for key in state_keys) and bool(state_keys)
        is_flat = bool(self.groups) and all(isinstance(key, str) for key in self.groups)
        if not self.groups and not is_numbered:
            is_flat = not self.is_nested
        spelling = "flat" if is_flat else "ids" if is_numbered else "names"
        groups = (
            _merged_groups(self.groups) if is_flat else tuple(_group(self.groups[g]) for g in _sorted_keys(self.groups))
        )
        evidence = [
            {
                "ids": f"state of {counted(len(state_keys), 'parameter')} is keyed by number",
                "names": f"state of {counted(len(state_keys), 'parameter')} is keyed by name, groups list names",
                "flat": f"state of {counted(len(state_keys), 'parameter')} and hyperparameters are keyed by name",
            }[spelling]
        ]
        held = {key for key, states in self.state.items() if states}
        members = list(dict.fromkeys([*(key for group in groups for key in group.params), *state_keys]))
        names: dict[int, str] = {}
        if is_numbered:
            names, why = _names_of(manifest, {key: self.state.get(key, {}) for key in members}, groups)
            evidence.append(why)
        return OptimizerView(
            prefix=".".join(str(part) for part in self.prefix),
            path=self.prefix,
            spelling=spelling,
            parameters={key: states for key, states in self.state.items() if states},
            groups=groups,
            names=names,
            without_state=tuple(key for key in members if key not in held),
            evidence=tuple(evidence),
        )


def _sorted_keys(groups: Iterable[ParameterKey]) -> list[ParameterKey]:
    """Group keys by number; names keep their order behind them."""
    numbers = sorted(key for key in groups if isinstance(key, int))
    return [*numbers, *(key for key in groups if not isinstance(key, int))]


def _collect(
    drafts: dict[KeyPath, _Draft],
    fqn: str,
    path: KeyPath,
    *,
    value: Any,
    is_loaded: bool,
    is_optimizer: bool = False,
) -> None:
    """Add one entry to the draft that its path belongs to, if it is part of an optimizer."""
    split = _split(path)
    if split is None:
        return
    prefix, marker, rest, is_nested = split
    draft = drafts.setdefault(prefix, _Draft(prefix, is_nested))
    draft.is_optimizer |= is_optimizer
    if marker == _STATE:
        for key, name in _state_entries(rest, value, is_loaded=is_loaded):
            states = draft.state.setdefault(key, {})
            if name:
                states[name] = fqn
        return
    for group, hyperparameter, found in _group_entries(rest, value):
        members = draft.groups.setdefault(group, {})
        if isinstance(hyperparameter, tuple):  # one list element at a time
            name, _ = hyperparameter
            _, listed = members.get(name, (is_loaded, []))
            members[name] = (is_loaded, [*listed, found])
        elif hyperparameter is not None:
            members[hyperparameter] = (is_loaded, found)


def _split(path: KeyPath) -> tuple[KeyPath, str, KeyPath, bool] | None:
    """``(prefix, "state" or "param_groups", what follows, whether nested)`` of a key path; None when it has neither.

    >>> _split(("optim", "state", 0, "step"))
    (('optim',), 'state', (0, 'step'), True)
    >>> _split(("optim.state.a.weight.step",))
    (('optim',), 'state', ('a.weight', 'step'), False)
    >>> _split(("optim.param_groups.1.params.0",))
    (('optim',), 'param_groups', (1, 'params', 0), False)
    """
    for at, part in enumerate(path):
        if part in (_STATE, _GROUPS) and (part == _GROUPS or at + 1 < len(path)):
            return path[:at], str(part), path[at + 1 :], True
        if isinstance(part, str):
            for marker in (_GROUPS, _STATE):
                head, found, tail = ("." + part).partition(f".{marker}.")
                if found:
                    prefix = (*path[:at], head[1:]) if head else path[:at]
                    key, _, last = tail.rpartition(".")
                    rest: KeyPath = (key, last) if key else (tail,)
                    listed = _LISTED.fullmatch(tail) if marker == _GROUPS else None
                    if listed:
                        rest = (int(listed[1]), "params", int(listed[2]))
                    return prefix, marker, (*rest, *path[at + 1 :]), False
    return None


def _parameter_key(part: str | int) -> ParameterKey:
    """Numbers were turned into text by formats whose keys are text."""
    return int(part) if isinstance(part, str) and part.isdecimal() else part


def _state_entries(rest: KeyPath, value: Any, *, is_loaded: bool) -> Iterator[tuple[ParameterKey, str]]:
    if len(rest) >= 2 and rest[0] in _SLOTS and rest[-1] not in _SLOTS:  # Megatron: `state.exp_avg.<fqn>`
        yield ".".join(str(part) for part in rest[1:]), str(rest[0])
    elif len(rest) >= 2:
        yield _parameter_key(rest[0]), ".".join(str(part) for part in rest[1:])
    elif len(rest) == 1 and is_loaded and not value:
        yield _parameter_key(rest[0]), ""  # an empty dict: an optimizer without momentum, or no gradient yet


def _group_entries(rest: KeyPath, value: Any) -> Iterator[tuple[ParameterKey, Any, Any]]:
    """``(group, hyperparameter or (hyperparameter, position) or None, value)``."""
    if not rest:
        for number, members in enumerate(value if isinstance(value, list | tuple) else ()):
            yield number, None, None
            yield from _group_entries((number,), members)
    elif len(rest) == 1:
        key = _parameter_key(rest[0])
        yield key, None, None
        for name, found in value.items() if isinstance(value, Mapping) else ():
            yield key, str(name), found
    elif len(rest) == 2:
        yield _parameter_key(rest[0]), str(rest[1]), value
    elif len(rest) == 3:
        yield _parameter_key(rest[0]), (str(rest[1]), rest[2]), value


def _group(members: Mapping[str, tuple[bool, Any]]) -> ParameterGroup:
    is_read, params = members.get("params", (True, ()))
    listed = params if isinstance(params, list | tuple) else ()
    return ParameterGroup(
        params=tuple(key for key in listed if isinstance(key, str | int)) if is_read else (),
        hyperparameters={name: value for name, (loaded, value) in members.items() if loaded and name != "params"},
        unread=tuple(name for name, (loaded, _) in members.items() if not loaded),
    )


def _merged_groups(by_parameter: Mapping[ParameterKey, Mapping[str, tuple[bool, Any]]]) -> tuple[ParameterGroup, ...]:
    """Groups of the flat spelling: parameters with equal hyperparameters, in order of appearance."""
    merged: dict[str, tuple[list[ParameterKey], Mapping[str, tuple[bool, Any]]]] = {}
    for key, members in by_parameter.items():
        merged.setdefault(repr(sorted(members.items(), key=lambda item: item[0])), ([], members))[0].append(key)
    return tuple(
        ParameterGroup(
            params=tuple(keys),
            hyperparameters={name: value for name, (loaded, value) in members.items() if loaded},
            unread=tuple(name for name, (loaded, _) in members.items() if not loaded),
        )
        for keys, members in merged.values()
    )


def _names_of(
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
    index = manifest.tensors.index
    numbered: list[tuple[int, tuple[int, ...] | None]] = []
    for key, states in state.items():
        rows = [index[fqn] for name, fqn in states.items() if name != "step" and fqn in index]
        if isinstance(key, int):
            numbered.append((key, manifest.tensors.shape_of(rows[0]) if rows else None))
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
        f"order and shape match {counts} in exactly one way, {counted(len(matched), 'number', 'have')} a name",
    )


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
