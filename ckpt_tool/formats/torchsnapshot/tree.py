"""A state as the manifest of a snapshot has it: for each rank, entries of dicts, lists, numbers and text by path.

Tensors and other objects are leaves, which the caller describes. Source: torchsnapshot 0.1.0, ``flatten.py`` and
``manifest.py``.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ckpt_tool.formats._items import item_of, rank_of
from ckpt_tool.formats._pickle.nodes import OrderedMap
from ckpt_tool.formats._torch_file.nested import nest
from ckpt_tool.formats.base import WriteRequest
from ckpt_tool.manifest.model import Blob, KeyPath
from ckpt_tool.manifest.sections import section_of
from ckpt_tool.records import dataclass

__all__ = ["CONTAINERS", "Leaf", "Tree", "trees"]

CONTAINERS = frozenset({"dict", "list", "OrderedDict"})
"""Types of entries that have entries below them."""
_PRIMITIVES = (int, str, bool, bytes, float)


@dataclass(frozen=True, slots=True)
class Leaf:
    """What the manifest describes in an entry of its own."""

    tensor: int | None = None
    """Row of the request's tensors."""
    value: Any = None
    """Any other object, where it is no tensor."""
    blob: Blob | None = None
    """The object that ``value`` is, where it is not a part of one."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Entries of one rank."""

    described: tuple[tuple[str, Mapping[str, Any]], ...]
    """Dicts, lists, numbers and text, by path."""
    leaves: tuple[tuple[str, Leaf], ...]
    """By path."""


def trees(request: WriteRequest) -> tuple[Tree, dict[int, Tree]]:
    """What all ranks have; and all that a rank has which has more than that.

    State of a single rank is named for it (``rng@rank3``), or an object that ranks have copies of; what is named for
    a rank that the target lacks keeps that name.

    Raises:
        Unsupported: names that contradict each other.
    """
    shared: list[tuple[KeyPath, Leaf]] = []
    own: dict[int, list[tuple[KeyPath, Leaf]]] = {}
    for section, path, leaf in _entries(request):
        rank, plain = rank_of(path)
        if rank is None or rank >= request.world_size:
            rank, plain = None, path
        item, keys = item_of(section, plain)
        (shared if rank is None else own.setdefault(rank, [])).append(((item, *keys), leaf))
    int_keyed = request.info.get("int_keyed_dicts", ())
    only = {rank: _tree([*shared, *held], int_keyed) for rank, held in own.items()}
    return _tree(shared, int_keyed), only


def _entries(request: WriteRequest) -> Iterator[tuple[str, KeyPath, Leaf]]:
    for row, meta in enumerate(request.tensors):
        yield meta.section, meta.path or (meta.fqn,), Leaf(tensor=row)
    for blob in request.blobs:
        path = blob.path or (blob.fqn,)
        section = section_of(path, blob.fqn)
        yield "other" if section == "model" and len(path) == 1 else section, path, Leaf(value=blob.value, blob=blob)


def _tree(entries: Iterable[tuple[KeyPath, Leaf]], int_keyed: Iterable[str]) -> Tree:
    described: list[tuple[str, Mapping[str, Any]]] = []
    leaves: list[tuple[str, Leaf]] = []
    for item, value in nest(entries, int_keyed=tuple(int_keyed)).items():
        for path, found in _walk(value, _encoded(item)):
            if isinstance(found, Leaf):
                leaves.append((path, found))
            else:
                described.append((path, found))
    return Tree(tuple(described), tuple(leaves))


def _walk(value: Any, path: str) -> Iterator[tuple[str, Mapping[str, Any] | Leaf]]:
    """Entries of a value, containers before what is in them."""
    if isinstance(value, Leaf):
        inner = None if value.tensor is not None else _described(value.value)
        if inner is None:
            yield path, value
        else:
            yield from _walk(value.value, path)
        return
    found = _described(value)
    if found is None:
        yield path, Leaf(value=value)
        return
    yield path, found
    if found["type"] == "list":
        for position, one in enumerate(value):
            yield from _walk(one, f"{path}/{position}")
    elif "keys" in found:
        for key, one in value.items():
            yield from _walk(one, f"{path}/{_encoded(str(key))}")


def _described(value: Any) -> Mapping[str, Any] | None:
    """The entry of a container, a number or text; None for what is an object."""
    kind = type(value)
    if kind is list:
        return {"type": "list"}
    if kind in (dict, OrderedMap):
        keys = list(value)
        if not all(type(key) in (str, int) for key in keys) or len({str(key) for key in keys}) < len(keys):
            return None
        return {"type": "dict" if kind is dict else "OrderedDict", "keys": keys}
    if kind not in _PRIMITIVES:
        return None
    if kind is float:
        text, readable = base64.b64encode(struct.pack("<d", value)).decode(), str(value)
    else:
        text, readable = base64.b64encode(value).decode() if kind is bytes else str(value), None
    return {"type": kind.__name__, "serialized_value": text, "replicated": True, "readable": readable}


def _encoded(key: str) -> str:
    return key.replace("%", "%25").replace("/", "%2F")
