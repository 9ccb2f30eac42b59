"""Items of a checkpoint that is being written: which item an entry goes to, and under which keys.

An item is what the job's program passes under one key, as torch-checkpointing and torchsnapshot have them.
"""

from __future__ import annotations

import re

from ckpt_tool.manifest.model import KeyPath

__all__ = ["item_of", "rank_of"]

_KEY = re.compile(r"[A-Za-z0-9_-]+")
_NOT_KEY = re.compile(r"[^A-Za-z0-9_-]+")
_RANK = re.compile(r"@rank(\d{1,9})$")
_OUTER = {"model": "model", "optimizer": "optimizer", "optim": "optimizer"}


def item_of(section: str, path: KeyPath) -> tuple[str, KeyPath]:
    """The item of an entry, and its keys inside of it: the first key where there are several, else the section.

    >>> item_of("optimizer", ("optimizer", "state", 0, "exp_avg"))
    ('optimizer', ('state', 0, 'exp_avg'))
    >>> item_of("model", ("model.layers.0.weight",)), item_of("optimizer", ("optimizer.state.w.step",))
    (('model', ('model.layers.0.weight',)), ('optimizer', ('state.w.step',)))
    >>> item_of("other", ("step",))
    ('step', ())
    """
    first = str(path[0])
    if len(path) > 1 and _KEY.fullmatch(first):
        return first, path[1:]
    if section == "model":
        return "model", path
    if section == "optimizer":
        head, _, rest = first.partition(".")
        return "optimizer", ((rest, *path[1:]) if head in _OUTER and rest else path)
    return (first, path[1:]) if _KEY.fullmatch(first) else (_NOT_KEY.sub("_", first), path)


def rank_of(path: KeyPath) -> tuple[int | None, KeyPath]:
    """The rank in a name like ``rng@rank3``, and the keys without it.

    >>> rank_of(("train_state", "rng@rank3"))
    (3, ('train_state', 'rng'))
    """
    match = _RANK.search(str(path[-1]))
    if match is None:
        return None, path
    return int(match[1]), (*path[:-1], str(path[-1])[: match.start()])
