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
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckpt_tool.manifest.model import KeyPath, Manifest
from ckpt_tool.manifest.optimizer_names import ParameterGroup, ParameterKey, names_of
from ckpt_tool.records import dataclass, field
from ckpt_tool.sizes import counted

__all__ = ["OptimizerView", "ParameterGroup", "ParameterKey", "optimizer_views"]

_STATE, _GROUPS = "state", "param_groups"
_LISTED = re.compile(r"(\d+)\.params\.(\d+)")
_SLOTS = frozenset(
    {"param", "fp32_param", "master_param", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer"}
)


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


def optimizer_views(manifest: Manifest, *, with_stateless: bool = False) -> tuple[OptimizerView, ...]:
    """Every optimizer in a checkpoint, in order of appearance; none when nothing looks like one.

    A name with ``state`` in it counts only when the tensor is in the optimizer section or ``param_groups`` stands
    beside it: a model may have a module called ``state``. Numbers are matched with model parameters by
    ``info["optimizer_parameters"]`` where the reader recorded it, by ``param_names`` of the groups where the optimizer
    was given names, else by order and shape (`optimizer_names.match_parameters`).

    Args:
        manifest: its blobs are loaded as far as groups are to be told.
        with_stateless: also optimizers of which there are groups alone, as of SGD without momentum, or before a step.
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
        draft.finish(manifest)
        for draft in drafts.values()
        if (draft.state and (draft.groups or draft.is_optimizer)) or (with_stateless and draft.has_members)
    )


@dataclass(slots=True)
class _Draft:
    """What has been collected of one optimizer."""

    prefix: KeyPath
    is_nested: bool
    is_optimizer: bool = False
    state: dict[ParameterKey, dict[str, str]] = field(default_factory=dict)
    groups: dict[ParameterKey, dict[str, tuple[bool, Any]]] = field(default_factory=dict)

    @property
    def has_members(self) -> bool:
        """Whether a group says which parameters it has, as those of optimizers do."""
        return any(isinstance(key, str) or "params" in members for key, members in self.groups.items())

    def finish(self, manifest: Manifest) -> OptimizerView:
        listed = [group.params for group in map(_group, self.groups.values())]
        state_keys = list(self.state) or [key for params in listed for key in params]
        is_numbered = all(isinstance(key, int) for key in state_keys) and bool(state_keys)
        is_flat = bool(self.groups) and all(isinstance(key, str) for key in self.groups)
        if not self.groups and not is_numbered:
            is_flat = not self.is_nested
        spelling = "flat" if is_flat else "ids" if is_numbered else "names"
        groups = (
            _merged_groups(self.groups) if is_flat else tuple(_group(self.groups[g]) for g in _sorted_keys(self.groups))
        )
        of = counted(len(state_keys), "parameter")
        evidence = [
            {
                "ids": f"state of {of} is keyed by number",
                "names": f"state of {of} is keyed by name, groups list names",
                "flat": f"state of {of} and hyperparameters are keyed by name",
            }[spelling]
            if self.state
            else f"no state; {'hyperparameters are keyed by name' if is_flat else f'groups list {of}'}"
        ]
        held = {key for key, states in self.state.items() if states}
        grouped = [key for group in groups for key in group.params]
        if held and all(isinstance(key, str) for key in held) and sum(isinstance(k, int) for k in grouped) <= len(held):
            grouped = [key for key in grouped if isinstance(key, str)]  # numbers of those that have their state by name
        members = list(dict.fromkeys([*grouped, *state_keys]))
        names: dict[int, str] = {}
        if is_numbered:
            names, why = names_of(manifest, {key: self.state.get(key, {}) for key in members}, groups)
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
