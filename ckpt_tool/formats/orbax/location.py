"""Where the items of an Orbax checkpoint lie: in the folder itself, or in folders below it, as its manager writes.

A step is ``_CHECKPOINT_METADATA`` beside an item, or beside folders that are items. Knows names of files only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckpt_tool.formats.orbax.ocdbt import MANIFEST
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted

__all__ = ["Items", "find_items"]

_STEP = "_CHECKPOINT_METADATA"
_TREE = "_METADATA"
_JSON = "metadata"
_ARRAYS = re.compile(r"[^/]+/(?:\.zarray|zarr\.json)")
_TEMPORARY = re.compile(r"\.orbax-checkpoint-tmp")
_PROCESS = re.compile(r"ocdbt\.process_[^/]+/manifest\.ocdbt")


@dataclass(frozen=True, slots=True)
class Items:
    """Folders of a step; ``""`` for the folder itself."""

    arrays: tuple[str, ...]
    json: tuple[str, ...]
    unfinished: tuple[str, ...]
    """Items whose processes wrote, and that were never put together."""
    evidence: str
    is_sure: bool = True
    """False where zarr arrays are all that is there."""


def find_items(paths: Iterable[str]) -> Items | None:
    """The items among the files of a folder, None when it is no step of Orbax.

    >>> find_items(["3/_METADATA", "3/manifest.ocdbt"]) is None
    True
    >>> find_items(["_CHECKPOINT_METADATA", "state/_METADATA", "state/manifest.ocdbt", "meta/metadata"]).arrays
    ('state',)
    """
    here: set[str] = set()
    below: dict[str, set[str]] = {}
    for path in paths:
        here.add(path)
        folder, slash, rest = path.partition("/")
        if slash:
            below.setdefault(folder, set()).add(rest)
    if _is_item(here):
        evidence = f"{_TREE} beside arrays" if _TREE in here else f"{MANIFEST} or arrays of zarr"
        is_sure = bool({_TREE, MANIFEST} & here) or _is_unfinished(here)
        return Items(("",), (), ("",) if _is_unfinished(here) else (), evidence, is_sure)
    if _STEP not in here:
        return None
    arrays = tuple(sorted(folder for folder, names in below.items() if _is_item(names) and not _is_temporary(folder)))
    documents = tuple(sorted(folder for folder, names in below.items() if _JSON in names and not _is_temporary(folder)))
    partial = tuple(folder for folder in arrays if _is_unfinished(below[folder]))
    temporary = tuple(folder for folder in sorted(below) if _is_temporary(folder))
    if not arrays and not temporary:
        return None
    return Items(arrays, documents, (*partial, *temporary), f"{_STEP} and {counted(len(arrays), 'item')}")


def _is_item(names: set[str]) -> bool:
    """Whether files are those of one tree of arrays."""
    if MANIFEST in names or any(_PROCESS.fullmatch(name) for name in names):
        return True
    return any(_ARRAYS.fullmatch(name) for name in names)


def _is_unfinished(names: set[str]) -> bool:
    return MANIFEST not in names and any(_PROCESS.fullmatch(name) for name in names)


def _is_temporary(folder: str) -> bool:
    return _TEMPORARY.search(folder) is not None
