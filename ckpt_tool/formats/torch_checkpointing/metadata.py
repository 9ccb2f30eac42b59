"""``metadata.pkl`` says for each item that can be resharded which file each rank wrote and how each tensor is placed.

It is a pickle of plain containers. Version 2.0 groups by item; 1.0 has one flat table whose keys begin with the item,
and files by rank and item. It lists no byte offsets, and no values that are not tensors.
Source: torch-checkpointing 0.1.1, ``distributed_metadata.py`` and ``checkpoint_layout.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ckpt_tool.errors import FormatError, Unsupported
from ckpt_tool.formats._pickle.load import load_pickle
from ckpt_tool.geometry.absent import absent_numbers
from ckpt_tool.manifest.model import KeyPath
from ckpt_tool.records import dataclass
from ckpt_tool.sizes import counted
from ckpt_tool.storage.urls import check_path

__all__ = ["METADATA_NAME", "Group", "Item", "Layout", "Saved", "is_metadata_head", "load_metadata"]

METADATA_NAME = "metadata.pkl"
SERIALIZATIONS = ("TorchSerialization", "SafetensorsSerialization", "JsonSerialization", "RawSerialization")
_VERSIONS = ("1.0", "2.0")
_MAX_WORLD_SIZE = 10_000_000
# A dict whose first key is one of the four there are.
_HEAD = re.compile(
    rb"\A\x80[\x02-\x05](?:\x95.{8})?\}(?:\x94|q.)?\(?(?:\x8c.|X.{4})"
    rb"(?:metadata|version|world_size|rank_to_layout_info_mappings)",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where one rank's file of an item is."""

    path: str
    serialization: str
    """One of `SERIALIZATIONS`."""


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that hold a tensor by one placement."""

    ranks: tuple[int, ...]
    kind: str
    """``DTensorShardingMetadata``, or ``default_tensor_v1`` with explicit boxes."""
    data: Mapping[str, Any]
    """As recorded."""


@dataclass(frozen=True, slots=True)
class Item:
    """One item that can be resharded."""

    layouts: Mapping[int, Layout]
    """By rank, those of all ranks; the default one where none is recorded."""
    groups: Mapping[KeyPath, tuple[Group, ...]]
    """By path inside of the item."""


@dataclass(frozen=True, slots=True)
class Saved:
    """All of ``metadata.pkl``."""

    version: str
    world_size: int
    items: Mapping[str, Item]


def is_metadata_head(head: bytes) -> bool:
    r"""Whether a file that starts with ``head`` (64 bytes) is such a pickle.

    >>> is_metadata_head(b"\x80\x04\x95abcdefgh}\x94(\x8c\x08metadata\x94}")
    True
    """
    return _HEAD.match(head) is not None


def load_metadata(data: bytes) -> Saved:
    """The content of ``metadata.pkl``, checked for type; nothing in it is imported or called.

    Raises:
        FormatError: not such a pickle, or a field is missing or of the wrong type.
        Unsupported: a version, or a way to store an item, that is not known here.
        UnsafePickle: it asks for something that could run code.
    """
    root = load_pickle(data, where=METADATA_NAME)
    if not isinstance(root, dict) or not {"metadata", "world_size"} <= set(root):
        raise FormatError("expected a dict with metadata, world_size and version", where=METADATA_NAME)
    version, world_size = root.get("version", "1.0"), root["world_size"]
    if version not in _VERSIONS:
        raise Unsupported(
            f"metadata of version {version!r}, expected one of {', '.join(_VERSIONS)}", where=METADATA_NAME
        )
    if type(world_size) is not int or not 1 <= world_size <= _MAX_WORLD_SIZE:
        raise FormatError(f"world_size is {world_size!r}, expected a number of ranks", where=METADATA_NAME)
    try:
        items = _items(root, world_size) if version == "2.0" else _flat_items(root, world_size)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"a field is missing or of the wrong type: {error}", where=METADATA_NAME) from None
    return Saved(version, world_size, items)


def _items(root: Mapping[str, Any], world_size: int) -> dict[str, Item]:
    return {
        _key(name): Item(
            _layouts(name, fields["rank_to_layout_info"], world_size),
            {_path(text): _groups(text, groups) for text, groups in fields["nested_path_to_metadata"].items()},
        )
        for name, fields in root["metadata"].items()
    }


def _flat_items(root: Mapping[str, Any], world_size: int) -> dict[str, Item]:
    groups: dict[str, dict[KeyPath, tuple[Group, ...]]] = {}
    for text, listed in root["metadata"].items():
        name, *path = _path(text)
        groups.setdefault(_key(name), {})[tuple(path)] = _groups(text, listed)
    mappings = root["rank_to_layout_info_mappings"]
    return {
        name: Item(_layouts(name, {rank: mapping.get(name) for rank, mapping in mappings.items()}, world_size), found)
        for name, found in groups.items()
    }


def _key(name: object) -> str:
    if not isinstance(name, str):
        raise FormatError(f"the key of an item is {name!r}, expected text", where=METADATA_NAME)
    return name


def _path(text: object) -> KeyPath:
    """A path is a JSON list of keys, some of them numbers."""
    found = json.loads(text) if isinstance(text, str) else None
    if not isinstance(found, list) or not all(type(key) in (str, int) for key in found):
        raise FormatError(f"{text!r} is no list of keys", where=METADATA_NAME)
    return tuple(found)


def _layouts(name: str, listed: Mapping[Any, Any], world_size: int) -> dict[int, Layout]:
    found = {int(rank): _layout(name, int(rank), fields) for rank, fields in listed.items()}
    if len(found) != world_size or absent_numbers(found, world_size, at_most=1):
        raise FormatError(
            f"files of {counted(len(found), 'rank')} are recorded for {name!r}, expected all of 0 to "
            f"{world_size - 1:,}",
            where=METADATA_NAME,
        )
    paths = {layout.path for layout in found.values()}
    if len(paths) != len(found):
        raise FormatError(f"two ranks have one file of {name!r}", where=METADATA_NAME)
    return found


def _layout(name: str, rank: int, fields: Mapping[str, Any] | None) -> Layout:
    if fields is None:
        return Layout(check_path(f"{name}_{rank}.pt", root=METADATA_NAME), SERIALIZATIONS[0])
    path, kind = fields["file_path"], fields["serialization_format"]["type"]
    if kind not in SERIALIZATIONS:
        raise Unsupported(f"{name!r} is stored by {kind!r}, which is not known here", where=METADATA_NAME)
    if not isinstance(path, str):
        raise FormatError(f"the path of {name!r} is {path!r}, expected text", where=METADATA_NAME)
    return Layout(check_path(path, root=METADATA_NAME), kind)


def _groups(text: str, listed: Any) -> tuple[Group, ...]:
    groups = []
    for fields in listed:
        ranks, sharding = tuple(fields["ranks"]), fields["sharding_metadata"]
        kind, data = sharding["type"], sharding["data"]
        if not all(type(rank) is int for rank in ranks) or not isinstance(data, dict) or not isinstance(kind, str):
            raise FormatError(f"the placement of {text} is of the wrong type", where=METADATA_NAME)
        groups.append(Group(ranks, kind, data))
    return tuple(groups)
