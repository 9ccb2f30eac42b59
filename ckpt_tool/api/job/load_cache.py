"""What a load has found out, kept for the next one of the same structure: the next one begins to read at once.

An entry is found by all that decides a plan on this rank, and trusted only when every rank has found the entry of the
same load, and the leaders have seen that no file has changed since.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any
from weakref import WeakKeyDictionary

from ckpt_tool.api.job.load_exchange import Choice
from ckpt_tool.api.job.load_manifest import Stamp
from ckpt_tool.api.job.load_move import Moves
from ckpt_tool.api.job.load_target import Target
from ckpt_tool.manifest.model import Blob
from ckpt_tool.manifest.tables import FileTable
from ckpt_tool.records import dataclass

__all__ = ["Known", "find_known", "forget_all", "keep_known"]

_KEPT = 4  # by process group; a job has few structures, and a plan is small beside its state
_Shelf = OrderedDict[tuple[Any, ...], "Known"]
_of_group: WeakKeyDictionary[Any, _Shelf] = WeakKeyDictionary()
_alone: _Shelf = OrderedDict()


@dataclass(frozen=True, slots=True)
class Known:
    """The outcome of planning one load."""

    fingerprint: int
    """Equal on the ranks that took part in that load, and only there."""
    stamp: Stamp | None
    """On leaders: what the files were."""
    target: Target
    unexpected: tuple[str, ...]
    files: FileTable
    blobs: tuple[Blob, ...]
    choice: Choice
    moves: Moves


def find_known(process_group: Any, key: tuple[Any, ...]) -> Known | None:
    """The entry of ``key``."""
    shelf = _shelf(process_group)
    known = shelf.get(key)
    if known is not None:
        shelf.move_to_end(key)
    return known


def keep_known(process_group: Any, key: tuple[Any, ...], known: Known) -> None:
    """Keep an entry, and let go of the least recently used one."""
    shelf = _shelf(process_group)
    shelf[key] = known
    while len(shelf) > _KEPT:
        shelf.popitem(last=False)


def forget_all() -> None:
    """Let go of everything."""
    _of_group.clear()
    _alone.clear()


def _shelf(process_group: Any) -> _Shelf:
    return _alone if process_group is None else _of_group.setdefault(process_group, OrderedDict())
