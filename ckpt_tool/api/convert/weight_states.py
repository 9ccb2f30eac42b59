"""An optimizer's state by weight, so that it goes through the same changes of names and boxes as the weights.

A view that makes of some weights a tensor of another name and shape makes of their moments that tensor's moments: only
the names of the sources differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ckpt_tool.api.checkpoint import Checkpoint
from ckpt_tool.errors import LayoutError
from ckpt_tool.geometry.box import Box
from ckpt_tool.layout.views import View
from ckpt_tool.manifest.alias import with_aliases
from ckpt_tool.manifest.masters import MASTER_STATES, module_names
from ckpt_tool.manifest.model import Blob, KeyPath, Manifest, TensorMeta
from ckpt_tool.manifest.optimizer import ParameterGroup, optimizer_views
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import some_of

__all__ = [
    "MASTER",
    "MOMENTS",
    "WeightStates",
    "check_is_decoded",
    "state_views",
    "states_of",
    "step_of",
    "torch_state",
    "with_all_masters",
]

MASTER, MOMENTS = "param", ("exp_avg", "exp_avg_sq")
"""What the three tensors of Adam for each weight are called here."""

_STEP = "step"
_N_NAMED = 4


@dataclass(frozen=True)
class WeightStates:
    """What optimizers hold for weights."""

    tensors: Mapping[str, Mapping[str, str]]
    """By fqn of the weight, then by name of the state (`MASTER` however it is spelled): a tensor of its shape."""
    steps: Mapping[str, str]
    """By fqn of the weight: fqn of the tensor or object that counts its steps."""
    groups: tuple[ParameterGroup, ...]
    """With names as optimizers have them."""
    unnamed: str = ""
    """Why the weights of some state are not known; empty where they are."""
    notes: tuple[str, ...] = ()
    """How numbered parameters got their names."""

    def of_adam(self) -> WeightStates:
        """The weights that have both moments of Adam, with these and their masters."""
        kept = {
            weight: {slot: fqn for slot, fqn in own.items() if slot in (MASTER, *MOMENTS)}
            for weight, own in self.tensors.items()
            if all(moment in own for moment in MOMENTS)
        }
        return replace(self, tensors=kept)


def check_is_decoded(manifest: Manifest, where: str) -> None:
    """Nothing, when the optimizer's state is in the shape of the weights.

    Raises:
        LayoutError: it is still in the form of buffers, of which a fact is missing; the message names it.
    """
    undecoded = manifest.info.get("optimizer_undecoded")
    if undecoded:
        raise LayoutError(
            f"the optimizer's state is not in the shape of the weights: {undecoded}", where=where,
            hint="take the weights alone: --include 'model.*'",
        )  # fmt: skip


def states_of(manifest: Manifest, blobs: Sequence[Blob]) -> WeightStates:
    """The state of every weight that an optimizer knows by name; ``blobs`` are the objects, loaded.

    Raises:
        LayoutError: two optimizers hold state of one weight.
    """
    views = optimizer_views(manifest.replace(blobs=tuple(blobs)))
    keys = {str(key) for view in views for key in view.named()}
    weights = {name: fqn for fqn, name in module_names(manifest.tensors, keys).items()}
    found: dict[str, Mapping[str, str]] = {}
    steps: dict[str, str] = {}
    for view in views:
        for key, own in view.named().items():
            weight = weights.get(str(key), str(key) if str(key) in manifest.tensors.index else None)
            if weight is None:
                continue
            shape = manifest.tensor(weight).shape
            held = {
                MASTER if slot in MASTER_STATES else slot: fqn
                for slot, fqn in own.items()
                if fqn in manifest.tensors.index and slot != _STEP and manifest.tensor(fqn).shape == shape
            }
            if held and weight in found:
                raise LayoutError("has state in more than one optimizer", where=weight)
            if held:
                found[weight] = held
            if _STEP in own:
                steps[weight] = own[_STEP]
    unnamed = [view.evidence[-1] for view in views if any(isinstance(key, int) for key in view.named())]
    groups = tuple(group for view in views for group in view.named_groups())
    notes = tuple(f"{view.prefix or 'the optimizer'}: {view.evidence[-1]}" for view in views if view.names)
    return WeightStates(found, steps, groups, "; ".join(unnamed), notes)


def step_of(checkpoint: Checkpoint, manifest: Manifest, blobs: Sequence[Blob], states: WeightStates) -> int:
    """How many steps the optimizer has done. Reads the weights' own counters, a few bytes each.

    Raises:
        LayoutError: nothing tells, or weights differ, which one counter for all cannot say.
    """
    names = list(dict.fromkeys(states.steps[weight] for weight in states.tensors if weight in states.steps))
    values: dict[str, Any] = {blob.fqn: blob.value for blob in blobs if blob.is_loaded}
    stored = [fqn for fqn in names if fqn in manifest.tensors.index]
    arrays = checkpoint.read([(fqn, Box.whole(manifest.tensor(fqn).shape)) for fqn in stored]) if stored else []
    values |= dict(zip(stored, arrays, strict=True))
    counted = [values[fqn] for fqn in names if fqn in values]
    counted += [group.hyperparameters[_STEP] for group in states.groups if _STEP in group.hyperparameters]
    found = sorted({int(np.asarray(value).reshape(-1)[0]) for value in counted})
    if len(found) != 1:
        said = f"weights are at the steps {found[:_N_NAMED]}" if found else "nothing says how many steps it has done"
        raise LayoutError(
            f"the optimizer's state cannot be written: {said}, and the target has one counter for all",
            where=checkpoint.url,
            hint="leave the state out: --include with a pattern of the weights' names",
        )
    return found[0]


def with_all_masters(manifest: Manifest, states: WeightStates) -> tuple[Manifest, WeightStates, int]:
    """Every weight that has state, with a master: its own, or the weight itself; and how many are the weight itself."""
    aliases: list[tuple[int, TensorMeta]] = []
    found: dict[str, Mapping[str, str]] = {}
    for weight, own in states.tensors.items():
        if MASTER in own:
            found[weight] = own
            continue
        meta = manifest.tensor(weight)
        name = f"@{MASTER}.{weight}"
        aliases.append((manifest.tensor_id(weight), replace(meta, fqn=name, section="optimizer", path=(name,))))
        found[weight] = {**own, MASTER: name}
    return with_aliases(manifest, aliases), replace(states, tensors=found), len(aliases)


def state_views(
    views: Sequence[View],
    states: Mapping[str, Mapping[str, str]],
    slots: Sequence[str],
    path_of: Callable[[str, View], KeyPath],
) -> tuple[list[View], list[str]]:
    """Views that make of the weights' states what ``views`` make of the weights; and views of weights without any.

    Args:
        views: what weights become.
        states: by fqn of the weight and name of the state.
        slots: names of the states that are wanted.
        path_of: keys of the state called so, of the weight that a view shows.

    Raises:
        LayoutError: a tensor is made of weights of which only some have state.
    """
    found: list[View] = []
    without: list[str] = []
    for view in views:
        sources = dict.fromkeys(part.source_fqn for part in view.parts)
        lacking = [fqn for fqn in sources if any(slot not in states.get(fqn, {}) for slot in slots)]
        if len(lacking) == len(sources):
            without.append(view.fqn)
        elif lacking:
            raise LayoutError(
                f"{some_of(lacking, _N_NAMED)} have no {' and '.join(slots)}, other parts of it have", where=view.fqn
            )
        else:
            found += _of_slots(view, states, slots, path_of)
    return found, without


def torch_state(slot: str, view: View) -> KeyPath:
    """Keys of a weight's state in what torch's ``get_state_dict`` gives, under a training state's key ``optim``."""
    return ("optim", "state", view.fqn, slot)


def _of_slots(
    view: View,
    states: Mapping[str, Mapping[str, str]],
    slots: Sequence[str],
    path_of: Callable[[str, View], KeyPath],
) -> Iterator[View]:
    for slot in slots:
        parts = tuple(replace(part, source_fqn=states[part.source_fqn][slot]) for part in view.parts)
        path = path_of(slot, view)
        yield View(".".join(map(str, path)), view.shape, parts, view.zeros, path)
