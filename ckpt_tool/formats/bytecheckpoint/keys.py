"""Keys of a checkpoint that is being written: which section an entry goes to, and what it is called there.

A section's keys do not repeat its name: ``model.emb.weight`` is ``emb.weight`` of the model. State of a parameter is
``state.<parameter>.<name>``; whatever is neither the model's nor the optimizer's is extra state of a rank.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ckpt_tool.manifest.model import KeyPath
from ckpt_tool.records import dataclass

__all__ = ["Key", "key_of", "rank_of", "with_names"]

_OUTER = {
    "model": ("model", "module", "state_dict"),
    "optimizer": ("optimizer", "optim", "optimizer_state_dict"),
    "extra_state": ("extra_state",),
}
_FLAT = "_flat_param"
_RANK = re.compile(r"@rank(\d{1,9})$")


@dataclass(frozen=True, slots=True)
class Key:
    """What an entry is called in its section."""

    section: str
    """``model``, ``optimizer`` or ``extra_state``."""
    name: str
    """The dotted key."""
    path: KeyPath
    """Keys from the section's root."""


def key_of(section: str, path: KeyPath) -> Key:
    """The key of an entry of ``section`` (as manifests name them) with the keys ``path``.

    >>> key_of("optimizer", ("optim", "state", "a.b", "exp_avg"))
    Key(section='optimizer', name='state.a.b.exp_avg', path=('state', 'a.b', 'exp_avg'))
    >>> key_of("optimizer", ("optimizer.state.a.b.exp_avg",)).path
    ('state', 'a.b', 'exp_avg')
    >>> key_of("model", ("layers.0.weight",)).name
    'layers.0.weight'
    """
    home = section if section in ("model", "optimizer") else "extra_state"
    name = ".".join(map(str, path))
    first, _, rest = name.partition(".")
    is_outer = first in _OUTER[home] and bool(rest) and (home != "model" or len(path) > 1 or first == "model")
    if is_outer:
        name = rest
        path = path[1:] if str(path[0]) == first and len(path) > 1 else (rest,)
    if home == "model":
        return Key(home, name, (name,))
    if home == "optimizer" and name.startswith("state.") and name.count(".") > 1:
        parameter, _, state = name.removeprefix("state.").rpartition(".")
        return Key(home, name, ("state", parameter, state))
    return Key(home, name, path)


def rank_of(path: KeyPath) -> tuple[int | None, KeyPath]:
    """The rank in a name like ``rng@rank3``, and the keys without it.

    >>> rank_of(("extra_state", "rng@rank3"))
    (3, ('extra_state', 'rng'))
    """
    match = _RANK.search(str(path[-1]))
    if match is None:
        return None, path
    return int(match[1]), (*path[:-1], str(path[-1])[: match.start()])


def with_names(groups: Any, keys: Iterable[Key]) -> list[Any] | None:
    """Parameter groups with names in place of numbers; None where they stay as they are.

    Saved decomposed, groups number parameters although their state is named (``planner/fsdp/fsdp_planner.py``), which
    the library then cannot load into sharded models. One group of all parameters needs no numbers. With several groups
    they stay: nothing says whose they are.
    """
    state = dict.fromkeys(str(key.path[1]) for key in keys if key.section == "optimizer" and len(key.path) == 3)
    names = [name for name in state if not name.endswith(_FLAT)]
    if not isinstance(groups, list) or len(groups) != 1 or not isinstance(groups[0], dict):
        return None
    numbers = groups[0].get("params")
    if not isinstance(numbers, list) or not all(type(number) is int for number in numbers):
        return None
    if not numbers or len(numbers) != len(names) or any(name.isdecimal() for name in names):
        return None
    return [{**groups[0], "params": names}]
