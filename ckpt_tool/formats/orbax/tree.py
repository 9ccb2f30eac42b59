"""The tree of an Orbax item as its JSON files tell it: keys of each leaf, what kind of value it is, how it was sharded.

Nothing here needs JAX: a sharding is read as names of axes and sizes, for however many devices it was.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import Any

from ckpt_tool.errors import FormatError
from ckpt_tool.formats._json import read_json
from ckpt_tool.formats.base import Source
from ckpt_tool.manifest.model import KeyPath, MeshInfo
from ckpt_tool.records import dataclass, field
from ckpt_tool.sizes import counted

__all__ = ["STRINGS", "Leaf", "Tree", "read_mesh", "read_tree"]

_TREE = "_METADATA"
_SHARDING = "_sharding"
STRINGS = "_strings.json"
_SEQUENCE = 1  # key_type of positions in lists and tuples; 2 of dicts
_WITHOUT_ARRAY = frozenset({"None", "Dict", "List", "Tuple", "string"})


@dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of the tree."""

    path: KeyPath
    kind: str
    """``jax.Array``, ``np.ndarray``, ``scalar``, ``string``, ``None``, ``Dict`` ..."""

    @property
    def has_array(self) -> bool:
        """Whether it is stored among the arrays, not in the tree or beside it."""
        return self.kind not in _WITHOUT_ARRAY

    @property
    def name(self) -> str:
        """What its array is called in the store."""
        return ".".join(map(str, self.path))


@dataclass(frozen=True, slots=True)
class Tree:
    """What is known beside the arrays."""

    leaves: Mapping[str, Leaf] = field(default_factory=dict)
    """By name; empty where no file tells the tree."""
    strings: Mapping[str, Any] = field(default_factory=dict)
    written_over: tuple[str, ...] = ()
    """Names of several leaves each, of which Orbax kept the array of the last one: ``x.y`` of keys with a dot too."""
    keeps_fill_values: bool = False
    """Whether chunks that hold the fill value only are stored too, so that a missing one is lost."""


def read_tree(source: Source, folder: str) -> Tree:
    """The tree of the item in ``folder``: a request for each of its two files.

    Raises:
        FormatError: they are damaged.
    """
    prefix = f"{folder}/" if folder else ""
    strings: Any = {}
    if prefix + STRINGS in source.listing:
        strings = read_json(source, prefix + STRINGS)
    if prefix + _TREE not in source.listing:
        return Tree(strings=strings if isinstance(strings, dict) else {})
    where = prefix + _TREE
    document = read_json(source, where)
    try:
        leaves = [
            Leaf(tuple(_key(key) for key in row["key_metadata"]), str(row["value_metadata"]["value_type"]))
            for row in document["tree_metadata"].values()
        ]
        keeps = bool(document.get("store_array_data_equal_to_fill_value", False))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError(f"no description of a tree: {error!r}"[:300], where=where) from error
    times = Counter(leaf.name for leaf in leaves if leaf.has_array)
    return Tree(
        {leaf.name: leaf for leaf in leaves},
        strings if isinstance(strings, dict) else {},
        tuple(name for name, count in times.items() if count > 1),
        keeps,
    )


def _key(described: Mapping[str, Any]) -> str | int:
    key = str(described["key"])
    return int(key) if described.get("key_type") == _SEQUENCE and key.isdecimal() else key


def read_mesh(source: Source, folder: str) -> tuple[MeshInfo | None, dict[str, list[Any]]]:
    """The mesh that most arrays were on, and the partition of each array by name. One request where it is recorded.

    What cannot be understood is left out: arrays lie where they lie, whatever was said about devices.
    """
    path = f"{folder}/{_SHARDING}" if folder else _SHARDING
    if path not in source.listing:
        return None, {}
    partitions: dict[str, list[Any]] = {}
    meshes: dict[tuple[tuple[str, ...], tuple[int, ...]], int] = {}
    try:
        for name, text in read_json(source, path).items():
            said = json.loads(text)
            if said.get("sharding_type") != "NamedSharding":
                continue
            partitions[base64.urlsafe_b64decode(name).decode()] = list(said["partition_spec"])
            mesh = (tuple(map(str, said["axis_names"])), tuple(map(int, said["shape"])))
            meshes[mesh] = meshes.get(mesh, 0) + 1
    except (AttributeError, KeyError, TypeError, ValueError, FormatError):
        return None, {}
    meshes = {mesh: count for mesh, count in meshes.items() if len(mesh[0]) == len(mesh[1]) and prod(mesh[1]) > 0}
    if not meshes:
        return None, partitions
    axes, sizes = max(meshes, key=lambda mesh: meshes[mesh])
    return MeshInfo(axes, sizes, f"{path}: NamedSharding of {counted(meshes[axes, sizes], 'array')}"), partitions
